"""What has moved under the patches, on a real release and on copies of it that somebody edited."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import pytest
from helpers import interpreters

from replay_patch.drift import comparison
from replay_patch.matrix import fingerprints_on_bed

MOE = "megatron.core.transformer.moe"
ROUTER, UTILS = f"{MOE}.router", f"{MOE}.moe_utils"
MTP = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock"
UNWRITTEN = {"PYTHONDONTWRITEBYTECODE": "1"}  # a linked __pycache__ is the real one


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This release as links, but for the files that are edited."""
    root = tmp_path_factory.mktemp("edited")
    core = root / "megatron" / "core"
    shutil.copytree(Path(megatron.core.__file__).parent, core, copy_function=link)

    def edit(name: str, pattern: str, new: str) -> None:
        path = core / "transformer" / name
        text, count = re.subn(pattern, new, path.read_text(), flags=re.M)
        assert count, f"{name} has no {pattern}"
        path.unlink()
        path.write_text(text)

    edit("moe/router.py", r"def set_layer_number\(self, layer_number: int", r"\g<0>, colour=None")
    edit("moe/router.py", r"def apply_z_loss\(", "def apply_zeta_loss(")
    edit("moe/moe_utils.py", r"\Z", "\n\ndel group_limited_topk\n")
    edit(
        "multi_token_prediction.py", r"^    def _build_layers\(.*\n", r"\g<0>        assert True\n"
    )
    # Nothing that matters: comments, docstrings, spaces.
    edit("transformer_block.py", r"^( *)# .*$", r"\1# another comment\n")
    edit("transformer_block.py", r'^( *)""".', r"\g<0>Other words. ")
    edit("transformer_block.py", r" == ", "  ==  ")
    return root


def link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


@dataclass(frozen=True)
class Report:
    text: str
    data: dict[str, Any]


@pytest.fixture(scope="module")
def doctor(edited: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What `replay-patch doctor` says of the edited copy."""
    out = tmp_path_factory.mktemp("doctor") / "doctor.json"
    main = f"from replay_patch import cli; cli.main(['doctor', '--json', {str(out)!r}])"
    env = {"REPLAY_PATCH": "1", **UNWRITTEN}
    done = interpreters.python("-W", "ignore", "-c", interpreters.BED + main, path=edited, **env)
    return Report(done.stdout, json.loads(out.read_text()))


def test_nothing_drifts_on_a_tested_release(megatron_version: str) -> None:
    found = fingerprints_on_bed.examine()

    assert found == {"megatron": f"megatron-core {megatron_version}", "drift": [], "problem": None}


@pytest.mark.mechanism
@pytest.mark.parametrize(
    "patch, target, what",
    [
        (
            "router_objects",
            f"{ROUTER}:Router.set_layer_number",
            "takes a new parameter `colour` (default None)",
        ),
        (
            "router_objects",
            f"{ROUTER}:TopKRouter",
            "has a new method `apply_zeta_loss({})`; no longer has the method `apply_z_loss`",
        ),
        ("router_topk", f"{UTILS}:group_limited_topk", "is gone"),
        (
            "mtp_depth",
            f"{MTP}._build_layers",
            "its code has changed (same signature, same names)",
        ),
    ],
)
def test_an_edit_is_told_in_words_with_its_patch(
    doctor: Report, patch: str, target: str, what: str
) -> None:
    (item,) = (i for i in doctor.data["drift"] if i["target"] == target)

    said = re.sub(r"\(self, logits.*?\)`", "({})`", item["what"])  # its parameters grew
    assert (item["patch"], said) == (patch, what)


@pytest.mark.mechanism
def test_nothing_else_is_told(doctor: Report) -> None:
    assert doctor.data["drift_problem"] is None
    assert {i["target"] for i in doctor.data["drift"]} == {
        f"{ROUTER}:Router.set_layer_number",
        f"{ROUTER}:TopKRouter",
        f"{ROUTER}:TopKRouter.apply_z_loss",
        f"{UTILS}:group_limited_topk",
        f"{MTP}._build_layers",
    }


@pytest.mark.mechanism
def test_the_doctor_tells_it_and_does_not_call_it_a_problem(doctor: Report) -> None:
    assert comparison.describe(doctor.data["drift"]) in doctor.text
    assert not [p for p in doctor.data["problems"] if "differs" in p]
