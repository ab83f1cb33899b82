"""What is made from code and results: docs/patches.md, supported_versions.json, README's table.

python -m replay_patch.docs                      # the pages, from the code and the JSON
python -m replay_patch.docs --matrix FILE        # supported_versions.json, too, from a full run
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from replay_patch import __version__
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import TESTED_RELEASES
from replay_patch.patches import PATCHES

ROOT = Path(__file__).absolute().parents[1]
SUPPORTED = ROOT / "supported_versions.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- supported_versions.json: begin -->\n", "<!-- supported_versions.json: end -->\n"


def patches_page() -> str:
    """The text of docs/patches.md."""
    parts = [
        "# Patches\n\n"
        "Made from `patches/*.py` by `make docs`; a test compares. Whether one is needed is asked "
        "of the installed objects, never of a version number. `REPLAY_PATCH_SKIP=name,name` leaves "
        "patches out; what then would be wrong is refused where it is used.\n"
    ]
    for patch in PATCHES:
        targets = "\n".join(f"- `{target}`" for target in patch.targets)
        upstream = f"<{patch.upstream}>" if patch.upstream.startswith("http") else patch.upstream
        parts.append(
            f"## {patch.name}\n\n{targets}\n\n**Why.** {patch.why}\n\n**How.** {patch.how}\n\n"
            f"**Upstream.** {upstream}\n\n**Remove when** {patch.remove_when}.\n"
        )
    return "\n".join(parts)


def supported(matrix: dict[str, Any]) -> dict[str, Any]:
    """The content of supported_versions.json.

    Args:
        matrix: the JSON of `replay-patch matrix --megatron all`.

    Returns:
        `releases`: for each, the checks that `pass`, and those to `skip` with their reasons.

    Raises:
        ReplayPatchError: a check or a tested release is missing, or a cell is red.
    """
    cells = {(c["megatron"], c["check"]): c for c in matrix["cells"] if c["mindspeed"] is None}
    wanted = set(itertools.product(TESTED_RELEASES, CHECKS))
    if missing := sorted(wanted - cells.keys()):
        raise ReplayPatchError(
            f"this is no full run: {len(missing)} cells are missing, among them {missing[0]}"
        )
    if red := sorted(key for key in wanted if cells[key]["status"] not in ("pass", "skip")):
        raise ReplayPatchError(f"{len(red)} cells are red, among them {red[0]}")
    releases = {}
    for release in TESTED_RELEASES:
        mine = {name: cells[release, name] for name in CHECKS}
        releases[release] = {
            "pass": [name for name, cell in mine.items() if cell["status"] == "pass"],
            "skip": {n: cell["detail"] for n, cell in mine.items() if cell["status"] == "skip"},
        }
    return {"schema": 1, "replay_patch": __version__, "releases": releases}


def supported_table(data: dict[str, Any]) -> str:
    """The README's table: checks as rows; releases of which all is alike share a column."""
    releases = data["releases"]
    columns = [list(g) for _, g in itertools.groupby(releases, key=lambda r: releases[r])]
    lines = [
        "| check | " + " | ".join(", ".join(column) for column in columns) + " | proves that |",
        "| --- |" + " :---: |" * len(columns) + " --- |",
    ]
    for name, check in CHECKS.items():
        shown = ["pass" if name in releases[c[0]]["pass"] else "skip" for c in columns]
        lines.append(f"| `{name}` | {' | '.join(shown)} | {check.sentence} |")
    reasons = {n: reason for found in releases.values() for n, reason in found["skip"].items()}
    notes = [f"- `{name}`: {reason}." for name, reason in sorted(reasons.items())]
    return "\n".join(
        [*lines, "", "A skipped check says nothing about these releases, because:", "", *notes, ""]
    )


def with_table(readme: str, data: dict[str, Any]) -> str:
    """The README's text with its table made anew."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + "\n" + supported_table(data) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m replay_patch.docs")
    parser.add_argument("--matrix", type=Path, help="JSON of a full run, from make matrix")
    args = parser.parse_args()
    if args.matrix is not None:
        data = supported(json.loads(args.matrix.read_text()))
        SUPPORTED.write_text(json.dumps(data, indent=1) + "\n")
    (ROOT / "docs" / "patches.md").write_text(patches_page())
    README.write_text(with_table(README.read_text(), json.loads(SUPPORTED.read_text())))


if __name__ == "__main__":
    main()
