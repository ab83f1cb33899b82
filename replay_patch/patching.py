"""`Patch`, what it changes (`Transaction`), and the `Ledger` that knows the state of each.

How a change is verified: by identity. What stands at the place now is ours, or a wrapper around
ours (reached along `__wrapped__`), or it is somebody else's and the patch is lost. A marker on a
class or function would outlive the patch it marks.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from replay_patch.hooks import complete
from replay_patch.probe import Probe
from replay_patch.settings import Settings

_log = logging.getLogger(__name__)

ACTIVE = "active"
NOT_NEEDED = "not needed"
WAITING = "waiting"
SKIPPED = "skipped"
FAILED = "failed"
LOST = "lost"


@dataclass(frozen=True)
class Patch:
    """One correction of an installed library, with the reasons a maintainer needs to keep it."""

    name: str
    targets: tuple[str, ...]
    """What is changed, as `module:qualname`; a release may lack some of them."""
    modules: tuple[str, ...]
    """Defining modules: when one of them is completely imported, the patch is tried."""
    why: str
    how: str
    upstream: str
    """A link to the upstream change or report, or "none"."""
    remove_when: str
    needed: Callable[[Probe], tuple[bool, str]]
    """Whether the live objects need it, and what was found, in words."""
    apply: Callable[["Transaction"], None]
    vital: bool = False
    """Without it a replay would be wrong or ignored."""
    arm: Callable[["Transaction"], None] | None = None
    """What has to be in place before any of `modules` is imported."""


@dataclass(frozen=True)
class PatchState:
    """One row of the ledger. `state` is one of the constants above; `reason` is for people."""

    name: str
    state: str
    reason: str
    targets: tuple[str, ...]


# --- what a patch changes ---------------------------------------------------------------------

_ABSENT: Any = object()


@dataclass
class _Change:
    """One value put where another one was. `read`, `write` and `delete` reach the place."""

    where: str
    original: Any
    ours: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]
    delete: Callable[[], None]

    def holds(self) -> bool:
        return _reaches(self.read(), self.ours)

    def undo(self) -> bool:
        """Put the original back. False if what stands there is not ours to replace."""
        if self.read() is not self.ours:
            return False
        if self.original is _ABSENT:
            self.delete()
        else:
            self.write(self.original)
        return True


@dataclass
class Transaction:
    """Notes every change of one patch, so that all of them can be verified and taken back."""

    changes: list[_Change] = field(default_factory=list)
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    """Run on undo, after the changes are taken back."""

    def set(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute of a class or module; an inherited one is left alone on undo."""
        self._change(
            f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', owner.__name__)}"
            f".{attribute}".lstrip("."),
            value,
            read=lambda: vars(owner).get(attribute, _ABSENT),
            write=lambda v: setattr(owner, attribute, v),
            delete=lambda: delattr(owner, attribute),
        )

    def wrap(self, cls: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a method by `make(original)`, which keeps name, signature and staticmethod.

        A plain function: torch.compile silently bypasses wrapt's FunctionWrapper.
        """
        original = vars(cls)[name]
        function = getattr(original, "__func__", original)
        made: Any = functools.wraps(function, updated=())(make(function))
        self.set(cls, name, staticmethod(made) if isinstance(original, staticmethod) else made)

    def set_everywhere(self, name: str, original: Any, value: Any) -> None:
        """Set every module attribute `name` that is `original`: importers bind names by value.

        On undo also in the modules that were imported since.
        """

        def bound_to(found: Any) -> list[Any]:
            modules = list(sys.modules.values())
            return [m for m in modules if getattr(m, "__dict__", {}).get(name) is found]

        for module in bound_to(original):
            self.set(module, name, value)

        def give_back() -> None:
            for module in bound_to(value):
                setattr(module, name, original)

        self.cleanups.append(give_back)

    def item(self, mapping: MutableMapping[str, Any], key: str, value: Any, where: str) -> None:
        """Set one item of a mapping, such as `sys.modules`."""
        self._change(
            f"{where}[{key!r}]",
            value,
            read=lambda: mapping.get(key, _ABSENT),
            write=lambda v: mapping.__setitem__(key, v),
            delete=lambda: mapping.__delitem__(key),
        )

    def append(self, items: list[Any], value: Any, where: str) -> None:
        """Add to a list, such as `sys.meta_path`."""

        def present() -> Any:
            return value if any(v is value for v in items) else _ABSENT

        self._change(where, value, present, items.append, lambda: items.remove(value))

    def lost(self) -> list[str]:
        """Places where what we put no longer is, not even under somebody's wrapper."""
        last = {c.where: c for c in self.changes}  # one patch may set a place twice
        return [where for where, change in last.items() if not change.holds()]

    def undo(self, keep: int = 0) -> list[str]:
        """Take back all but the first `keep` changes, as far as they are still ours, last first.

        Returns:
            The places that are not ours any more.
        """
        kept = [c.where for c in reversed(self.changes[keep:]) if not c.undo()]
        del self.changes[keep:]
        while self.cleanups and not keep:
            self.cleanups.pop()()
        return kept

    def _change(
        self,
        where: str,
        value: Any,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        delete: Callable[[], None],
    ) -> None:
        change = _Change(where, read(), value, read, write, delete)
        write(value)
        self.changes.append(change)


def _reaches(current: Any, ours: Any) -> bool:
    function = getattr(ours, "__func__", ours)  # strangers wrap what is in a staticmethod
    seen: set[int] = set()  # a __wrapped__ chain of strangers may be a ring
    while current is not ours and current is not function:
        if id(current) in seen or current is _ABSENT:
            return False
        seen.add(id(current))
        current = getattr(current, "__wrapped__", _ABSENT)
    return True


# --- the state of each patch ------------------------------------------------------------------


class Ledger:
    """The patches of one activation. Safe to call from several threads; never raises."""

    def __init__(self, patches: tuple[Patch, ...], settings: Settings) -> None:
        self.probe = Probe()
        self._lock = threading.RLock()  # an apply may import a module whose hook comes back here
        self._patches = {p.name: p for p in patches}
        if len(self._patches) != len(patches):
            raise ValueError(f"two patches have one name: {sorted(p.name for p in patches)}")
        self._skip = settings.skip
        self._states = {
            name: (WAITING, f"{' or '.join(patch.modules)} is not imported")
            for name, patch in self._patches.items()
        }
        self._transactions = {name: Transaction() for name in self._patches}
        for name, patch in self._patches.items():
            if patch.arm is not None and name not in self._skip:
                patch.arm(self._transactions[name])
        self._armed = {name: len(t.changes) for name, t in self._transactions.items()}

    def attempt(self, name: str) -> None:
        """Apply a patch if it is needed and neither in place nor skipped; whole or not at all.

        One that other code has overwritten is taken back and applied again, on top of that code.
        """
        with self._lock:
            patch, transaction = self._patches[name], self._transactions[name]
            again = ""
            if self._states[name][0] == ACTIVE:
                gone = transaction.lost()
                if not gone:
                    return
                again = f"; reinstalled, because other code had replaced {', '.join(gone)}"
                transaction.undo(self._armed[name])
            before = len(transaction.changes)
            try:
                needed, found = patch.needed(self.probe)
                if not needed:
                    self._states[name] = NOT_NEEDED, found
                elif name in self._skip:
                    self._states[name] = SKIPPED, f"named in REPLAY_PATCH_SKIP ({found})"
                else:
                    patch.apply(transaction)
                    self._states[name] = ACTIVE, found + again
            except Exception as error:  # noqa: BLE001 - an import hook must not raise
                transaction.undo(before)
                self._states[name] = FAILED, f"{type(error).__name__}: {error}"
                found = self._states[name][1]
                _log.warning("patch %s failed on %s: %s", name, self.probe.megatron(), found)
                _log.debug("patch %s failed here", name, exc_info=True)
            else:
                _log.debug("patch %s: %s (%s)", name, *self._states[name])

    def states(self) -> tuple[PatchState, ...]:
        """The state of every patch now; an active one is verified first.

        One that still waits though its module is there (a stranger's hook failed, and wrapt then
        forgot all hooks of that module) is tried.
        """
        with self._lock:
            for name, patch in self._patches.items():
                if self._states[name][0] == WAITING and any(map(complete, patch.modules)):
                    self.attempt(name)
            return tuple(
                PatchState(name, *self._verified(name), self._patches[name].targets)
                for name in self._patches
            )

    def _verified(self, name: str) -> tuple[str, str]:
        state, reason = self._states[name]
        gone = self._transactions[name].lost() if state == ACTIVE else []
        return (LOST, f"replaced by other code: {', '.join(gone)}") if gone else (state, reason)

    def undo(self) -> list[str]:
        """Take back all patches, last first; returns the places that are no longer ours."""
        with self._lock:
            kept: list[str] = []
            for name in reversed(self._patches):
                kept += self._transactions[name].undo()
            return kept
