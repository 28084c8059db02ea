"""Forked copies of a worker process run none of its messages, whatever libraries do in them."""

from __future__ import annotations

import json
import signal

from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until, whole_lines

APP_NAME = "desk"
APP = """
import json
import os
import signal
import subprocess
import sys
import time

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

def terminated(message):
    # As a pool of the standard library does with its processes.
    pid = os.fork()
    if pid == 0:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            open(f"child-{message.queue}", "w").close()
        time.sleep(20)
        os._exit(0)
    while not os.path.exists(f"child-{message.queue}"):
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    write("ran", queue=message.queue, body=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

@app.job("signals-process-*", executor="process")
def signals_in_process(message, context):
    terminated(message)

@app.job("signals-*")
def signals(message, context):
    terminated(message)

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


def test_what_a_job_forks_has_the_signal_handlers_of_python(runs: AppRuns) -> None:
    """It ignored SIGTERM, as its process does, and `multiprocessing.Pool` waited forever."""
    runs.app.send_many([("signals-1", 0), ("signals-process-1", 0)])
    runs.start(APP)
    out = runs.folder / "out"
    wait_until(lambda: len(whole_lines(out)) == 2, "all messages")
    ended = [json.loads(line)["body"] for line in whole_lines(out)]
    assert ended == [-signal.SIGTERM] * 2
