"""Member processes of qdo or of kazoo's SetPartitioner, behind one interface."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.support.handover_analysis import OwnershipEvent
from bench.support.processes import Program, ProgramError


class MemberProcess:
    """One member process; see `bench.support.member_process` for its commands."""

    def __init__(self, command: Sequence[str]) -> None:
        self.program = Program(command, talk=True)
        self.name = ""
        self.session: tuple[int, bytes] = (0, b"")

    def tell(self, word: str) -> None:
        self.program.write_line(word)

    def answer(self, timeout_seconds: float = 120.0) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.program.read_line(timeout_seconds))
        return value

    def joined(self) -> int:
        """Read the answer to ``join``; return its start time."""
        value = self.answer()
        self.name = value["name"]
        self.session = (value["session"], bytes.fromhex(value["password"]))
        return int(value["began"])


class Crew:
    """All member processes of a run."""

    def __init__(self, command: Sequence[str], queues: int) -> None:
        self._command = command
        self._queues = queues
        self.members: list[MemberProcess] = []
        self.events: list[OwnershipEvent] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            with contextlib.suppress(BrokenPipeError):
                os.kill(member.program.pid, signal.SIGKILL)
            member.program.stop()

    def hire(self, count: int) -> list[MemberProcess]:
        """Start processes that have loaded everything but have not joined yet."""
        found = [MemberProcess(self._command) for _ in range(count)]
        self.members.extend(found)
        for member in found:
            member.answer()
        return found

    def join(self, newcomers: Sequence[MemberProcess]) -> int:
        """Let processes join at once; return when the first began."""
        for member in newcomers:
            member.tell("join")
        return min(member.joined() for member in newcomers)

    def leave(self, member: MemberProcess) -> int:
        """Stop one member cleanly; return when that began."""
        member.tell("leave")
        value = member.answer()
        if not value["released"]:
            raise member.program.failure("could not release its queues")
        self._collect([member])
        self._dismiss(member)
        return int(value["began"])

    def kill(self, member: MemberProcess) -> int:
        """Kill one member with SIGKILL and wait until it is gone; return when that began."""
        self._collect([member])
        began = time.monotonic_ns()
        os.kill(member.program.pid, signal.SIGKILL)
        member.program.process.wait()
        held = {
            event.queue: event.what == "claimed"
            for event in sorted(self.events)
            if event.member == member.name
        }
        # The killed process could not record this.
        self.events.extend(
            OwnershipEvent(began, "stopped", member.name, queue)
            for queue, holds in held.items()
            if holds
        )
        self._dismiss(member)
        return began

    def _dismiss(self, member: MemberProcess) -> None:
        self.members.remove(member)
        member.program.stop()

    def names(self) -> list[str]:
        return [member.name for member in self.members if member.name]

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until the members share all queues evenly; return False on a timeout."""
        return wait_for(self._shared_out, timeout_seconds)

    def leader(self) -> MemberProcess | None:
        """Return the rebalancer, None without one."""
        here, states = self._states()
        return next((m for m, state in zip(here, states, strict=True) if state["leads"]), None)

    def _states(self) -> tuple[list[MemberProcess], list[dict[str, Any]]]:
        here = [member for member in self.members if member.name]
        for member in here:
            member.tell("state")
        return here, [member.answer() for member in here]

    def _shared_out(self) -> bool:
        _, states = self._states()
        held = [state["held"] for state in states]
        return (
            sum(held) == self._queues
            and max(held) - min(held) <= 1
            and all(state["settled"] for state in states)
        )

    def collect(self) -> list[OwnershipEvent]:
        """Return all events so far."""
        self._collect([member for member in self.members if member.name])
        return self.events

    def _collect(self, members: Sequence[MemberProcess]) -> None:
        for member in members:
            member.tell("events")
            for at_ns, what, queue in member.answer()["events"]:
                self.events.append(OwnershipEvent(at_ns, what, member.name, queue))


def wait_for(
    condition: Callable[[], bool], timeout_seconds: float, pause_seconds: float = 0.05
) -> bool:
    """Wait until `condition` holds; return False on a timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], pause_seconds)
    return True


def require(condition: bool, what: str) -> None:
    """Raise ProgramError unless a condition became true."""
    if not condition:
        raise ProgramError(what)
