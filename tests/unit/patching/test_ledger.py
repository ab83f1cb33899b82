"""The ledger and its transactions, on classes of the tests' own."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from replay_patch.patching.ledger import Ledger
from replay_patch.patching.patch import ACTIVE, FAILED, LOST, NOT_NEEDED, SKIPPED, WAITING, Patch
from replay_patch.patching.transaction import Transaction
from replay_patch.settings import Settings


def make_target() -> Any:
    class Base:
        def inherited(self) -> str:
            return "inherited"

    class Target(Base):
        def own(self) -> str:
            return "own"

        @staticmethod
        def static() -> str:
            return "static"

    return Target


def make_patch(apply: Callable[[Transaction], None], **over: Any) -> Patch:
    fields: dict[str, Any] = {
        "name": "example",
        "library": "megatron",
        "requires": "megatron.example",
        "targets": ("example:Target",),
        "modules": ("example",),
        "why": "",
        "how": "",
        "upstream": "none",
        "remove_when": "",
        "needed": lambda: (True, "it is there"),
        "apply": apply,
    }
    return Patch(**fields | over)


def attempted(patch: Patch, settings: Settings | None = None) -> Ledger:
    ledger = Ledger((patch,), settings or Settings())
    ledger.apply_if_needed(patch.name)
    return ledger


def ours(self: Any) -> str:
    return "ours"


def test_undo_gives_back_the_very_objects() -> None:
    target = make_target()
    before = dict(vars(target))
    transaction = Transaction()

    for name in ("own", "static", "inherited", "new"):
        transaction.set(target, name, ours)
    kept = transaction.undo()

    assert kept == []
    assert dict(vars(target)) == before
    assert vars(target)["static"] is before["static"]


def test_undo_leaves_and_reports_what_somebody_else_put_there() -> None:
    target = make_target()
    transaction = Transaction()
    transaction.set(target, "own", ours)

    target.own = theirs = lambda self: "theirs"
    kept = transaction.undo()

    assert target.own is theirs
    assert len(kept) == 1
    assert kept[0].endswith("Target.own")


def test_mappings_and_lists_are_taken_back() -> None:
    mapping, items = {"kept": 1}, [1]
    transaction = Transaction()

    transaction.item(mapping, "kept", 2, "mapping")
    transaction.item(mapping, "added", 3, "mapping")
    transaction.append(items, 4, "items")
    assert (mapping, items) == ({"kept": 2, "added": 3}, [1, 4])
    transaction.undo()

    assert (mapping, items) == ({"kept": 1}, [1])


def test_a_patch_that_fails_half_way_changes_nothing() -> None:
    target = make_target()
    before = dict(vars(target))

    def apply(transaction: Transaction) -> None:
        transaction.set(target, "own", ours)
        raise KeyError("a signature we have never seen")

    (state,) = attempted(make_patch(apply)).states()

    assert dict(vars(target)) == before
    assert state.state == FAILED
    assert state.reason == "KeyError: 'a signature we have never seen'"


def test_a_failing_question_is_a_failed_patch() -> None:
    def needed() -> tuple[bool, str]:
        raise LookupError("nothing to patch")

    (state,) = attempted(make_patch(lambda transaction: None, needed=needed)).states()

    assert (state.state, state.reason) == (FAILED, "LookupError: nothing to patch")


def test_what_is_there_before_an_import_survives_a_failed_apply_and_goes_on_undo() -> None:
    items: list[str] = []

    def apply(transaction: Transaction) -> None:
        raise KeyError

    patch = make_patch(
        apply, before_import=lambda transaction: transaction.append(items, "early", "items")
    )
    ledger = attempted(patch)

    assert items == ["early"]
    ledger.undo()
    assert items == []


@pytest.mark.parametrize(
    "over, settings, expected",
    [
        ({}, Settings(), ACTIVE),
        ({"needed": lambda: (False, "it has it")}, Settings(), NOT_NEEDED),
        ({}, Settings(skip=frozenset({"example"})), SKIPPED),
        (
            {"needed": lambda: (False, "it has it")},
            Settings(skip=frozenset({"example"})),
            NOT_NEEDED,
        ),
    ],
)
def test_states(over: dict[str, Any], settings: Settings, expected: str) -> None:
    target = make_target()
    patch = make_patch(lambda transaction: transaction.set(target, "own", ours), **over)

    ledger = attempted(patch, settings)

    assert ledger.states()[0].state == expected
    assert (target.own is ours) == (expected == ACTIVE)


def test_a_patch_waits_until_its_module_is_there() -> None:
    ledger = Ledger((make_patch(lambda transaction: None),), Settings())

    assert ledger.states()[0].state == WAITING


def test_a_patch_under_somebody_elses_wrapper_is_active() -> None:
    target = make_target()
    ledger = attempted(make_patch(lambda transaction: transaction.set(target, "own", ours)))

    target.own = functools.wraps(target.own)(lambda self: "theirs")

    assert ledger.states()[0].state == ACTIVE


def test_a_staticmethod_under_somebody_elses_wrapper_is_active() -> None:
    target = make_target()
    patch = make_patch(lambda transaction: transaction.wrap(target, "static", lambda f: lambda: 1))
    ledger = attempted(patch)

    target.static = staticmethod(functools.wraps(target.static)(lambda: "theirs"))

    assert ledger.states()[0].state == ACTIVE


def test_an_overwritten_patch_is_lost_and_named() -> None:
    target = make_target()
    ledger = attempted(make_patch(lambda transaction: transaction.set(target, "own", ours)))

    target.own = lambda self: "theirs"
    (state,) = ledger.states()

    assert state.state == LOST
    assert "Target.own" in state.reason


def test_a_ring_of_wrappers_ends() -> None:
    target = make_target()
    ledger = attempted(make_patch(lambda transaction: transaction.set(target, "own", ours)))

    def stranger(self: Any) -> None: ...

    stranger.__wrapped__ = stranger  # type: ignore[attr-defined]
    target.own = stranger

    assert ledger.states()[0].state == LOST


def test_attempts_from_many_threads_apply_once() -> None:
    applied: list[int] = []
    patch = make_patch(lambda transaction: applied.append(1))
    ledger = Ledger((patch,), Settings())

    threads = [
        threading.Thread(target=ledger.apply_if_needed, args=(patch.name,)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert applied == [1]


def test_two_patches_of_one_name_are_refused() -> None:
    patch = make_patch(lambda transaction: None)

    with pytest.raises(ValueError, match="two patches have one name"):
        Ledger((patch, patch), Settings())


def test_an_overwritten_patch_is_reinstalled_on_top_and_says_so() -> None:
    target = make_target()

    def apply(transaction: Transaction) -> None:
        original = target.own
        wrapper = functools.wraps(original)(lambda self: f"ours over {original(self)}")
        transaction.set(target, "own", wrapper)

    patch = make_patch(apply)
    ledger = attempted(patch)
    target.own = lambda self: "theirs"

    ledger.apply_if_needed(patch.name)
    (state,) = ledger.states()

    assert target().own() == "ours over theirs"
    assert state.state == ACTIVE
    assert state.reason.startswith("it is there; reinstalled, because other code had replaced ")
    assert state.reason.endswith("Target.own")


def test_a_patch_in_place_is_not_applied_twice() -> None:
    target, applied = make_target(), []

    def apply(transaction: Transaction) -> None:
        applied.append(1)
        transaction.set(target, "own", functools.wraps(target.own)(ours))

    patch = make_patch(apply)
    ledger = attempted(patch)
    target.own = functools.wraps(target.own)(lambda self: "theirs, around ours")

    ledger.apply_if_needed(patch.name)

    assert applied == [1]
    assert target().own() == "theirs, around ours"


# --- with other code's wrappers around ours -------------------------------------------------------


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any) -> str:
        return f"wrapped {function(self)}"

    return wrapper


def test_undo_takes_ours_out_of_a_wrapper_of_other_code() -> None:
    target, transaction = make_target(), Transaction()
    transaction.set(target, "own", ours)
    target.own = wrapped(wrapped(target.own))
    assert target().own() == "wrapped wrapped ours"

    assert transaction.undo() == []

    assert target().own() == "wrapped wrapped own"


def test_innermost_goes_underneath_the_wrappers_and_comes_out_again() -> None:
    target, transaction = make_target(), Transaction()
    target.own = outer = wrapped(wrapped(target.own))

    transaction.wrap_innermost(target, "own", lambda inner: lambda self: f"ours {inner(self)}")

    assert target.own is outer
    assert target().own() == "wrapped wrapped ours own"
    assert transaction.lost() == []
    target.own = lambda self: "another"
    assert transaction.lost() != []
    assert transaction.undo() == []
    target.own = outer
    assert target().own() == "wrapped wrapped own"


def test_innermost_comes_around_a_wrapper_that_does_not_hold_what_it_wraps() -> None:
    target, transaction = make_target(), Transaction()

    def opaque(self: Any) -> str:
        return "opaque"

    target.own = functools.wraps(target.own)(opaque)

    transaction.wrap_innermost(target, "own", lambda inner: lambda self: f"ours {inner(self)}")

    assert target().own() == "ours opaque"
    assert transaction.undo() == []
    assert target().own() == "opaque"


def test_what_comes_back_of_ours_is_not_lost_and_is_undone() -> None:
    """MindSpeed keeps what it found in a place, replaces it, and puts it there again later."""
    target = make_target()
    original = vars(target)["own"]

    def apply(transaction: Transaction) -> None:
        transaction.wrap(target, "own", lambda function: lambda self: f"ours {function(self)}")

    ledger = attempted(make_patch(apply))
    found = target.own
    target.own = lambda self: "theirs"
    ledger.apply_if_needed("example")
    assert target().own() == "ours theirs"

    target.own = found

    assert ledger.states()[0].state == ACTIVE
    assert ledger.undo() == []
    assert vars(target)["own"] is original


def test_an_optional_library_is_not_needed_until_it_is_imported() -> None:
    patch = make_patch(
        lambda transaction: None, modules=("mindspeed.patch_utils",), requires="mindspeed"
    )

    state = Ledger((patch,), Settings()).states()[0]

    assert (state.state, state.reason) == (NOT_NEEDED, "mindspeed.patch_utils is not imported")
