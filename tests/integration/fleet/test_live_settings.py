"""Settings that change while real workers run, on both coordinators."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp
from qdo.errors import CoordinatorUnreachableError
from qdo.fleet.chores import SurplusChore
from qdo.fleet.live_settings import propose, version_path
from qdo.fleet.settings_machine import KEPT_VERSIONS, SettingsVersion, surplus_versions
from tests.support.app_runs import AppRuns
from tests.support.cli import Run
from tests.support.processes import Proc, freeze, wait_until

JOBS = """
import os, qdo

app = qdo.App("desk", fetch=50, backoff_seconds=0.01, backoff_max_seconds=0.02)

@app.job("fails-*")
@app.job("fails-policy", policy=qdo.Policy(then="skip"))
@app.job("slow", policy=qdo.Policy(backoff_seconds=0.015))
@app.job("*")
def job(message, context):
    with open("out", "a") as file:
        file.write(f"{message.queue} {app.live.fetch} {message.attempt} {os.getpid()}\\n")
    if message.queue.startswith("fails-"):
        raise ValueError("as always")
"""


@pytest.fixture
def qdo(runs: AppRuns) -> Run:
    """Run a command for the app."""
    return runs.qdo


def start(runs: AppRuns, *options: str, own: str = "", session: str = "4") -> Proc:
    """Start a worker, with a settings file of its own, and wait for its registration."""
    (runs.folder / "own.toml").write_text(own)
    chosen = ("--session-timeout-seconds", session, "--config", "own.toml", *options)
    worker = runs.start(JOBS, *chosen)
    wait_until(lambda: "registered;" in worker.output, "the registration")
    return worker


def in_force(qdo: Run) -> dict[str, object]:
    return {
        str(item["setting"]): item["value"] for item in qdo("settings", "show", "-ojson").items()
    }


def test_a_change_applies_to_the_next_message_of_every_worker(runs: AppRuns, qdo: Run) -> None:
    start(runs, "--processes", "2")
    start(runs)
    wait_until(lambda: len(qdo("workers", "-o", "json").items()) == 3, "three workers")
    runs.app.send_many([(f"q{number}", 0) for number in range(9)])
    wait_until(lambda: all(runs.runs(f"q{n}") == [("50", 1)] for n in range(9)), "the first runs")
    (changed,) = qdo("settings", "set", "fetch", "77", "--reason", "slow", "-o", "json").items()
    assert changed["version"] == 1
    assert changed["workers"] == 3
    assert changed["changes"] == {"fetch": {"before": None, "after": 77}}
    runs.app.send_many([(f"q{number}", 1) for number in range(9)])
    wait_until(lambda: all(len(runs.runs(f"q{n}")) == 2 for n in range(9)), "the second runs")
    assert all(runs.runs(f"q{n}")[1] == ("77", 1) for n in range(9))
    live = [item["live"] for item in qdo("workers", "--all", "-o", "json").items()]
    assert live == [1, 1, 1]
    (entry,) = qdo("audit", "-o", "json").items()
    assert (entry["command"], entry["reason"]) == ("settings set", "slow")


def test_a_worker_that_starts_later_begins_with_them(runs: AppRuns, qdo: Run) -> None:
    assert qdo("settings", "set", "fetch", "77", "-o", "json").items()[0]["workers"] == 0
    runs.app.send_many([(f"q{number}", 0) for number in range(50)])
    start(runs)
    wait_until(lambda: all(runs.runs(f"q{n}") for n in range(50)), "the runs")
    assert {runs.runs(f"q{n}")[0][0] for n in range(50)} == {"77"}


def test_attempts_of_a_failing_queue_change(runs: AppRuns, qdo: Run) -> None:
    assert qdo("settings", "apply", "-", stdin="attempts = 1000000\n").code == 0
    runs.app.send("fails-1", 0)
    start(runs)
    wait_until(lambda: len(runs.runs("fails-1")) > 20, "some attempts")
    text = "attempts = 1000000\n[[policies]]\nqueues = 'fails-*'\nattempts = 3\n"
    assert qdo("settings", "apply", "-", stdin=text).code == 0
    wait_until(lambda: qdo("dead-letters", "list", "-o", "json").items(), "the dead letter")


def test_a_jobs_policy_follows_the_values_that_it_leaves_out(runs: AppRuns, qdo: Run) -> None:
    assert qdo("settings", "set", "attempts", "1000000").code == 0
    runs.app.send("fails-policy", 0)
    start(runs)
    wait_until(lambda: len(runs.runs("fails-policy")) > 20, "more attempts than by default")
    assert qdo("settings", "set", "attempts", "3").code == 0
    (item,) = qdo("queues", "fails-policy", "--app", "jobs:app", "-o", "json").items()
    assert item["job"]["attempts"] == 3  # those in force, not those of the code
    runs.app.send("fails-policy", 0)
    wait_until(lambda: [count for _, count in runs.runs("fails-policy")[-3:]] == [1, 2, 3], "3")
    assert qdo("dead-letters", "list", "-o", "json").items() == []


def test_a_worker_refuses_what_contradicts_a_jobs_policy(runs: AppRuns, qdo: Run) -> None:
    start(runs)
    refused = qdo("settings", "set", "backoff_max_seconds", "0.01")
    assert refused.code == 5
    assert "the policy of job" in refused.err
    assert in_force(qdo) == {}


def test_own_values_win_and_are_shown(runs: AppRuns, qdo: Run) -> None:
    start(runs, own="fetch = 9")
    changed = qdo("settings", "set", "fetch", "77")
    assert changed.code == 0
    assert "own.toml" in changed.err
    runs.app.send("q", 0)
    wait_until(lambda: runs.runs("q") == [("9", 1)], "the run")
    (item,) = qdo("settings", "show", "-o", "json").items()
    assert list(item["pinned"].values()) == ["own.toml"]  # type: ignore[attr-defined]
    config = {each["setting"]: each for each in qdo("config", "--live", "-o", "json").items()}
    assert config["fetch"]["origin"] == "live 1"
    assert config["fetch"]["value"] == 77
    pinned = qdo("config", "--live", "-o", "json", QDO_FETCH="8").items()
    assert next(each["value"] for each in pinned if each["setting"] == "fetch") == 8


def test_one_refusal_leaves_everything_as_it_is(runs: AppRuns, qdo: Run) -> None:
    start(runs)
    strict = start(runs, own="backoff_max_seconds = 1")
    text = "backoff_seconds = 5\nbackoff_max_seconds = 10\nfetch = 3\n"
    refused = qdo("settings", "apply", "-", stdin=text)
    assert refused.code == 5
    assert "worker-" in refused.err
    assert in_force(qdo) == {}
    # Forced, it applies to the other one; the one that refuses goes on and says so.
    (forced,) = qdo("settings", "apply", "-", "--force", "-o", "json", stdin=text).items()
    assert forced["version"] == 1
    wait_until(lambda: "this process refuses" in strict.output, "the report")
    wait_until(
        lambda: (
            sorted(each["live"] for each in qdo("workers", "--all", "-o", "json").items()) == [0, 1]
        ),  # type: ignore[type-var]
        "one use",
    )
    assert "version 1 is not in use in 1 of" in qdo("settings", "show").err


def test_a_frozen_worker_holds_a_change_up(runs: AppRuns, qdo: Run, coordinator_url: str) -> None:
    worker = start(runs, session="60")
    (pid,) = (int(str(item["pid"])) for item in qdo("workers", "--all", "-o", "json").items())
    freeze(pid, coordinator_url)
    try:
        late = qdo("settings", "set", "fetch", "3", "--timeout", "0.5s")
        assert late.code == 4
        assert "worker-" in late.err
        assert in_force(qdo) == {}
        assert qdo("settings", "set", "fetch", "4", "--force").code == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "fetch = 4" in worker.output, "the use")
    # The proposal of the command that gave up does not come back.
    assert in_force(qdo) == {"fetch": 4}
    assert qdo("settings", "set", "fetch", "5").code == 0


def test_two_operators_at_once(runs: AppRuns, qdo: Run) -> None:
    """Each change is in force or refused; nobody's change is half done or lost in silence."""
    start(runs)
    changes = [(name, value) for value in range(1, 7) for name in ("attempts", "fetch")]

    def changed(change: tuple[str, int]) -> tuple[str, int, int]:
        name, value = change
        return name, value, qdo("settings", "set", name, str(value)).code

    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(changed, changes))
    assert {code for _, _, code in ended} <= {0, 5}
    done = [(name, value) for name, value, code in ended if code == 0]
    assert len(done) >= 6
    assert set(in_force(qdo).items()) <= set(done)
    versions = qdo("settings", "history", "-o", "json").items()
    assert [each["version"] for each in versions] == list(range(len(done), 0, -1))
    assert len(qdo("audit", "-o", "json").items()) == len(done)


def test_a_proposal_of_a_dead_operator_is_replaced(runs: AppRuns, qdo: Run) -> None:
    start(runs)
    proposal = propose(runs.client, runs.layout, lambda node: "fetch = 3\n")
    assert proposal is not None
    assert in_force(qdo) == {}
    assert qdo("settings", "set", "attempts", "4", "-o", "json").items()[0]["version"] == 1
    assert in_force(qdo) == {"attempts": 4}


def test_history_and_rollback(runs: AppRuns, qdo: Run) -> None:
    assert qdo("settings", "apply", "-", stdin="# by the CRM team\nfetch = 3\n").code == 0
    assert qdo("settings", "set", "attempts", "4").code == 0
    assert qdo("settings", "unset", "fetch").code == 0
    assert "+attempts = 4" in qdo("settings", "diff", "1", "2").out
    assert "-fetch = 3" in qdo("settings", "diff").out
    assert qdo("settings", "rollback", "1", "--dry-run", "-o", "json").items()
    assert qdo("settings", "rollback", "1").code == 0
    assert qdo("settings", "get").out == "# by the CRM team\nfetch = 3\n"
    assert qdo("settings", "get", "--version", "2").out.endswith("attempts = 4\n")
    versions = [each["version"] for each in qdo("settings", "history", "-o", "json").items()]
    assert versions == [4, 3, 2, 1]
    editor = runs.folder / "editor.sh"
    editor.write_text("#!/bin/sh\nsed -i 's/fetch = 3/fetch = 6/' \"$1\"\n")
    editor.chmod(0o755)
    assert qdo("settings", "edit", EDITOR=str(editor)).code == 0
    assert in_force(qdo) == {"fetch": 6}


HOSTILE = [
    b"null",
    b'{"current": {"id": "0123456789", "number": 1e400, "text": ""}}',
    b'{"current": {"id": "0123456789", "number": 3, "text": "\\ud800"}}',
    b'{"current": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"current": {"id": "0123456789", "number": 3, "text": "' + b"x" * 500_000 + b'"}}',
    b'{"current": {"id": "0123456789", "number": 3, "text": "broker = 7"}}',
    b'{"proposal": {"id": "0123456789", "number": 3, "text": "fetch = \'\'"}}',
]


def test_hostile_nodes_change_nothing(runs: AppRuns, qdo: Run, outsider: Client) -> None:
    worker = start(runs)
    assert qdo("settings", "set", "fetch", "77").code == 0
    path = runs.layout.fleet.settings
    good = outsider.get(path)[0]
    for number, value in enumerate(HOSTILE, start=1):
        outsider.set(path, value)
        runs.app.send("q", number)
        wait_until(lambda count=number: len(runs.runs("q")) == count, f"after {value[:60]!r}")  # type: ignore[misc]
        outsider.set(path, good)
    assert {fetch for fetch, _ in runs.runs("q")} <= {"77", "50"}
    outsider.set(path, b"null")
    wait_until(lambda: "cannot read" in worker.output, "the report")
    assert qdo("settings", "show").code == 5
    assert qdo("settings", "set", "fetch", "6").code == 5
    assert qdo("settings", "rollback", "1").code == 0
    assert in_force(qdo) == {"fetch": 77}
    outsider.set(version_path(runs.layout, 1), b"null")
    assert qdo("settings", "history").code == 0
    assert qdo("settings", "rollback", "1").code == 5
    # A node that was deleted by hand: the numbers go on behind those that were kept.
    outsider.delete(path, recursive=False) if not outsider.get_children(path) else None
    outsider.set(path, b"")
    assert qdo("settings", "set", "fetch", "6", "-o", "json").items()[0]["version"] == 3


HOSTILE_TEXTS = {
    "deep": "attempts" + ".a" * 1500 + " = 1",
    "many parts": ".".join(["a"] * 30_000) + " = 1",
    "a module": '[[policies]]\nqueues = "*"\n[[policies.rules]]\n'
    'exception = "ends:Error"\nattempts = 1',
}


@pytest.mark.parametrize("place", ["current", "proposal"])
def test_hostile_texts_end_no_worker(runs: AppRuns, qdo: Run, outsider: Client, place: str) -> None:
    """The node is valid, and what it says is not. Operators see it, and replace it."""
    (runs.folder / "ends.py").write_text("import os\nos._exit(9)\n")
    worker = start(runs)
    path = runs.layout.fleet.settings
    for number, text in enumerate(HOSTILE_TEXTS.values(), start=1):
        version = {"id": f"{number:010}", "number": 10 * number, "text": text, "at": 1e9}
        outsider.set(path, json.dumps({place: version}).encode())
        runs.app.send("q", number)
        wait_until(lambda count=number: len(runs.runs("q")) == count, f"after {text[:60]}")  # type: ignore[misc]
        shown = qdo("settings", "show")
        assert "Traceback" not in shown.err
        assert qdo("settings", "apply", "-", stdin="fetch = 6").code == 0
        assert in_force(qdo) == {"fetch": 6}
    assert worker.output.count("registered;") == 1


def test_an_editor_that_fails_changes_nothing(qdo: Run) -> None:
    for editor in ("false", "/no/such/editor"):
        ended = qdo("settings", "edit", EDITOR=editor, VISUAL=editor)
        *hints, error = ended.err.splitlines()
        assert (ended.code, error.partition(":")[0]) == (2, "qdo"), ended
        assert all(each.startswith("hint: ") for each in hints)


@pytest.mark.parametrize(
    ("typed", "code", "error"),
    [
        ("atempts = 5", 2, "unknown setting 'atempts' in live settings"),
        ("backoff_seconds = 5", 5, "every worker must accept"),
    ],
)
def test_an_edited_text_is_kept_when_it_is_refused(
    runs: AppRuns, qdo: Run, typed: str, code: int, error: str
) -> None:
    """In a file that the hint names, and from which it can be applied after a correction."""
    start(runs, own="backoff_max_seconds = 1")
    editor = runs.folder / "editor.sh"
    editor.write_text(f"#!/bin/sh\necho '{typed}' > \"$1\"\n")
    editor.chmod(0o755)
    ended = qdo("settings", "edit", EDITOR=str(editor), TMPDIR=str(runs.folder))
    assert ended.code == code, ended
    hint, message = ended.err.splitlines()
    assert message.startswith(f"qdo: {error}")
    (kept,) = runs.folder.glob("qdo-settings-*.toml")
    assert str(kept) in hint
    assert kept.read_text() == f"{typed}\n"
    assert kept.stat().st_mode & 0o077 == 0


BAD = [
    (2, "set", "atempts", "5"),
    (2, "set", "attempts", "0"),
    (2, "set", "attempts", "five"),
    (2, "set", "attempts", ""),
    (2, "set", "concurrency", "5"),
    (2, "set", "policies", "x"),
    (2, "set", "../attempts", "5"),
    (2, "set", "attempts", "5", "--timeout", "soon"),
    (2, "set", "attempts", "5", "--reason", "r" * 10_000),
    (2, "unset", "nothing"),
    (6, "unset", "attempts"),
    (2, "apply", "no-such-file"),
    (2, "apply", "big.toml"),
    (2, "apply", "wide.toml"),
    (2, "apply", "binary.toml"),
    (2, "apply", "broken.toml"),
    (2, "rollback", "0"),
    (6, "rollback", "9"),
    (6, "diff", "8", "9"),
    (6, "get", "--version", "9"),
]


@pytest.mark.usefixtures("own_folder")
def test_bad_calls_change_nothing(cli: Run) -> None:
    Path("big.toml").write_text("#" * 2_100_000)
    Path("wide.toml").write_text("##" + "\u20ac" * 100_000)
    Path("binary.toml").write_bytes(b"\xff\x00")
    Path("broken.toml").write_text("attempts = \n")
    assert cli("settings", "set", "fetch", "7").code == 0
    for code, *call in BAD:
        ended = cli("settings", *call)
        assert ended.code == code, (call, ended)
        assert len(ended.err.splitlines()) == 1, (call, ended)
        assert ("65536 bytes, got more" in ended.err) == (call[1] in ("big.toml", "wide.toml"))
    assert in_force(cli) == {"fetch": 7}
    assert len(cli("settings", "history", "-o", "json").items()) == 1


def test_other_processes_see_changes(runs: AppRuns, qdo: Run, coordinator_url: str) -> None:
    with App("desk", coordinator=coordinator_url, fetch=50) as app:
        assert app.live.fetch == 50
        assert qdo("settings", "set", "fetch", "77").code == 0
        wait_until(lambda: app.live.fetch == 77, "the change")
        assert app.live.origin("fetch") == "live 1"
    with (
        App("desk", coordinator="zookeeper://127.0.0.1:1", connect_seconds=0.2) as lost,
        pytest.raises(CoordinatorUnreachableError),
    ):
        lost.live.attempts  # noqa: B018


def test_the_leader_keeps_the_newest_versions(runs: AppRuns, qdo: Run, outsider: Client) -> None:
    start(runs)
    folder = runs.layout.fleet.settings
    for number in range(1, KEPT_VERSIONS + 31):
        version = SettingsVersion("0123456789", number, f"fetch = {number}\n")
        outsider.create(version_path(runs.layout, number), version.encode())
    outsider.create(f"{folder}/foreign", b"")
    chore = SurplusChore(lambda layout: layout.fleet.settings, surplus_versions)
    assert chore(outsider, runs.layout, CheckOp(runs.layout.rebalancer)) == 30
    assert len(outsider.get_children(folder)) == KEPT_VERSIONS + 1
    assert qdo("settings", "history", "-o", "json").items()[0]["version"] == KEPT_VERSIONS + 30
    assert qdo("settings", "set", "fetch", "7", "-o", "json").items()[0]["version"] == 131
