"""Writes what is made from code and results: docs/patches.md, and the tables of
docs/compatibility.md and docs/mindspeed.md.

python tools/generated_docs.py                  # the pages, from the code and the JSON
python tools/generated_docs.py --matrix FILE    # supported_versions.json, too, from a full run
python tools/generated_docs.py --matrix FILE --mindspeed DIR ...    # supported_mindspeed.json, too:
                                                # of these git checkouts, with which FILE was made
"""

import argparse
import importlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from matrix_results import OF_MEGATRON, patches_at, supported, supported_mindspeed

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.checks import CHECKS
from replay_patch.megatron.ascend import REFUSED
from replay_patch.patching.patch import REPLAYING, Patch
from replay_patch.patching.registry import patches

ROOT = Path(__file__).absolute().parents[1]
SUPPORTED = ROOT / "supported_versions.json"
MINDSPEED = ROOT / "supported_mindspeed.json"
PATCHES_PAGE = ROOT / "docs" / "patches.md"
COMPATIBILITY_PAGE = ROOT / "docs" / "compatibility.md"
MINDSPEED_PAGE = ROOT / "docs" / "mindspeed.md"


# --- docs/patches.md ----------------------------------------------------------------------------


def patches_page() -> str:
    """The text of docs/patches.md: the patches of each library, in the order of application.

    Raises:
        ReplayPatchError: a patch does not say why there is no upstream change or report.
    """
    parts = [
        "# Patches\n\n"
        "Made by `make docs` from the files in `patches/`; a test compares. Whether a patch is "
        "needed is asked of the installed objects, never of a version number; one that is not "
        "needed changes nothing. `replay-patch patches` shows the state of each.\n\n"
        "`REPLAY_PATCH_SKIP=name,name` leaves patches out. Without a *vital* one, replay would be "
        "wrong or ignored: it is refused with `PatchNotActive` unless each vital patch is in place "
        "or not needed. How to write a patch: `docs/writing-a-patch.md`.\n"
    ]
    by_library: dict[str, list[Patch]] = {}
    for patch in patches():
        by_library.setdefault(patch.library, []).append(patch)
    for library, members in by_library.items():
        parts.append(_library_index(library, members))
        parts += [_patch_entry(patch) for patch in members]
    return "\n".join(parts)


def _library_index(library: str, members: list[Patch]) -> str:
    about = importlib.import_module(f"replay_patch.patches.{library}").__doc__ or ""
    lines = [f"## {library}", "", about.strip(), "", "| patch | vital | what it is about |"]
    lines.append("| --- | :---: | --- |")
    for patch in members:
        module = importlib.import_module(f"replay_patch.patches.{library}.{patch.name}")
        subject = " ".join((module.__doc__ or "").strip().partition("\n\n")[0].split())
        vital = "yes" if patch.vital else ""
        lines.append(f"| [`{patch.name}`](#{patch.name}) | {vital} | {subject} |")
    return "\n".join([*lines, ""])


def _patch_entry(patch: Patch) -> str:
    rows = [
        ("changes", _by_module(patch.targets)),
        ("is tried when this is imported", _listed(patch.modules)),
        ("comes after", _listed(patch.after)),
        ("relies on, unchanged", _by_module(patch.relies_on)),
        ("fails without it", _checks(patch)),
        ("vital", "yes: replay is refused without it" if patch.vital else ""),
        ("upstream", upstream(patch)),
        ("remove when", patch.remove_when),
    ]
    table = "\n".join(f"| {title} | {text} |" for title, text in rows if text)
    return (
        f"### {patch.name}\n\n**Why.** {patch.why}\n\n**How.** {patch.how}\n\n"
        f"| | |\n| --- | --- |\n{table}\n"
    )


def _listed(names: tuple[str, ...]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


def _by_module(targets: tuple[str, ...]) -> str:
    """Targets `module:qualname`, a line for each module; `module:` is the list of its classes."""
    lines: dict[str, list[str]] = {}
    for target in targets:
        module, _, qualname = target.partition(":")
        lines.setdefault(module, []).append(f"`{qualname}`" if qualname else "which classes it has")
    return "<br>".join(f"`{module}`: {', '.join(names)}" for module, names in lines.items())


def _checks(patch: Patch) -> str:
    """The checks of `replay-patch matrix` that turn red without a patch that is needed."""
    names = [f"`{name}`" for name in patch.checks if name != REPLAYING]
    if patch.vital or REPLAYING in patch.checks:
        names.append("every check that records or replays")
    return ", ".join(names)


def upstream(patch: Patch) -> str:
    """The upstream change or report, or the reason why none can be named.

    Raises:
        ReplayPatchError: it is "none" without a reason.
    """
    text = patch.upstream.strip()
    if re.fullmatch(r"none( known)?[\s:.]*", text):
        raise ReplayPatchError(
            f"patch {patch.name}: upstream is {text!r}: expected a link, or 'none: ' and the reason"
        )
    return f"<{text}>" if text.startswith("http") else text


# --- tables of checks ---------------------------------------------------------------------------


def supported_table(data: dict[str, Any]) -> str:
    """Checks as rows, for docs/compatibility.md; releases with the same results share a column."""
    return _table(data["releases"], OF_MEGATRON)


def _table(results: dict[str, Any], checks: dict[str, Any]) -> str:
    """Checks as rows, with the reasons of what was skipped below."""

    def outcome(name: str) -> tuple[list[str], dict[str, str]]:
        return results[name]["pass"], results[name]["skip"]

    columns = [list(group) for _, group in itertools.groupby(results, key=outcome)]
    lines = [
        "| check | " + " | ".join(", ".join(column) for column in columns) + " | proves that |",
        "| --- |" + " :---: |" * len(columns) + " --- |",
    ]
    for name, check in checks.items():
        shown = ["pass" if name in results[c[0]]["pass"] else "skip" for c in columns]
        lines.append(f"| `{name}` | {' | '.join(shown)} | {check.sentence} |")
    reasons = {(n, reason) for result in results.values() for n, reason in result["skip"].items()}
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
    for name, result in branches.items():
        lines.append(
            f"| `{name}` | `{result['commit'][:12]}` | {result['megatron']} | "
            f"{len(result['pass'])} | {len(result['skip'])} |"
        )
    return "\n".join([*lines, "", _table(branches, CHECKS)])


def mindspeed_overlap(data: dict[str, Any]) -> str:
    """What we patch and MindSpeed patches, too."""
    lines = ["| place | our patches | MindSpeed branches |", "| --- | --- | --- |"]
    branches = data["branches"]
    for place in sorted({place for result in branches.values() for place in result["targets"]}):
        having = [name for name, result in branches.items() if place in result["targets"]]
        shown = "all" if len(having) == len(branches) else ", ".join(having)
        ours = ", ".join(f"`{name}`" for name in patches_at(place))
        lines.append(f"| `{place}` | {ours} | {shown} |")
    return "\n".join([*lines, ""])


def refused_features() -> str:
    """The features of MindSpeed's that replay is refused with."""
    lines = ["| option | refused, because |", "| --- | --- |"]
    for feature in REFUSED:
        value = f" {feature.value}" if feature.value else ""
        options = " or ".join(f"`{option}{value}`" for option in feature.options)
        lines.append(f"| {options} | {feature.why} |")
    return "\n".join([*lines, ""])


# --- pages --------------------------------------------------------------------------------------


def with_block(page: str, name: str, content: str) -> str:
    """A page with the block of that name made anew."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, marker, rest = page.partition(begin)
    if not marker:
        raise ReplayPatchError(f"the page has no block {name!r}")
    return before + begin + "\n" + content + "\n" + end + rest.partition(end)[2]


def with_table(page: str, data: dict[str, Any]) -> str:
    """The text of docs/compatibility.md with its table made anew."""
    return with_block(page, "supported_versions.json", supported_table(data))


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
    PATCHES_PAGE.write_text(patches_page())
    page = COMPATIBILITY_PAGE.read_text()
    COMPATIBILITY_PAGE.write_text(with_table(page, json.loads(SUPPORTED.read_text())))
    page = MINDSPEED_PAGE.read_text()
    MINDSPEED_PAGE.write_text(with_mindspeed(page, json.loads(MINDSPEED.read_text())))


if __name__ == "__main__":
    main()
