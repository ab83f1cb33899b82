"""`Transaction`: what a patch changes, so that all of it can be verified and taken back.

How a change is verified: by identity. What stands at the place now is ours, or a wrapper around
ours (reached along `__wrapped__`), or it is somebody else's and the patch is lost. A marker on a
class or function would outlive the patch it marks.
"""

import functools
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_patch.patching.wrappers import ABSENT, cells_with, chain, reaches


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
        return reaches(self.read(), self.ours)

    def undo(self) -> bool:
        """Put the original back. False if what stands there is not ours to replace."""
        if self.read() is not self.ours:
            return self.original is not ABSENT and _splice_out(
                self.read(), self.ours, self.original
            )
        if self.original is ABSENT:
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
        return reaches(self.read(), self.ours)

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
            read=lambda: vars(owner).get(attribute, ABSENT),
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
        cells = cells_with(outer, inner)
        if len(cells) != 1:
            self.set(cls, name, make(vars(cls)[name]))
            return
        ours, cell = make(inner), cells[0]
        cell.cell_contents = around[-1].__wrapped__ = ours
        where, read = _place(cls, name), functools.partial(vars(cls).get, name, ABSENT)
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
            read=lambda: mapping.get(key, ABSENT),
            write=lambda v: mapping.__setitem__(key, v),
            delete=lambda: mapping.__delitem__(key),
        )

    def append(self, items: list[Any], value: Any, where: str) -> None:
        """Add to a list, such as `sys.meta_path`."""

        def present() -> Any:
            return value if any(v is value for v in items) else ABSENT

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
            cells = cells_with(outer, ours)
            for cell in cells:
                cell.cell_contents = outer.__wrapped__ = original
            return bool(cells)
    return False


def _place(owner: Any, attribute: str) -> str:
    name = getattr(owner, "__qualname__", owner.__name__)
    return f"{getattr(owner, '__module__', '')}.{name}.{attribute}".lstrip(".")
