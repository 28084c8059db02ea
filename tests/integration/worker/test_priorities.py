"""Jobs with ``order="priority"`` in a fleet whose worker is killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import qdo
from tests.support.cli import WORKER, command
from tests.support.processes import whole_lines

JOBS = """
import os, signal
import qdo

app = qdo.App("shop")


@app.job(order="priority")
def job(message, context):
    with open("out", "a") as out:
        out.write(f"{os.getpid()} {message.priority} {message.body}\\n")
    if len(open("out").readlines()) == 80:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["embedded", "zookeeper"])
def test_a_killed_owner_keeps_the_order(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each owner runs a sorted list; the message that was in flight delays its own priority."""
    (tmp_path / "priority_jobs.py").write_text(JOBS)
    places = {"QDO_BROKER": f"sqlite:{tmp_path}/messages.db", "QDO_PROCESSES": "2"}
    if place == "zookeeper":
        places["QDO_COORDINATOR"] = request.getfixturevalue("zookeeper_url")
    chance = random.Random(20261127)
    sent = [(chance.randrange(10), number) for number in range(300)]
    with qdo.App("shop", broker=places["QDO_BROKER"]) as app:
        app.send_many([qdo.NewMessage("q", body, priority=each) for each, body in sent])
    ended = command(*WORKER, "priority_jobs:app", "--burst", cwd=tmp_path, env=places)
    assert ended.code == 0, ended.err
    runs: dict[int, list[tuple[int, int]]] = {}
    for pid, priority, body in (map(int, each.split()) for each in whole_lines(tmp_path / "out")):
        runs.setdefault(pid, []).append((priority, body))
    killed, successor = runs.values()
    assert killed == sorted(sent)[:80]
    held = killed[-1][0]
    for part in ([each for each in successor if (each[0] == held) is own] for own in (True, False)):
        assert part == sorted(part)
    assert {*killed, *successor} == set(sent)
