"""`PerThread`: a value that each thread may have, such as the router whose forward runs there."""

import threading
from types import TracebackType
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class PerThread(Generic[_Value]):
    """A value for each thread that has been given one.

    `by_thread` (thread -> its value) is empty while no thread has one: code that torch.compile
    looks into asks this first, as that is all it can ask cheaply.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, _Value] = {}

    def get(self) -> _Value | None:
        """The value of this thread."""
        return self.by_thread.get(threading.get_ident())

    def put(self, value: _Value) -> None:
        """Give this thread a value, until `pop`."""
        self.by_thread[threading.get_ident()] = value

    def pop(self) -> _Value | None:
        """Take the value of this thread away."""
        return self.by_thread.pop(threading.get_ident(), None)

    def during(self, value: _Value) -> "_During[_Value]":
        """A with-block in which this thread has the value; after it, what it had before."""
        return _During(self.by_thread, value)


class _During(Generic[_Value]):
    """A class, because a generator would take three times as long in every router call."""

    __slots__ = ("_before", "_by_thread", "_thread", "_value")

    def __init__(self, by_thread: dict[int, _Value], value: _Value) -> None:
        self._by_thread, self._value = by_thread, value

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._before = self._by_thread.get(self._thread)
        self._by_thread[self._thread] = self._value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is None:
            del self._by_thread[self._thread]
        else:
            self._by_thread[self._thread] = self._before
