"""`Patch`, what it changes (`Transaction`), and the `Ledger` that knows the state of each.

How a change is verified: by identity. What stands at the place now is ours, or a wrapper around
ours (reached along `__wrapped__`), or it is somebody else's and the patch is lost. A marker on a
class or function would outlive the patch it marks.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_patch.hooks import complete
from replay_patch.probe import Probe
from replay_patch.rebinding import content
from replay_patch.settings import Settings

_log = logging.getLogger(__name__)

ACTIVE = "active"
NOT_NEEDED = "not needed"
WAITING = "waiting"
SKIPPED = "skipped"
FAILED = "failed"
LOST = "lost"

OPTIONAL = frozenset({"mindspeed", "skyrl", "verl"})
"""Libraries that a job may do without: their patches are not needed until they are imported."""


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

    working: Callable[[Probe], bool] | None = None
    """Whether it still works where other code is around ours; None: it does."""

    @property
    def library(self) -> str:
        """What is patched: "megatron", or one of `OPTIONAL`."""
        return self.modules[-1].partition(".")[0]


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
            return self.original is not _ABSENT and _splice_out(
                self.read(), self.ours, self.original
            )
        if self.original is _ABSENT:
            self.delete()
        else:
            self.write(self.original)
        return True


@dataclass
class _Splice:
    """A function put in the place of the innermost one of an attribute's chain of wrappers."""

    where: str
    original: Any
    ours: Any
    read: Callable[[], Any]
    outer: Any
    cell: Any

    def holds(self) -> bool:
        return _reaches(self.read(), self.ours)

    def undo(self) -> bool:
        if self.cell.cell_contents is not self.ours:
            return False
        self.cell.cell_contents = self.outer.__wrapped__ = self.original
        return True


@dataclass
class Transaction:
    """Notes every change of one patch, so that all of them can be verified and taken back."""

    changes: list[_Change | _Splice] = field(default_factory=list)
    earlier: list[list[_Change | _Splice]] = field(default_factory=list)
    """What was lost before it was applied again. MindSpeed may bring it back: it puts what it once
    found in a place there again when a feature goes off."""
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    """Run on undo, after the changes are taken back."""

    def set(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute of a class or module; an inherited one is left alone on undo."""
        self._change(
            _place(owner, attribute),
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

    def wrap_everywhere(
        self, module: Any, name: str, make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """`wrap` for a function of a module, wherever importers have bound it by value."""
        original = vars(module)[name]
        self.set_everywhere(name, original, functools.wraps(original, updated=())(make(original)))

    def innermost(self, cls: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a method, underneath all wrappers of other code that can be followed.

        Where the innermost wrapper does not hold what it wraps in its closure, ours comes around
        all of them.
        """
        *around, inner = chain(vars(cls)[name])
        outer = around[-1] if around else None
        cells = _cells(outer, inner)
        if len(cells) != 1:
            self.set(cls, name, make(vars(cls)[name]))
            return
        ours, cell = make(inner), cells[0]
        cell.cell_contents = around[-1].__wrapped__ = ours
        where, read = _place(cls, name), functools.partial(vars(cls).get, name, _ABSENT)
        self.changes.append(_Splice(where, inner, ours, read, outer, cell))

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
        generations = [
            {c.where: c for c in changes}  # one patch may set a place twice: the last counts
            for changes in (self.changes, *self.earlier)
        ]
        held = {c.where for last in generations for c in last.values() if c.holds()}
        return [where for where in generations[0] if where not in held]

    def undo(self, keep: int = 0) -> list[str]:
        """Take back all but the first `keep` changes, as far as they are still ours, last first.

        Returns:
            The places that are not ours any more.
        """
        kept = [c.where for c in reversed(self.changes[keep:]) if not c.undo()]
        del self.changes[keep:]
        if not keep:
            brought_back = [c for changes in reversed(self.earlier) for c in reversed(changes)]
            undone = {c.where for c in brought_back if c.undo()}
            held = [c.where for c in brought_back if c.where not in undone and c.holds()]
            kept = [where for where in kept if where not in undone] + held
            self.earlier.clear()
        while self.cleanups and not keep:
            self.cleanups.pop()()
        return kept

    def retire(self, keep: int) -> None:
        """Make room for applying the patch again, on top of the code that has replaced it."""
        stuck = [c for c in reversed(self.changes[keep:]) if not c.undo()][::-1]
        self.changes[keep:] = [c for c in stuck if c.holds()]  # under another's wrapper
        if lost := [c for c in stuck if c not in self.changes]:
            self.earlier.append(lost)

    def lift(self, strangers: Sequence[Any]) -> None:
        """Take back what is directly around one of these functions of other code."""
        for change in reversed(self.changes):
            if any(change.original is s for s in strangers):
                change.undo()

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


def _splice_out(current: Any, ours: Any, original: Any) -> bool:
    """Put the original in the place of ours, inside the wrapper of other code that holds it."""
    for outer in chain(current):
        if getattr(outer, "__wrapped__", None) is ours:
            cells = _cells(outer, ours)
            for cell in cells:
                cell.cell_contents = outer.__wrapped__ = original
            return bool(cells)
    return False


def _place(owner: Any, attribute: str) -> str:
    name = getattr(owner, "__qualname__", owner.__name__)
    return f"{getattr(owner, '__module__', '')}.{name}.{attribute}".lstrip(".")


def _cells(function: Any, value: Any) -> list[Any]:
    """The cells of its closure that hold the value."""
    return [c for c in getattr(function, "__closure__", None) or () if content(c) is value]


def _reaches(current: Any, ours: Any) -> bool:
    function = getattr(ours, "__func__", ours)  # strangers wrap what is in a staticmethod
    return any(found is ours or found is function for found in chain(current))


def chain(function: Any) -> Iterator[Any]:
    """A function and what it wraps (`__wrapped__`), outermost first, each once."""
    seen: set[int] = set()  # a chain of strangers may be a ring
    while function is not _ABSENT and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", _ABSENT)


def module_of(function: Any) -> str:
    """The module whose code is called. (functools.wraps copies `__module__` from another.)"""
    while isinstance(function, functools.partial):
        function = function.func
    names = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return str(names.get("__name__", ""))


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
        self._untried = set(self._patches)
        self._states = {
            name: (
                NOT_NEEDED if patch.library in OPTIONAL else WAITING,
                f"{' or '.join(patch.modules)} is not imported",
            )
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
            self._untried.discard(name)
            again = ""
            if self._states[name][0] == ACTIVE:
                gone = transaction.lost()
                if not gone and (patch.working is None or patch.working(self.probe)):
                    return
                again = f"; reinstalled, because other code had replaced {', '.join(gone)}"
                if not gone:
                    again = "; reinstalled, because other code around it answered for it"
                transaction.retire(self._armed[name])
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

    def lift(self, strangers: Sequence[Any]) -> None:
        """Let other code find its own functions again where ours are directly around them."""
        with self._lock:
            for name in reversed(self._patches):
                self._transactions[name].lift(strangers)

    def states(self) -> tuple[PatchState, ...]:
        """The state of every patch now; an active one is verified first.

        One that was not tried though its module is there (a stranger's hook failed, and wrapt then
        forgot all hooks of that module) is tried now.
        """
        with self._lock:
            for name, patch in self._patches.items():
                if name in self._untried and any(map(complete, patch.modules)):
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
