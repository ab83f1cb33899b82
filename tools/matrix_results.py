"""From the JSON of `replay-patch matrix` to supported_versions.json and supported_mindspeed.json.

They are made from full runs without a red cell only; `generated_docs.py` makes tables from them.
"""

import ast
import datetime
import itertools
import subprocess
from pathlib import Path
from typing import Any

from replay_patch import __version__
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import TESTED_RELEASES
from replay_patch.patching.registry import patches

OF_MEGATRON = {name: check for name, check in CHECKS.items() if not check.mindspeed}
"""The checks that run without MindSpeed."""


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
    wanted = set(itertools.product(TESTED_RELEASES, OF_MEGATRON))
    if missing := sorted(wanted - cells.keys()):
        raise ReplayPatchError(
            f"this is no full run: {len(missing)} cells are missing, among them {missing[0]}"
        )
    if red := sorted(key for key in wanted if cells[key]["status"] not in ("pass", "skip")):
        raise ReplayPatchError(f"{len(red)} cells are red, among them {red[0]}")
    releases = {}
    for release in TESTED_RELEASES:
        mine = {name: cells[release, name] for name in OF_MEGATRON}
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
    return {place for place in registered if patches_at(place)}


def patches_at(place: str) -> list[str]:
    """Our patches that change a place, or the class whose method it is."""
    ours = {t.replace(":", "."): p.name for p in patches() for t in p.targets}
    names = {name for target, name in ours.items() if f"{place}.".startswith(f"{target}.")}
    return sorted(names)
