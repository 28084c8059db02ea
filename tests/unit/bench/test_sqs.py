"""The figures that `bench.sqs` derives from a server's log of requests, its tables and goals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.sqs import (
    BARE,
    CELERY,
    QDO,
    consumers,
    goals,
    middle,
)
from bench.support.sqs_runs import Load, Rest
from bench.support.sqs_traffic import DELETING, ActionCount, PerMessage, SqsTraffic, per_queue_hour


def row(
    action: str, queue: str, requests: int, entries: int = 0, empty: int = 0
) -> dict[str, object]:
    """Return a line of a server's log."""
    return {
        "action": action,
        "queue": queue,
        "requests": requests,
        "entries": entries,
        "empty": empty,
        "errors": 0,
    }


LOG = [
    row("SendMessageBatch", "q-1", 10, 100),
    row("ReceiveMessage", "q-1", 12, 100, 2),
    row("DeleteMessageBatch", "q-1", 11, 100),
    row("ChangeMessageVisibilityBatch", "q-1", 1, 10),
    row("ListQueues", "", 1, 1),
    row("ReceiveMessage", "r-1", 5, 0, 5),
]


def test_requests_are_shared_out_among_the_messages_deleted() -> None:
    """Sending is not the consumer's, and all that it asks beside is."""
    found = PerMessage.of(SqsTraffic.of(LOG[:5]))
    assert (found.receives, found.deletes, found.holds, found.other) == (0.12, 0.11, 0.01, 0.01)
    assert found.requests == pytest.approx(0.25)
    assert found.empty_receives == 2


def test_requests_per_message_need_messages() -> None:
    """If nothing was deleted, the figure does not exist."""
    with pytest.raises(ValueError, match="deleted"):
        PerMessage.of(SqsTraffic.of(LOG[5:]))


def test_an_earlier_log_is_taken_off() -> None:
    """By action and queue; new entries count in full."""
    later = [row("ReceiveMessage", "r-1", 9, 1, 8), row("DeleteMessage", "r-1", 1, 1)]
    found = SqsTraffic.of(later).since(SqsTraffic.of(LOG))
    assert found.counts["ReceiveMessage", "r-1"] == ActionCount(4, 1, 3)
    assert found.total(DELETING) == ActionCount(1, 1, 0)


def test_queues_are_told_apart_by_their_prefix() -> None:
    """Two consumers of one server do not count for each other."""
    found = SqsTraffic.of(LOG).queues("r-")
    assert found.consuming().requests == 5
    assert (found.busy_queues(), SqsTraffic.of(LOG).busy_queues()) == (1, 2)


def test_an_hour_is_extrapolated_from_what_was_counted() -> None:
    """Requests in so many seconds, for so many queues; sending left out."""
    assert per_queue_hour(SqsTraffic.of(LOG), queues=2, seconds=60) == 30 / 2 * 60


def a_load(rate: float, requests: float = 0.2) -> Load:
    asked = PerMessage(requests / 2, requests / 2, 0.0, 0.0, 0)
    return Load(1000, 1000 / rate, 0.1, 0.05, asked, 3)


def a_rest(cpu_percent: float = 1.0) -> Rest:
    return Rest(1000, 60.0, 90.0, 89.0, cpu_percent, 100 * 2**20, 130 * 2**20, 500)


def test_the_middle_run_stands_for_all() -> None:
    """Its requests are shown, not the mean of all."""
    runs = [a_load(100), a_load(300), a_load(200)]
    assert middle(runs).rate == pytest.approx(200)
    assert middle(runs[:2]).rate == pytest.approx(300)


@pytest.mark.parametrize(
    ("own", "bare", "requests", "cpu", "missed"),
    [
        (950, 1000, 0.2, 4.9, []),
        (850, 1000, 0.2, 4.9, ["qdo / bare loop, messages/s"]),
        (950, 1000, 0.3, 4.9, ["qdo: requests/message"]),
        (950, 1000, 0.2, 5.1, ["1,000 idle queues: % of a core"]),
    ],
)
def test_goals_are_judged(
    own: float, bare: float, requests: float, cpu: float, missed: Sequence[str]
) -> None:
    """Each by itself."""
    loads = {QDO: [a_load(own, requests)], BARE: [a_load(bare)]}
    found = goals(loads, {"qdo": a_rest(cpu)})
    assert [goal.what for goal in found if not goal.reached] == missed
    assert len(found) == 5


def test_rates_are_judged_by_their_medians() -> None:
    """One good run is not enough, and one bad one no harm."""
    loads = {QDO: [a_load(950), a_load(2000), a_load(5)], BARE: [a_load(1000)]}
    (rate,) = [goal for goal in goals(loads, {}) if "messages/s" in goal.what]
    assert (rate.found, rate.reached) == ("0.95", True)


def test_what_was_not_measured_is_not_judged() -> None:
    """No goal stands on a program that failed or was left out."""
    assert goals({QDO: [], BARE: [a_load(1)]}, {}) == []
    assert CELERY not in {consumer.name for consumer in consumers(None)}
