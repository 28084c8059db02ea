"""Forked copies of a worker process run none of its messages, whatever libraries do in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until, whole_lines

APP = """
import json
import os
import subprocess
import sys

import gevent
import qdo

app = qdo.App("desk")

def write(name, **values):
    with open("out", "a") as file:
        file.write(json.dumps({"name": name, "pid": os.getpid(), **values}) + os.linesep)

@app.job("waiting-*")
def wait(message, context):
    gevent.sleep(0.05 * message.body)
    write("ran", queue=message.queue, body=message.body)

@app.job("copies-*")
def copy(message, context):
    \"\"\"As a library does that forks and goes on in Python, and one that starts a program.\"\"\"
    subprocess.run([sys.executable, "-c", ""], check=True)
    pid = os.fork()
    if pid == 0:
        for _ in range(10):
            gevent.sleep(0.02)
        write("copy", queue=message.queue, body=message.body)
        os._exit(0)
    os.waitpid(pid, 0)
    write("ran", queue=message.queue, body=message.body)

@app.job("process", executor="process")
def in_process(message, context):
    write("ran", queue=message.queue, body=message.body)

def linger():
    \"\"\"As a lock does that is taken: others run meanwhile.\"\"\"
    for _ in range(10):
        gevent.sleep(0.01)

os.register_at_fork(after_in_child=linger)
"""
WAITING, MESSAGES = 20, 10


@pytest.fixture
def runs(tmp_path: Path, coordinator_url: str) -> Iterator[AppRuns]:
    runs = AppRuns("desk", tmp_path, coordinator_url)
    yield runs
    runs.close()


def test_a_forked_copy_runs_no_message(runs: AppRuns) -> None:
    names = [f"waiting-{number}" for number in range(WAITING)]
    names += ["process", "copies-1", "copies-2"]
    sent = [(name, body) for name in names for body in range(MESSAGES)]
    runs.app.send_many(sent)
    runs.start(APP)

    def found(name: str) -> list[tuple[str, int]]:
        lines = map(json.loads, whole_lines(runs.folder / "out"))
        return [(each["queue"], each["body"]) for each in lines if each["name"] == name]

    wait_until(lambda: len(found("ran")) >= len(sent), "all messages", 60.0)
    assert sorted(found("ran")) == sorted(sent)
    # The copy itself goes on, also when it waits.
    assert sorted(found("copy")) == [each for each in sorted(sent) if each[0].startswith("copies")]
    (worker,) = {
        each["pid"]
        for each in map(json.loads, whole_lines(runs.folder / "out"))
        if each["queue"].startswith("waiting")
    }
    assert worker
