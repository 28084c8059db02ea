"""Pauses over a fleet that is killed, frozen and restarted: nothing starts while one is in force.

A process that is frozen in the middle of a job finishes that job when it wakes, after its session
is over: no system can prevent that. So the one message of such a process does not count.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

from qdo.fleet.pauses import add_pause, end_pauses, new_pause, wait_in_force
from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, children, wait_until, whole_lines

JOBS = """
import os, time, qdo

app = qdo.App("desk")

@app.job("lanes-*", order="none")
@app.job("*")
def job(message, context):
    with open("out", "a") as file:
        file.write(f"{message.queue} {message.body} {os.getpid()} {time.time()}\\n")
"""
SECONDS = 20.0
QUEUES = [f"plain-{n}" for n in range(10)] + [f"lanes-{n}" for n in range(10)]


def start(runs: AppRuns) -> Proc:
    return runs.start(JOBS, "--processes", "2", "--session-timeout-seconds", "4")


def disturb(runs: AppRuns, over: threading.Event, frozen: set[int]) -> None:
    """Kill, freeze and start worker processes."""
    chance = random.Random(7)
    fleet = [start(runs), start(runs)]
    written = 0
    while not over.wait(chance.uniform(0.2, 1.0)):
        # On a slow machine every worker would be killed before its first message.
        lines = len(whole_lines(runs.folder / "out"))
        if lines == written:
            continue
        written = lines
        workers = [pid for proc in fleet for pid in children(proc.pid)]
        choice = chance.choice(["kill", "freeze", "kill all"])
        if not workers or choice == "kill all":
            fleet.pop(0).kill()
            fleet.append(start(runs))
        elif choice == "kill":
            signal_to(chance.choice(workers), signal.SIGKILL)
        else:
            victim = chance.choice(workers)
            signal_to(victim, signal.SIGSTOP)
            seconds = chance.choice([0.5, 6.0])
            frozen.update([victim] if seconds > 4 else [])
            over.wait(seconds)
            signal_to(victim, signal.SIGCONT)


def signal_to(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def test_nothing_starts_while_a_pause_is_in_force(runs: AppRuns) -> None:
    over, frozen = threading.Event(), set[int]()
    threads = [
        threading.Thread(target=disturb, args=(runs, over, frozen)),
        threading.Thread(target=send, args=(runs, over)),
    ]
    for thread in threads:
        thread.start()
    windows: list[tuple[float, float]] = []
    try:
        wait_until(lambda: len(whole_lines(runs.folder / "out")) > 100, "the first runs")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            pause = new_pause(["*-[0-4]"])
            zxid = add_pause(runs.client, runs.layout, pause)
            wait_in_force(runs.client, runs.layout, pause, zxid, 30.0)
            began = time.time()
            over.wait(0.3)
            windows.append((began, time.time()))
            end_pauses(runs.client, runs.layout, [pause.id])
            over.wait(0.3)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    lines = [line.split() for line in whole_lines(runs.folder / "out")]
    paused = [(float(at), int(pid)) for queue, _, pid, at in lines if queue[-1] in "01234"]
    others = [float(at) for queue, _, _, at in lines if queue[-1] not in "01234"]
    assert len(windows) >= 5
    assert paused
    late = [pid for began, ended in windows for at, pid in paused if began < at < ended]
    assert set(late) <= frozen
    assert len(late) == len(set(late))
    assert [at for began, ended in windows for at in others if began < at < ended]


def send(runs: AppRuns, over: threading.Event) -> None:
    number = 0
    while not over.wait(0.02):
        number += 1
        runs.app.send_many([(queue, number) for queue in QUEUES])
