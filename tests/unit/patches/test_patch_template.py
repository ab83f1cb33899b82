"""docs/examples/patch_template.py is a patch that can be applied, taken back, and copied."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from replay_patch.patching.ledger import Ledger
from replay_patch.patching.patch import ACTIVE, FAILED, NOT_NEEDED, Patch
from replay_patch.settings import Settings

TEMPLATE = Path(__file__).parents[3] / "docs" / "examples" / "patch_template.py"


@pytest.fixture
def patch() -> Patch:
    spec = importlib.util.spec_from_file_location("patch_template", TEMPLATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    template: Patch = module.PATCH
    return template


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The library of the template: a module, and one that has bound its function by value."""
    losses, training = ModuleType("acme.losses"), ModuleType("acme.training")
    vars(losses)["mean_loss"] = vars(training)["mean_loss"] = faulty
    monkeypatch.setitem(sys.modules, "acme.losses", losses)
    monkeypatch.setitem(sys.modules, "acme.training", training)
    return losses


def faulty(total: float, num_tokens: int, scale: float = 1.0) -> float:
    return scale * total / num_tokens


def attempted(patch: Patch) -> tuple[Ledger, str, str]:
    """(the ledger, the patch's state, the reason) after it was tried."""
    ledger = Ledger((patch,), Settings())
    ledger.apply_if_needed(patch.name)
    [state] = ledger.states()
    return ledger, state.state, state.reason


def test_the_template_is_applied_where_it_is_needed_and_taken_back(
    patch: Patch, acme: ModuleType
) -> None:
    ledger, state, reason = attempted(patch)

    assert (state, reason) == (ACTIVE, "mean_loss() divides by zero tokens")
    for module in (acme, sys.modules["acme.training"]):
        assert module.mean_loss(0.0, num_tokens=0) == 0.0
        assert module.mean_loss(6.0, 3, scale=2.0) == 4.0
    assert ledger.undo() == []
    assert acme.mean_loss is sys.modules["acme.training"].mean_loss is faulty


def test_the_template_does_nothing_where_the_library_is_right(
    patch: Patch, acme: ModuleType
) -> None:
    def right(total: float, num_tokens: int) -> float:
        return total / max(num_tokens, 1)

    vars(acme)["mean_loss"] = right
    _, state, reason = attempted(patch)

    assert (state, reason) == (NOT_NEEDED, "mean_loss() takes zero tokens")
    assert acme.mean_loss is right


def test_the_template_says_what_it_did_not_expect(patch: Patch, acme: ModuleType) -> None:
    def other(total: float, **options: Any) -> float:
        return total / options["num_tokens"]

    vars(acme)["mean_loss"] = other
    _, state, reason = attempted(patch)

    assert state == FAILED
    assert reason.startswith("LookupError: mean_loss() has no num_tokens")
    assert acme.mean_loss is other


def test_the_template_is_named_as_its_file(patch: Patch) -> None:
    assert patch.name == TEMPLATE.stem
