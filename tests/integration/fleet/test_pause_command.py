"""`qdo pause`: a command that runs while queues are paused, on both coordinators."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo.cli.commands.pauses import run_bound
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.audit import read_entries
from qdo.fleet.pause_machine import PauseNode
from tests.support.app_runs import AppRuns
from tests.support.cli import QDO, Run
from tests.support.processes import Proc, freeze, wait_until

NOTE_SIGTERM = """
import signal, sys

def end(*_):
    open("told", "w").close()
    sys.exit(9)

signal.signal(signal.SIGTERM, end)
print("inside", flush=True)
signal.pause()
"""
LAYOUT = Layout.of("desk")


class PauseRuns(AppRuns):
    """An app with a worker, and `qdo pause` for its queues."""

    def pause(self, *arguments: str) -> Proc:
        argv = (*QDO, "pause", "plain-*", "--session-timeout-seconds", "2", *arguments)
        return Proc.python(*argv, cwd=self.folder, env=self.environment)

    @contextlib.contextmanager
    def inside(self) -> Iterator[Proc]:
        """Pause the queues of a worker for a command that notes SIGTERM, and is in its section."""
        self.work()
        self.works(0)
        with self.pause("--", sys.executable, "-c", NOTE_SIGTERM) as holder:
            holder.wait_for_line("^inside$")
            yield holder

    def told(self) -> bool:
        """Whether the command within a section received SIGTERM."""
        return (self.folder / "told").exists()

    def works(self, body: int) -> None:
        """Send a message, and wait until it is processed."""
        self.app.send("plain-1", body)
        wait_until(lambda: bool(self.runs("plain-1")[body:]), f"message {body} is processed")


@pytest.fixture
def runs(tmp_path: Path, coordinator_url: str) -> Iterator[PauseRuns]:
    runs = PauseRuns("desk", tmp_path, coordinator_url)
    yield runs
    runs.close()


def test_nothing_runs_beside_the_command(runs: PauseRuns, outsider: Client) -> None:
    runs.work()
    runs.works(0)
    inside = "echo fence $QDO_HOLD_FENCE; until [ -e go ]; do sleep 0.01; done; exit 7"
    with runs.pause("--reason", "moving", "--", "sh", "-c", inside) as holder:
        fence = int(holder.wait_for_line(r"^fence (\d+)$")[0][1])
        runs.app.send("plain-1", 1)
        runs.app.send("other", 0)
        wait_until(lambda: len(runs.runs("other")) == 1, "other queues go on")
        assert len(runs.runs("plain-1")) == 1
        (runs.folder / "go").touch()
        assert holder.wait() == 7
    wait_until(lambda: len(runs.runs("plain-1")) == 2, "the queue continues")
    entries = read_entries(outsider, LAYOUT, limit=9)
    assert [(entry.command, entry.reason) for entry in entries] == [("pause", "moving")]
    again = runs.qdo("pause", "plain-*", "--", "sh", "-c", "echo $QDO_HOLD_FENCE")
    assert again.code == 0, again.err
    assert int(again.out) > fence


@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_the_command_ends_with_its_section(runs: PauseRuns, outsider: Client, frozen: bool) -> None:
    """The holder killed or frozen: the queues continue, and the command is told to end."""
    with runs.inside() as holder:
        if frozen:
            freeze(holder.pid, runs.coordinator)
        else:
            os.kill(holder.pid, signal.SIGKILL)
        runs.works(1)
        if frozen:
            os.kill(holder.pid, signal.SIGCONT)
            assert holder.wait() == 5
        wait_until(runs.told, "the command received SIGTERM")
    wait_until(
        lambda: PauseNode.parse(outsider.get(LAYOUT.fleet.holds)[0]).pauses == (),
        "the pause is taken out",
    )


def test_a_stop_signal_is_passed_on(runs: PauseRuns) -> None:
    with runs.inside() as holder:
        holder.send(signal.SIGTERM)
        assert holder.wait() == 9
    assert runs.told()
    runs.works(1)


def test_the_command_ends_when_an_operator_ends_its_section(
    runs: PauseRuns, outsider: Client
) -> None:
    with runs.inside() as holder:
        (pause,) = PauseNode.parse(outsider.get(LAYOUT.fleet.holds)[0]).pauses
        ended = runs.qdo("resume", "--yes", "--id", pause.id)
        assert ended.code == 0
        assert holder.wait() == 5
    assert runs.told()
    runs.works(1)


BAD = (
    (2, "plain-*", "--"),
    (2, "--", "true"),
    (2, "plain-*", "--", "there-is-no-such-program"),
    (2, "plain-*", "--", "/tmp"),
    (6, "nothing-*", "--", "true"),
    (2, "*", "--", "true"),
    (2, "?*", "--allow-none", "--", "true"),
    (2, "a/b", "--", "true"),
    (2, "plain-*", "--timeout", "soon", "--", "true"),
    (2, "plain-*", "--for", "2h", "--", "true"),
    (2, "plain-*", "--no-wait", "--", "true"),
    (2, "plain-*", "--list"),
    (2, "plain-*", "--reason", "x" * 1000, "--", "true"),
)


@pytest.mark.usefixtures("own_folder")
def test_bad_input_runs_nothing(cli: Run) -> None:
    for code, *arguments in BAD:
        ended = cli("pause", *arguments)
        assert (ended.code, ended.out) == (code, ""), arguments
        assert ended.err.splitlines()[-1].startswith("qdo: "), arguments


def test_a_dry_run_holds_and_runs_nothing(runs: PauseRuns) -> None:
    """It shows how many queues would be paused."""
    runs.client.create(LAYOUT.queue("plain-1"), b"", makepath=True)
    ended = runs.qdo("pause", "plain-*", "--dry-run", "--", "touch", "ran")
    assert (ended.code, (runs.folder / "ran").exists()) == (0, False)
    heading, row = ended.out.splitlines()
    assert dict(zip(heading.split(), row.split(), strict=False))["MATCHING"] == "1"
    assert runs.client.get_children(LAYOUT.root) == ["queues"]


@pytest.mark.parametrize("holds", [True, False])
def test_a_command_that_ignores_the_signal_is_killed(tmp_path: Path, holds: bool) -> None:
    ready = tmp_path / "ready"
    script = f"trap '' TERM; touch {ready}; {'exit 3' if holds else 'while :; do :; done'}"
    condition: Callable[[], bool] = lambda: holds or not ready.exists()  # noqa: E731
    code = run_bound(("sh", "-c", script), condition, os.environ, kill_seconds=0.2)
    assert code == (3 if holds else 128 + signal.SIGKILL)
