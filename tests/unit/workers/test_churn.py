"""The churn worker: exact totals under repetition, late writes and several processes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo import DeadLetter, Message
from qdo.brokers.sqs.codec import SQS_POSITIONS
from qdo.errors import NotAQdoDatabaseError
from qdo.programs import churn
from qdo.programs.churn import Totals, TotalsFile, count_before_parent


def commit(position: int, fence: int = 1, queue: str = "q", **changes: Any) -> Message:
    body = {
        "repo": queue,
        "commit": f"c{position}",
        "parents": [f"c{position - 1}"],
        "insertions": position,
        "deletions": 1,
    }
    return Message(queue, position, {**body, **changes}, fence=fence)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "churn.db")


@pytest.fixture
def ledger(path: str) -> Iterator[TotalsFile]:
    ledger = TotalsFile(path)
    yield ledger
    ledger.close()


def totals(ledger: TotalsFile, queue: str = "q") -> Totals:
    [found] = [each for each in ledger.totals() if each.queue == queue]
    return found


def test_commits_are_added_up_per_queue(ledger: TotalsFile) -> None:
    """Each queue has a row of its own."""
    assert ledger.count(commit(1))
    assert ledger.count(commit(2))
    assert ledger.count(commit(5, queue="p"))
    assert ledger.totals() == [Totals("p", 1, 5, 1, 0, 0), Totals("q", 2, 3, 2, 0, 0)]


def test_repetition_changes_nothing(ledger: TotalsFile) -> None:
    """After a crash the next owner starts behind the last checkpoint: some come twice."""
    for position in (1, 2, 3):
        ledger.count(commit(position))
    assert not ledger.count(commit(2, fence=2))
    assert not ledger.count(commit(3, fence=2))
    assert ledger.count(commit(4, fence=2))
    assert totals(ledger) == Totals("q", 4, 10, 4, 0, 0)


def test_unstable_positions_are_recognized_by_message_id(ledger: TotalsFile) -> None:
    """A message of SQS has another position each time it is received."""
    first, second = commit(1), commit(2)
    times = iter(range(140_000_000_000_000_000, 140_000_000_000_000_009))

    def received(each: Message, number: int) -> Message:
        return Message("q", next(times) << 256 | number, each.body, id=SQS_POSITIONS)

    assert ledger.count(received(first, 7))
    assert not ledger.count(received(first, 7))
    assert ledger.count(received(second, 8))
    assert totals(ledger) == Totals("q", 2, 3, 2, 0, 0)


def test_late_writes_of_an_old_owner_are_refused(ledger: TotalsFile) -> None:
    """A frozen worker that wakes up after a handover writes under a smaller fence."""
    ledger.count(commit(1, fence=1))
    ledger.count(commit(2, fence=2))
    assert not ledger.count(commit(3, fence=1))
    assert ledger.count(commit(3, fence=2))
    assert totals(ledger) == Totals("q", 3, 6, 3, 1, 0)


@pytest.mark.parametrize(
    "body", [None, 5, [], {}, {"commit": "c", "parents": [], "insertions": "x", "deletions": 1}]
)
def test_other_bodies_are_set_aside(ledger: TotalsFile, body: Any) -> None:
    """Trying again would not make them commits."""
    with pytest.raises(DeadLetter, match="commit record"):
        ledger.count(Message("q", 1, body, fence=1))
    assert ledger.totals() == []


def test_order_is_checked_against_parents() -> None:
    """A commit before its parent counts; parents that are not messages do not."""
    assert count_before_parent([("a", []), ("b", ["a", "unknown"]), ("c", ["b", "a"])]) == 0
    assert count_before_parent([("b", ["a"]), ("a", []), ("c", ["a"])]) == 1
    assert count_before_parent([("a", []), ("b", ["a"]), ("a", []), ("b", ["a"])]) == 0


def test_report(path: str, ledger: TotalsFile, capsys: pytest.CaptureFixture[str]) -> None:
    """Totals go to stdout, words to stderr, and broken order to the exit code."""
    ledger.count(commit(1))
    ledger.count(commit(2))
    assert churn.main(["report", "--ledger", path, "-o", "json"]) == 0
    output = capsys.readouterr()
    [item] = json.loads(output.out)["items"]
    assert (item["queue"], item["commits"], item["before_parent"]) == ("q", 2, 0)
    assert output.err == "1 queues, 2 commits, 0 counted before a parent\n"
    ledger.count(commit(3, parents=["c4"]))
    ledger.count(commit(4))
    assert churn.main(["--ledger", path]) == 1
    assert "1 counted before a parent" in capsys.readouterr().err


def test_report_without_a_ledger(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file that does not exist is not made."""
    missing = tmp_path / "none.db"
    assert churn.main(["--ledger", str(missing)]) == 6
    assert capsys.readouterr().err == f"churn: ledger '{missing}' does not exist\n"
    assert not missing.exists()


def test_a_ledger_of_another_kind(tmp_path: Path) -> None:
    """Another program's database is left alone."""
    from qdo.brokers.registry import open_broker

    path = str(tmp_path / "messages.db")
    open_broker(f"sqlite:{path}", "a").close()
    with pytest.raises(NotAQdoDatabaseError):
        TotalsFile(path)


def test_the_job_opens_its_ledger(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by --job alone it uses the default context, an empty dict."""
    monkeypatch.setenv("CHURN_DB", path)
    context: dict[str, Any] = {}
    churn.job(commit(1), context)
    churn.job(commit(2), context)
    assert totals(context["ledger"]).commits == 2
    context["ledger"].close()
    with churn.app.hooks.job_context() as ready:
        churn.job(commit(3), ready)
        assert totals(ready["ledger"]).commits == 3


def _count_all(path: str, queue: str) -> None:
    ledger = TotalsFile(path)
    for position in range(1, 301):
        ledger.count(commit(position, queue=queue))
    ledger.close()


def test_several_processes_write_at_once(path: str) -> None:
    """Writers wait for each other; two that count the same queue count each commit once."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=_count_all, args=(path, queue))
        for queue in ("a", "b", "b")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    ledger = TotalsFile(path)
    assert [(each.queue, each.commits) for each in ledger.totals()] == [("a", 300), ("b", 300)]
    ledger.close()
