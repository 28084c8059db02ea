"""`qdo-worker --reload`: real processes, edited while they run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.app import App
from tests.support.processes import Proc, children, wait_until, whole_lines

WORKER = "import sys; from qdo.cli.worker import main; sys.argv[0] = 'qdo-worker'; main()"
JOBS = """
import os, time
import qdo
from words import WORD

app = qdo.App("a")

@app.job()
def write(message, context):
    if message.body == "slow":
        open("begun", "w").close()
        while not os.path.exists("go-on"):
            time.sleep(0.01)
    with open("out", "a") as file:
        file.write(f"{message.body} {WORD}\\n")
"""


class ReloadSetup:
    """A developer's folder with an app in two modules, and a worker that reloads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = folder / "jobs.py"
        self.words = folder / "words.py"
        self.jobs.write_text(JOBS)
        self.words.write_text("WORD = 1\n")
        (folder / "qdo-data").mkdir()
        self.app = App("a", broker=f"sqlite:{folder}/qdo-data/messages.db")

    def worker(self, *options: str) -> Proc:
        return Proc.python("-c", WORKER, "jobs:app", "--reload", *options, cwd=self.folder)

    def out(self) -> list[str]:
        path = self.folder / "out"
        return whole_lines(path)

    def sent(self, body: str, word: int) -> None:
        """Send a message and wait until it is processed by the code of a word."""
        self.app.send("q", body)
        wait_until(lambda: f"{body} {word}" in self.out(), f"{body} by {word}")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[ReloadSetup]:
    made = ReloadSetup(tmp_path)
    yield made
    made.app.close()


def test_a_change_restarts_workers_and_repeats_nothing(desk: ReloadSetup) -> None:
    """Of any module the app has imported; the old code finishes messages in flight."""
    with desk.worker("--processes", "2") as proc:
        proc.wait_for_line(r"member\[\d+\] worker-\d+: registered", count=2)
        desk.sent("a", 1)
        desk.app.send("q", "slow")
        wait_until((desk.folder / "begun").exists, "the slow job")
        before = children(proc.pid)
        desk.words.write_text("WORD = 2\n")
        proc.wait_for_line(r"reloading .*: words\.py changed$")
        proc.wait_for_line("step 1: ", count=2)
        (desk.folder / "go-on").touch()
        desk.sent("b", 2)
        assert desk.out() == ["a 1", "slow 1", "b 2"]
        proc.wait_for_line(r"member\[\d+\] worker-\d+: registered", count=4)
        assert not set(before) & set(children(proc.pid))
        # Within the same second, and of the same length.
        desk.words.write_text("WORD = 3\n")
        proc.wait_for_line("reloading the workers", count=2)
        proc.wait_for_line("step 1: ", count=4)
        desk.sent("c", 3)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0, proc.output
    assert desk.out() == ["a 1", "slow 1", "b 2", "c 3"]


def test_syntax_error_is_shown_and_the_next_change_retries(desk: ReloadSetup) -> None:
    """The worker waits, and its parent with it."""
    with desk.worker() as proc:
        desk.sent("a", 1)
        desk.jobs.write_text(JOBS + "\ndef broken(:\n")
        proc.wait_for_line(r"qdo-worker: .*'jobs:app'.*SyntaxError.*jobs\.py")
        proc.wait_for_line("process 1 cannot start, waiting")
        desk.app.send("q", "b")
        desk.words.write_text("1 / 0\n")
        desk.jobs.write_text(JOBS)
        proc.wait_for_line(r"qdo-worker: .*ZeroDivisionError.*words\.py line 1")
        proc.wait_for_line("process 1 cannot start, waiting", count=2)
        desk.words.write_text("WORD = 4\n")
        wait_until(lambda: desk.out() == ["a 1", "b 4"], "the fixed app")
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0, proc.output
