"""`qdo status`, `qdo check` and the states of `qdo queues`, with a real worker and without."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_runs import OperatorDesk
from tests.support.processes import Proc, wait_until

JOBS = "from tests.apps.statuses import app\n"
QUEUES = ("fine", "held-1", "poison", "flaky", "hung", "orphan")


class Desk(OperatorDesk):
    """An app with its queues, and a worker."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "QDO_SESSION_TIMEOUT_SECONDS": "3"}

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return exit code and standard output of a command."""
        ended = self.qdo(*arguments)
        return ended.code, ended.out

    def states(self, *options: str) -> dict[str, str]:
        """Return the state of each queue."""
        return {name: each["state"] for name, each in self.queues(*options).items()}

    def queues(self, *options: str) -> dict[str, dict[str, Any]]:
        return {each["queue"]: each for each in self.items("queues", *options)}

    def start_worker(self) -> Proc:
        return self.start(JOBS, QDO_SESSION_TIMEOUT_SECONDS="3")


@pytest.fixture
def desk(tmp_path: Path, coordinator_url: str) -> Iterator[Desk]:
    with contextlib.closing(Desk("desk", tmp_path, coordinator_url)) as desk:
        yield desk


def test_each_state_of_a_fleet(desk: Desk) -> None:
    """Before a worker comes, while it works, and after it was killed."""
    desk.app.send_many([(name, 1) for name in QUEUES])
    assert set(desk.states().values()) == {"no-worker"}
    assert desk.run("check", "--min-workers", "0")[0] == 2
    code, output = desk.run("pause", "held-*", "--yes", "--allow-none", "--reason", "disk full")
    assert code == 0, output
    worker = desk.start_worker()
    expected = {
        "fine": "idle",
        "held-1": "paused",
        "poison": "blocked",
        "flaky": "failing",
        "hung": "stuck",
        "orphan": "no-job",
    }
    wait_until(lambda: desk.states("--stuck", "2s") == expected, "every state is found", 60.0)

    found = desk.queues("--stuck", "2s")
    assert "no vase" in found["poison"]["reason"]
    assert found["poison"]["remedy"].startswith(
        "qdo retry-now poison, qdo dead-letters add poison "
    )
    assert "not yet" in found["flaky"]["reason"]
    assert "disk full" in found["held-1"]["reason"]
    assert found["hung"]["remedy"] == "qdo ps hung --stacks"
    assert list(desk.queues("--state", "stuck", "--state", "blocked", "--stuck", "2s")) == [
        "hung",
        "poison",
    ]
    worst_first = list(desk.queues("--sort", "state", "--stuck", "2s", "--limit", "3"))
    assert worst_first == ["poison", "hung", "orphan"]

    (overview,) = desk.items("status", "--stuck", "2s")
    assert (overview["workers"], overview["silent_workers"], overview["queues"]) == (1, [], 6)
    assert [each["queue"] for each in overview["worst"]] == ["poison", "hung", "orphan", "flaky"]
    assert overview["states"]["paused"] == 1

    code, output = desk.run("status", "--stuck", "2s")
    assert code == 0
    assert re.search(r"^orphan: no-job, 1 message, .* behind$", output, re.MULTILINE)
    assert "qdo retry-now poison" in output

    worker.kill()
    wait_until(lambda: desk.states()["hung"] == "no-worker", "the worker is gone", 60.0)
    assert desk.states()["poison"] == "blocked"


def test_check_has_the_exit_codes_of_plugins(desk: Desk) -> None:
    """And one line with data, whatever happens."""
    desk.start_worker()
    wait_until(lambda: desk.run("check")[0] == 0, "a worker reports", 60.0)
    code, output = desk.run("check", "--min-workers", "2")
    assert (code, output.startswith("QDO CRITICAL - 1 worker of at least 2 | ")) == (2, True)
    desk.app.send("flaky", 1)
    wait_until(lambda: desk.run("check")[0] == 1, "a message fails", 60.0)
    code, output = desk.run("check", "--late", "0s", "--max-age", "0")
    assert code == 2
    assert "older than 0s: flaky" in output
    assert re.search(r" workers=1;;1: queues=1 max_age=[0-9.]+s;;0 lost=0 ", output)
    away = ("--coordinator", "zookeeper://127.0.0.1:1", "--connect-seconds", "0.2")
    for wrong, expected, word in (
        (("--max-age", "soon"), 3, "UNKNOWN"),
        (("--nope",), 3, "UNKNOWN"),
        (away, 2, "CRITICAL"),
    ):
        code, output = desk.run("check", *wrong)
        assert (code, output.startswith(f"QDO {word} - ")) == (expected, True), output
        assert len(output.splitlines()) == 1


def test_a_missing_file_of_the_broker_is_no_empty_one(desk: Desk) -> None:
    """Unknown is not 0: no command says that nothing waits, or that nothing is dead."""
    assert desk.run("dead-letters") == (0, "")
    desk.app.send("fine", 1)
    desk.start_worker()
    wait_until(lambda: desk.states().get("fine") == "idle", "the message is done", 60.0)
    assert re.search(r"^waiting +0$", desk.run("queues", "fine")[1], re.MULTILINE)
    wrong = ("--broker", "sqlite:other.db")
    (item,) = desk.items("queues", *wrong, code=4)
    assert item["state"] == "unknown"
    assert [item[key] for key in ("backlog", "dead_letters", "behind_seconds")] == 3 * [None]
    for said in ("other.db does not exist", "messages.db on ", "--broker"):
        assert said in item["reason"]
        assert said in desk.run("check", *wrong)[1]
    assert (item["remedy"], item["error"] is None) == ("qdo doctor", False)
    code, output = desk.run("status", *wrong)
    assert (code, ", ? dead letters\n" in output) == (0, True)
    assert '"dead_letters": null' in desk.run("status", "-o", "json", *wrong)[1]
    for command_line in (("dead-letters",), ("peek", "fine"), ("purge", "fine", "--dry-run")):
        assert desk.run(*command_line, *wrong) == (3, "")
    assert desk.run("check", *wrong)[0] == 3
    assert "waiting       an unknown number" in desk.run("queues", "fine", *wrong)[1]


def test_a_long_backlog_catches_up(desk: Desk) -> None:
    """Two readings show it: the first message is late, and the backlog becomes smaller."""
    desk.app.send_many([("slow", number) for number in range(3000)])
    desk.start_worker()

    def found() -> dict[str, Any]:
        return desk.queues("slow", "--late", "0s", "--window", "0.2s")["slow"]

    wait_until(lambda: found()["state"] == "catching-up", "it catches up", 60.0)
    wait_until(lambda: found()["state"] == "idle", "it has caught up", 60.0)


def test_a_queue_names_the_limit_that_it_waits_for(desk: Desk) -> None:
    """It is not stopped: somebody else has the permit."""
    assert desk.run("limits", "set", "crm", "--max", "1")[0] == 0
    desk.app.send_many([("limited-1", 1), ("limited-2", 1)])
    desk.start_worker()

    def reports() -> list[tuple[str, list[str], str]]:
        found = desk.queues("limited-*", "--late", "0s", "--stuck", "0s").values()
        return sorted((each["state"], each["limits"], each["remedy"] or "") for each in found)

    expected = [("lagging", ["crm"]), ("stuck", [])]
    wait_until(lambda: [each[:2] for each in reports()] == expected, "both are found", 60.0)
    assert reports()[0][2] == "qdo limits list"


def test_one_queue_and_one_worker(desk: Desk) -> None:
    """What the lists say in short, with the job, the process and the last changes."""
    id = desk.app.send("poison", 1)
    hung = desk.app.send("hung", 1)
    assert desk.run("pause", "poison*", "--allow-none", "--yes", "--reason", "\x1b[31mred")[0] == 0
    desk.start_worker()
    wait_until(lambda: desk.states()["hung"] == "ok", "the worker", 60.0)
    assert desk.run("resume", "poison*", "--yes")[0] == 0
    wait_until(lambda: desk.states()["poison"] == "blocked", "the message blocks", 60.0)

    (found,) = desk.items("queues", "poison", "--app", "jobs:app")
    assert (found["state"], found["failing_id"], found["backlog"]) == ("blocked", id, 1)
    assert (found["job"]["job"], found["job"]["attempts"]) == ("tests.apps.statuses:poison", 1)
    assert (found["job"]["then"], found["job"]["limits"]) == ("block", [])
    assert [each["command"] for each in found["changes"]] == ["resume", "pause"]
    worker = found["owner"]
    assert found["process"]["worker"] == worker
    code, output = desk.run("queues", "poison", "--app", "jobs:app")
    assert code == 0
    shown = ("no vase", id, worker, "tests.apps.statuses:poison", "\\x1b[31mred")
    assert [text in output for text in (*shown, "\x1b")] == [*5 * [True], False]

    wait_until(lambda: hung in desk.run("queues", "hung")[1], "a report with its run", 60.0)
    process: dict[str, Any] = {}

    def has_reported() -> bool:
        process.update(desk.items("workers", worker)[0])
        return bool(process["blocked"])

    wait_until(has_reported, "a report of the blocked queue", 60.0)
    assert (process["queues"], process["state"], process["blocked"]) == (2, "running", 1)
    assert {"pause", "resume"}.isdisjoint(each["command"] for each in process["changes"])
    assert "2 owned, 2 assigned" in desk.run("workers", worker)[1]

    globs = [desk.run("queues", glob, "-o", "name") for glob in ("poiso?", "[p]oison")]
    assert globs == 2 * [(0, "poison\n")]
    code, output = desk.run("queues", "poison", "hung", "-o", "name", "--no-ask")
    assert (code, output) == (0, "poison\nhung\n")
    listed = [
        desk.run("queues", "poison", "--state", each, "-o", "name") for each in ("ok", "blocked")
    ]
    assert listed == [(0, ""), (0, "poison\n")]
    wrong = (
        ("poison", "*"),
        ("poison", "hung", "--sort", "age"),
        ("--by", "state", "--limit", "1"),
    )
    assert [desk.run("queues", *each)[0] for each in wrong] == 3 * [2]
    assert [desk.run("queues", name)[0] for name in ("none", "[*]")] == 2 * [6]
    assert desk.run("workers", "worker-*")[0] == 6


def test_events_are_followed_as_they_happen(desk: Desk) -> None:
    """Workers, queues, owners, states, and what operators do."""
    desk.app.send("fine", 1)
    events = desk.begin("events", "--follow", "-o", "jsonl", "--every", "0.5s")
    events.wait_for_line("^following 1 queues, 0 workers$")
    worker = desk.start_worker()
    events.wait_for_line('"kind": "worker", .* "after": "new"')
    events.wait_for_line('"kind": "owner", "subject": "fine", "before": "", "after": "worker-')
    desk.app.send("poison", 1)
    events.wait_for_line('"kind": "queue", "subject": "poison", "before": "", "after": "new"')
    wait_until(lambda: desk.states()["poison"] == "blocked", "the message blocks", 60.0)
    assert desk.run("retry-now", "poison", "--reason", "\x1b[31mred")[0] == 0
    events.wait_for_line(r'"kind": "retry-now", "subject": "poison", .*u001b\[31mred')
    worker.kill()
    events.wait_for_line('"kind": "worker", .* "before": "there", "after": "gone"', count=1)
    desk.app.send("fine", 2)
    events.wait_for_line('"kind": "state", "subject": "fine", "before": "idle"')

    code, output = desk.run("events", "-o", "jsonl")
    assert code == 0
    assert [json.loads(line)["kind"] for line in output.splitlines()] == ["retry-now"]
    assert "retry-now  poison" in desk.run("events")[1]
    followed = desk.run("events", "--follow", "--every", "0.5s", "--for", "0.6s", "--since", "0s")
    assert followed == (0, "")
    assert desk.run("events", "--every", "0")[0] == 2
    assert desk.run("events", "--for", "1s")[0] == 2
