"""What is made from code and results: docs/patches.md, supported_versions.json and README's table,
supported_mindspeed.json and the tables of docs/mindspeed.md.

python tools/generated_docs.py                  # the pages, from the code and the JSON
python tools/generated_docs.py --matrix FILE    # supported_versions.json, too, from a full run
python tools/generated_docs.py --matrix FILE --mindspeed DIR ...    # supported_mindspeed.json, too:
                                                # of these git checkouts, with which FILE was made
"""

import argparse
import ast
import datetime
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

from replay_patch import __version__
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import TESTED_RELEASES
from replay_patch.megatron.ascend import REFUSED
from replay_patch.patching.registry import patches

ROOT = Path(__file__).absolute().parents[1]
SUPPORTED = ROOT / "supported_versions.json"
MINDSPEED = ROOT / "supported_mindspeed.json"
README = ROOT / "README.md"
MINDSPEED_PAGE = ROOT / "docs" / "mindspeed.md"
_WITHOUT_MINDSPEED = {name: check for name, check in CHECKS.items() if not check.mindspeed}


def patches_page() -> str:
    """The text of docs/patches.md."""
    parts = [
        "# Patches\n\n"
        "Made from `patches/*.py` by `make docs`; a test compares. Whether one is needed is asked "
        "of the installed objects, never of a version number. `REPLAY_PATCH_SKIP=name,name` leaves "
        "patches out; what then would be wrong is refused where it is used.\n"
    ]
    for patch in patches():
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
    wanted = set(itertools.product(TESTED_RELEASES, _WITHOUT_MINDSPEED))
    if missing := sorted(wanted - cells.keys()):
        raise ReplayPatchError(
            f"this is no full run: {len(missing)} cells are missing, among them {missing[0]}"
        )
    if red := sorted(key for key in wanted if cells[key]["status"] not in ("pass", "skip")):
        raise ReplayPatchError(f"{len(red)} cells are red, among them {red[0]}")
    releases = {}
    for release in TESTED_RELEASES:
        mine = {name: cells[release, name] for name in _WITHOUT_MINDSPEED}
        releases[release] = _passed_and_skipped(mine)
    return {"schema": 1, "replay_patch": __version__, "releases": releases}


def _passed_and_skipped(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "pass": [name for name, cell in cells.items() if cell["status"] == "pass"],
        "skip": {n: cell["detail"] for n, cell in cells.items() if cell["status"] == "skip"},
    }


def supported_mindspeed(matrix: dict[str, Any], checkouts: list[Path]) -> dict[str, Any]:
    """The content of supported_mindspeed.json.

    Args:
        matrix: the JSON of `replay-patch matrix --mindspeed-path ...`, with all checks.
        checkouts: the same folders; git checkouts, whose names are those of the cells.

    Returns:
        `date` of today, and `branches`: for each its `commit`, the `megatron` it ran with, what
        passed and was skipped, and which `targets` of ours it patches, too.

    Raises:
        ReplayPatchError: a check is missing, or a cell is red.
    """
    branches = {}
    for folder in checkouts:
        mine = {c["check"]: c for c in matrix["cells"] if c["mindspeed"] == folder.name}
        red = [n for n in CHECKS if mine.get(n, {}).get("status") not in ("pass", "skip")]
        if red:
            raise ReplayPatchError(f"{folder.name}: {len(red)} cells are red or missing: {red[0]}")
        git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        branches[folder.name] = {
            "commit": commit,
            "megatron": mine["activation"]["megatron"],
            **_passed_and_skipped({name: mine[name] for name in CHECKS}),
            "targets": sorted(mindspeed_targets(folder)),
        }
    return {"schema": 1, "date": datetime.date.today().isoformat(), "branches": branches}


def mindspeed_targets(folder: Path) -> set[str]:
    """The places of ours that a MindSpeed checkout registers patches for, with any feature."""
    registered: set[str] = set()
    for file in (folder / "mindspeed").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_patch":
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    registered.add(first.value)
    return {place for place in registered if _patches_at(place)}


def _patches_at(place: str) -> list[str]:
    """Our patches that change a place, or the class whose method it is."""
    ours = {t.replace(":", "."): p.name for p in patches() for t in p.targets}
    names = {name for target, name in ours.items() if f"{place}.".startswith(f"{target}.")}
    return sorted(names)


def supported_table(data: dict[str, Any]) -> str:
    """The README's table: checks as rows; releases of which all is alike share a column."""
    return _table(data["releases"], _WITHOUT_MINDSPEED)


def _table(found: dict[str, Any], checks: dict[str, Any]) -> str:
    """Checks as rows, with the reasons of what was skipped below."""

    def outcome(name: str) -> tuple[list[str], dict[str, str]]:
        return found[name]["pass"], found[name]["skip"]

    columns = [list(group) for _, group in itertools.groupby(found, key=outcome)]
    lines = [
        "| check | " + " | ".join(", ".join(column) for column in columns) + " | proves that |",
        "| --- |" + " :---: |" * len(columns) + " --- |",
    ]
    for name, check in checks.items():
        shown = ["pass" if name in found[c[0]]["pass"] else "skip" for c in columns]
        lines.append(f"| `{name}` | {' | '.join(shown)} | {check.sentence} |")
    reasons = {(n, reason) for one in found.values() for n, reason in one["skip"].items()}
    notes = [f"- `{name}`: {reason}." for name, reason in sorted(reasons)]
    return "\n".join(
        [*lines, "", "A skipped check says nothing about these columns, because:", "", *notes, ""]
    )


def mindspeed_results(data: dict[str, Any]) -> str:
    """The result table of docs/mindspeed.md."""
    branches = data["branches"]
    lines = [f"Run on {data['date']}, on a CPU, with these checkouts:", ""]
    lines += [
        "| branch | commit | Megatron-core | passed | skipped |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, one in branches.items():
        lines.append(
            f"| `{name}` | `{one['commit'][:12]}` | {one['megatron']} | {len(one['pass'])} | "
            f"{len(one['skip'])} |"
        )
    return "\n".join([*lines, "", _table(branches, CHECKS)])


def mindspeed_overlap(data: dict[str, Any]) -> str:
    """What we patch and MindSpeed patches, too."""
    lines = ["| place | our patches | MindSpeed branches |", "| --- | --- | --- |"]
    branches = data["branches"]
    for place in sorted({place for one in branches.values() for place in one["targets"]}):
        having = [name for name, one in branches.items() if place in one["targets"]]
        shown = "all" if len(having) == len(branches) else ", ".join(having)
        ours = ", ".join(f"`{name}`" for name in _patches_at(place))
        lines.append(f"| `{place}` | {ours} | {shown} |")
    return "\n".join([*lines, ""])


def refused_features() -> str:
    """The features of MindSpeed's that replay is refused with."""
    lines = ["| option | refused, because |", "| --- | --- |"]
    for one in REFUSED:
        options = " or ".join(f"`{o} {one.value}`" if one.value else f"`{o}`" for o in one.options)
        lines.append(f"| {options} | {one.why} |")
    return "\n".join([*lines, ""])


def with_block(page: str, name: str, content: str) -> str:
    """A page with the block of that name made anew."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, found, rest = page.partition(begin)
    if not found:
        raise ReplayPatchError(f"the page has no block {name!r}")
    return before + begin + "\n" + content + "\n" + end + rest.partition(end)[2]


def with_table(readme: str, data: dict[str, Any]) -> str:
    """The README's text with its table made anew."""
    return with_block(readme, "supported_versions.json", supported_table(data))


def with_mindspeed(page: str, data: dict[str, Any]) -> str:
    """The text of docs/mindspeed.md with its tables made anew."""
    page = with_block(page, "targets", mindspeed_overlap(data))
    page = with_block(page, "refused", refused_features())
    return with_block(page, "supported_mindspeed.json", mindspeed_results(data))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/generated_docs.py")
    parser.add_argument("--matrix", type=Path, help="JSON of a full run, from make matrix")
    parser.add_argument(
        "--mindspeed", type=Path, nargs="+", help="checkouts, if it is of MindSpeed"
    )
    args = parser.parse_args()
    if args.matrix is not None:
        matrix = json.loads(args.matrix.read_text())
        if args.mindspeed:
            checkouts = [folder.absolute() for folder in args.mindspeed]
            path, made = MINDSPEED, supported_mindspeed(matrix, checkouts)
        else:
            path, made = SUPPORTED, supported(matrix)
        path.write_text(json.dumps(made, indent=1) + "\n")
    (ROOT / "docs" / "patches.md").write_text(patches_page())
    README.write_text(with_table(README.read_text(), json.loads(SUPPORTED.read_text())))
    page = MINDSPEED_PAGE.read_text()
    MINDSPEED_PAGE.write_text(with_mindspeed(page, json.loads(MINDSPEED.read_text())))


if __name__ == "__main__":
    main()
