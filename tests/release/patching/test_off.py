"""Off, or on and unused: every output and gradient is bitwise that of an unpatched process."""

from typing import Any

import pytest
from helpers import interpreters
from programs.patching import off


@pytest.fixture(scope="module")
def unpatched() -> Any:
    return interpreters.run(off.trained, {}, bed=True, REPLAY_PATCH="0")


@pytest.mark.parametrize(
    "options", [{}, {"enable_routing_replay": True}], ids=["nothing", "enable_routing_replay"]
)
def test_unused_replay_changes_no_bit(unpatched: Any, options: dict[str, Any]) -> None:
    patched = interpreters.run(off.trained, options, bed=True, REPLAY_PATCH="1")

    assert patched == unpatched


def test_the_digests_tell_models_apart(unpatched: Any) -> None:
    assert len({str(v) for v in unpatched.values()}) == len(unpatched) == 4
