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

JOB = interpreters.TESTS / "programs" / "patching" / "torch_npu_first.py"
STANDINS = Path(replay_patch.__file__).parent / "matrix" / "standins"


def job(*before: str, args: tuple[str, ...] = ()) -> Any:
    command = ("-W", "ignore", *before, str(JOB), *args)
    done = interpreters.python(*command, path=STANDINS, REPLAY_PATCH="1")
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
    "before, args, expected",
    [
        ((), ("auto",), "replay_patch.auto"),
        (("-m", "replay_patch.cli", "run", "--", sys.executable), (), "replay-patch run"),
    ],
    ids=["auto", "run"],
)
def test_either_way_out_activates_all(
    before: tuple[str, ...], args: tuple[str, ...], expected: str
) -> None:
    active, trigger, problems, refused = job(*before, args=args)

    assert [active, trigger, problems] == [True, expected, []]
    assert refused.startswith("RouteError: ")  # a model without routers; the plugin is there
