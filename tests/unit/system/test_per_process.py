"""Objects that each process opens itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from qdo.errors import UsageError
from qdo.system.per_process import PerProcess


class Thing:
    """A thing with the state of a connection."""

    def __init__(self) -> None:
        self.over = False
        self.closed = False

    def close(self) -> None:
        self.closed = True


def in_child(check: Callable[[], bool]) -> bool:
    """Return what a function returns in a forked child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if check() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_one_object_is_opened_at_the_first_use() -> None:
    opened: list[Thing] = []

    def open() -> Thing:
        opened.append(Thing())
        return opened[-1]

    held = PerProcess(open)
    assert opened == []
    assert held.get() is held.get() is opened[0]
    assert len(opened) == 1


def test_an_object_that_is_over_is_opened_again() -> None:
    held = PerProcess(Thing, lambda thing: thing.over)
    first = held.get()
    assert held.get() is first
    first.over = True
    assert held.get() is not first


def test_close_closes_the_object_and_the_next_use_opens_another() -> None:
    held = PerProcess(Thing)
    first = held.get()
    held.close()
    held.close()
    assert first.closed
    assert held.get() is not first


def test_a_child_opens_its_own_object() -> None:
    held = PerProcess(Thing)
    first = held.get()
    assert in_child(lambda: held.get() is not first and not first.closed)


def test_a_child_keeps_the_object_of_its_parent_open() -> None:
    held = PerProcess(Thing)
    first = held.get()

    def check() -> bool:
        held.close()
        return not first.closed and held.get() is not first

    assert in_child(check)


def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    held = PerProcess(Thing)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with held.locked():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(10)

        def check() -> bool:
            done = threading.Event()
            threading.Thread(target=lambda: held.get() and done.set(), daemon=True).start()
            return done.wait(5)

        assert in_child(check)
    finally:
        leave.set()
        thread.join()


def test_an_override_is_used_until_its_block_ends() -> None:
    held, stand_in = PerProcess(Thing, owner="shop"), Thing()
    with held.override(stand_in):
        assert held.get() is stand_in
        with pytest.raises(UsageError, match="'shop' is being tested"), held.override(Thing()):
            pass
        assert held.get() is stand_in
    assert held.get() is not stand_in
    assert not stand_in.closed


def test_an_interruption_while_it_is_opened_is_refused() -> None:
    """A signal handler that sends during the first send waited for itself."""
    refused: list[UsageError] = []

    def open() -> Thing:
        with pytest.raises(UsageError) as caught:
            held.get()
        refused.append(caught.value)
        return Thing()

    held = PerProcess(open)
    first = held.get()
    assert len(refused) == 1
    assert held.get() is first
