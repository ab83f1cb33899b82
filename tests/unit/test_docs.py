"""Pages made from code and measurements agree with what they are made from."""

import copy
import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import generated_docs
import matrix_results
import pytest
from helpers.matrix_runs import OF_MEGATRON

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import TESTED_RELEASES
from replay_patch.patching.registry import patches

ROOT = Path(__file__).parents[2]
BRANCHES = [
    *(f"{version}_core_r0.12.1" for version in ("2.1.0", "2.2.0", "2.3.0", "26.0.0", "26.1.0")),
    *(f"core_r{version}" for version in ("0.14.0", "0.15.3", "0.16.0", "0.17.0", "0.18.0")),
    "master",
]
MINDSPEED = json.loads((ROOT / "supported_mindspeed.json").read_text())
SUPPORTED = json.loads((ROOT / "supported_versions.json").read_text())


def test_patches_page_is_made_from_the_patches() -> None:
    assert (ROOT / "docs" / "patches.md").read_text() == generated_docs.patches_page()


def test_a_patch_says_why_there_is_nothing_upstream() -> None:
    patch = patches()[0]

    for bare in ("none", "none:", "none known."):
        with pytest.raises(ReplayPatchError, match="expected a link, or 'none: ' and the reason"):
            generated_docs.upstream(dataclasses.replace(patch, upstream=bare))
    reason = "none: it follows from this plugin's own needs"
    assert generated_docs.upstream(dataclasses.replace(patch, upstream=reason)) == reason


def test_the_compatibility_table_is_made_from_supported_versions() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()

    assert generated_docs.with_table(page, SUPPORTED) == page
    less = copy.deepcopy(SUPPORTED)
    less["releases"]["0.12.1"]["pass"].remove("replay")
    assert generated_docs.with_table(page, less) != page


def test_supported_versions_are_of_every_check_and_tested_release() -> None:
    assert list(SUPPORTED["releases"]) == list(TESTED_RELEASES)
    for found in SUPPORTED["releases"].values():
        assert sorted([*found["pass"], *found["skip"]]) == sorted(OF_MEGATRON)


def test_the_mindspeed_page_is_made_from_its_results_and_the_refused_features() -> None:
    page = (ROOT / "docs" / "mindspeed.md").read_text()

    assert generated_docs.with_mindspeed(page, MINDSPEED) == page
    less = copy.deepcopy(MINDSPEED)
    less["branches"]["core_r0.15.3"]["pass"].remove("replay")
    assert generated_docs.with_mindspeed(page, less) != page


def test_mindspeed_results_are_of_every_check_on_every_branch() -> None:
    assert list(MINDSPEED["branches"]) == BRANCHES
    for found in MINDSPEED["branches"].values():
        assert sorted([*found["pass"], *found["skip"]]) == sorted(CHECKS)


def test_mindspeed_targets_are_read_from_its_code(tmp_path: Path) -> None:
    package = tmp_path / "mindspeed" / "features"
    package.mkdir(parents=True)
    place = "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__"
    lines = ["def register(manager):", f"    manager.register_patch({place!r}, None)"]
    lines += ["    manager.register_patch('megatron.core.jit.x', None)"]
    (package / "one.py").write_text("\n".join(lines))

    assert matrix_results.mindspeed_targets(tmp_path) == {place}


def test_the_workflow_in_the_docs_is_our_own() -> None:
    workflow = (ROOT / ".github" / "workflows" / "matrix.yml").read_text()

    assert f"```yaml\n{workflow}```\n" in (ROOT / "docs" / "ci.md").read_text()


def full_run() -> dict[str, Any]:
    cells = [
        {"megatron": r, "mindspeed": None, "check": c, "status": "pass", "detail": ""}
        for r in TESTED_RELEASES
        for c in OF_MEGATRON
    ]
    return {"cells": cells}


def test_supported_versions_come_from_a_full_green_run_only() -> None:
    matrix = full_run()
    assert matrix_results.supported(matrix)["releases"]["0.12.1"]["pass"] == OF_MEGATRON

    matrix["cells"][3]["status"] = "fail"
    with pytest.raises(ReplayPatchError, match="1 cells are red"):
        matrix_results.supported(matrix)
    del matrix["cells"][3]
    with pytest.raises(ReplayPatchError, match="no full run: 1 cells are missing"):
        matrix_results.supported(matrix)


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"`((?:docs|patches|replay_patch|tests|tools|benchmarks)/[\w./-]*)`", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    modules = re.findall(r"\breplay_patch(?:\.[a-z]\w*)+", text)

    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [name for name in links if not (page.parent / name).exists()] == []
    assert [name for name in modules if not resolves(name)] == []


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or what a module has."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:depth]))
        except ImportError:
            continue
        for part in parts[depth:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_the_sections_that_pages_link_to_are_there() -> None:
    for page in PAGES:
        for target, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            linked = (page.parent / target).read_text() if target else page.read_text()
            headings = re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
            slugs = {
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            assert section in slugs, f"{page.name}: {target}#{section}"


def test_the_readme_is_for_the_first_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
