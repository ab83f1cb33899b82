"""`Transaction`: what a patch changes, so that all of it can be verified and taken back.

A change is verified by identity. What stands at the place now is ours, or a wrapper around ours
(reached along `__wrapped__`), or it is somebody else's and the patch is lost. A marker on a class
or function would outlive the patch it marks.
"""

import functools
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_patch.patching import probe
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

    def is_in_place(self) -> bool:
        return reaches(self.read(), self.ours)

    def undo(self) -> bool:
        """Put the original back. False if what stands there is not ours to replace."""
        if self.read() is not self.ours:
            return self.original is not ABSENT and _replace_inside(
                self.read(), self.ours, self.original
            )
        if self.original is ABSENT:
            self.delete()
        else:
            self.write(self.original)
        return True


@dataclass
class _InnermostChange:
    """A function put underneath other code's wrappers of a method, where they hold the original."""

    where: str
    original: Any
    ours: Any
    read: Callable[[], Any]
    wrapper: Any
    """What is directly around ours."""
    cell: Any
    """The cell of that wrapper's closure that holds what it calls."""

    def is_in_place(self) -> bool:
        return reaches(self.read(), self.ours)

    def undo(self) -> bool:
        if self.cell.cell_contents is not self.ours:
            return False
        self.cell.cell_contents = self.wrapper.__wrapped__ = self.original
        return True


@dataclass
class Transaction:
    """Notes every change of one patch, so that all of them can be verified and taken back."""

    changes: list[_Change | _InnermostChange] = field(default_factory=list)
    replaced: list[list[_Change | _InnermostChange]] = field(default_factory=list)
    """What other code had replaced each time that the patch was applied again. MindSpeed may bring
    it back: when a feature goes off, it restores what it once found in a place."""
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    """Run on undo, after the changes are taken back."""

    def set(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute of a class or module; an inherited one is left alone on undo."""
        self._change(
            _path(owner, attribute),
            value,
            read=lambda: vars(owner).get(attribute, ABSENT),
            write=lambda v: setattr(owner, attribute, v),
            delete=lambda: delattr(owner, attribute),
        )

    def wrap(self, cls: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a method by `make(original)`, which keeps name, signature and staticmethod.
        A plain function: torch.compile silently bypasses wrapt's FunctionWrapper."""
        original = vars(cls)[name]
        function = getattr(original, "__func__", original)
        wrapper: Any = functools.wraps(function, updated=())(make(function))
        self.set(
            cls, name, staticmethod(wrapper) if isinstance(original, staticmethod) else wrapper
        )

    def wrap_everywhere(
        self, module: Any, name: str, make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """`wrap` for a function of a module, wherever importers have bound it by value."""
        original = vars(module)[name]
        self.set_everywhere(name, original, functools.wraps(original, updated=())(make(original)))

    def wrap_innermost(
        self, cls: Any, name: str, make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """Replace a method, underneath all wrappers of other code that can be followed; around all
        of them where the innermost does not hold what it wraps in its closure."""
        *wrappers, original = chain(vars(cls)[name])
        wrapper = wrappers[-1] if wrappers else None
        cells = cells_with(wrapper, original)
        if len(cells) != 1:
            self.set(cls, name, make(vars(cls)[name]))
            return
        [cell] = cells
        ours = make(original)
        cell.cell_contents = wrappers[-1].__wrapped__ = ours
        where, read = _path(cls, name), functools.partial(vars(cls).get, name, ABSENT)
        self.changes.append(_InnermostChange(where, original, ours, read, wrapper, cell))

    def set_everywhere(self, name: str, original: Any, value: Any) -> None:
        """Set every module attribute `name` that is `original`: importers bind names by value.
        Undo reaches also the modules that were imported since."""

        def modules_with(function: Any) -> list[Any]:
            modules = list(sys.modules.values())
            return [m for m in modules if getattr(m, "__dict__", {}).get(name) is function]

        for module in modules_with(original):
            self.set(module, name, value)

        def give_back() -> None:
            for module in modules_with(value):
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
        applications = [
            {c.where: c for c in changes}  # one patch may set a place twice: the last counts
            for changes in (self.changes, *self.replaced)
        ]
        in_place = {c.where for last in applications for c in last.values() if c.is_in_place()}
        return [where for where in applications[0] if where not in in_place]

    def undo(self, keep: int = 0) -> list[str]:
        """Take back all but the first `keep` changes, as far as they are still ours, last first.
        Returns the places that are not ours any more."""
        kept = [c.where for c in reversed(self.changes[keep:]) if not c.undo()]
        del self.changes[keep:]
        if keep:
            return kept
        brought_back = [c for changes in reversed(self.replaced) for c in reversed(changes)]
        undone = {c.where for c in brought_back if c.undo()}
        kept = [where for where in kept if where not in undone]
        kept += [c.where for c in brought_back if c.where not in undone and c.is_in_place()]
        self.replaced.clear()
        while self.cleanups:
            self.cleanups.pop()()
        return kept

    def prepare_to_apply_again(self, keep: int) -> None:
        """Take back all but the first `keep` changes, and remember those that cannot be: the patch
        then comes on top of the code that has replaced it."""
        not_undone = [c for c in reversed(self.changes[keep:]) if not c.undo()][::-1]
        self.changes[keep:] = [c for c in not_undone if c.is_in_place()]  # under another's wrapper
        if replaced := [c for c in not_undone if c not in self.changes]:
            self.replaced.append(replaced)

    def uncover(self, functions: Sequence[Any]) -> None:
        """Take back what is directly around one of these functions of other code."""
        for change in reversed(self.changes):
            if any(change.original is function for function in functions):
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


def wrappers_at(
    makers: Mapping[str, Callable[[Any], Callable[..., Any]]],
) -> Callable[[Transaction], None]:
    """An `apply` that wraps what is at each of these targets by `make(original)`: the method of a
    class, or a function wherever it is bound."""

    def apply(transaction: Transaction) -> None:
        for target, make in makers.items():
            module, _, name = target.partition(":")
            if "." in name:
                cls, _, method = target.rpartition(".")
                transaction.wrap(probe.find(cls), method, make)
            else:
                transaction.wrap_everywhere(sys.modules[module], name, make)

    return apply


def _replace_inside(current: Any, ours: Any, original: Any) -> bool:
    """Put the original in the place of ours, inside the wrapper of other code that holds it."""
    for wrapper in chain(current):
        if getattr(wrapper, "__wrapped__", None) is ours:
            cells = cells_with(wrapper, ours)
            for cell in cells:
                cell.cell_contents = wrapper.__wrapped__ = original
            return bool(cells)
    return False


def _path(owner: Any, attribute: str) -> str:
    name = getattr(owner, "__qualname__", owner.__name__)
    return f"{getattr(owner, '__module__', '')}.{name}.{attribute}".lstrip(".")
