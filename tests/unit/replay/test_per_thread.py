"""`PerThread`: each thread has its own value, and what a block sets is gone after it."""

import threading

import pytest

from replay_patch.replay.per_thread import PerThread


def test_a_block_gives_back_what_was_there() -> None:
    value = PerThread[str]()

    with value.during("outer"):
        with value.during("inner"):
            assert value.get() == "inner"
        assert value.get() == "outer"

    assert value.get() is None
    assert value.by_thread == {}


def test_so_does_one_that_is_left_by_an_exception() -> None:
    value = PerThread[str]()

    with pytest.raises(ZeroDivisionError), value.during("value"):
        raise ZeroDivisionError

    assert value.by_thread == {}


def test_another_thread_has_a_value_of_its_own() -> None:
    value, found = PerThread[str](), list[str | None]()
    value.put("here")

    def run() -> None:
        found.append(value.get())
        with value.during("there"):
            found.append(value.get())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [None, "there"]
    assert value.pop() == "here"
    assert value.pop() is None
