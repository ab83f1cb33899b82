"""Scripts that import torch_npu first: it keeps torch from loading plugins (see docs/npu.md).

The stand-in for torch_npu does that as the real one. `tests/install` has the same without Megatron.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import interpreters

import replay_patch

pytestmark = pytest.mark.mechanism

STANDINS = Path(replay_patch.__file__).parent / "matrix" / "standins"
JOB = """
import json
import torch_npu
import torch
from replay_patch.megatron import no_triton
no_triton.provide()
import torch_npu.contrib.transfer_to_npu
from megatron.core.models.gpt import GPTModel
import replay_patch
status = replay_patch.status()
try:
    replay_patch.recording(torch.nn.Linear(1, 1))
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
print(json.dumps([status.active, status.trigger, status.problems, refused]))
"""


def job(*before: str, code: str = JOB) -> Any:
    done = interpreters.python("-W", "ignore", *before, "-c", code, path=STANDINS, REPLAY_PATCH="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_alone_it_is_said_and_use_is_refused() -> None:
    active, trigger, problems, refused = job()

    assert [active, trigger] == [False, None]
    assert len(problems) == 1
    assert "importing torch_npu first does that" in problems[0]
    assert "`replay-patch run -- ...`" in problems[0]
    assert "import replay_patch.auto" in problems[0]
    assert refused.startswith("PatchNotActive: ")


@pytest.mark.parametrize(
    "before, code, expected",
    [
        ((), "import replay_patch.auto\n" + JOB, "replay_patch.auto"),
        (("-m", "replay_patch.cli", "run", "--", sys.executable), JOB, "replay-patch run"),
    ],
    ids=["auto", "run"],
)
def test_either_way_out_activates_all(before: tuple[str, ...], code: str, expected: str) -> None:
    active, trigger, problems, refused = job(*before, code=code)

    assert [active, trigger, problems] == [True, expected, []]
    assert refused.startswith("RouteError: ")  # a model without routers; the plugin is there
