"""Stores of requests: each request is taken, run by one worker at a time, and ends once."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.postgresql.broker import PostgresqlBroker
from qdo.brokers.requests import (
    OVER,
    PAUSED,
    RUNNING,
    WAITING,
    NewRequest,
    PoolCounts,
    RequestRecord,
    Take,
    TakenRequest,
)
from qdo.errors import (
    MessageTooLargeError,
    QueueLimitError,
    QueueNameError,
    RequestExistsError,
    UnsupportedError,
    UsageError,
)
from tests.support.brokers import rows
from tests.support.processes import wait_until

MIB = 1024 * 1024
FAR = 4e9
CANCEL, RESUME = '{"cancel": "no"}', '{"resume": "cancel"}'


def new(id: str, body: bytes = b"1", pool: str = "p", **options: Any) -> NewRequest:
    digest = hashlib.sha256(b"%s %s" % (pool.encode(errors="replace"), body)).digest()
    return NewRequest(pool, id, (body, None), digest, **options)


def ask(broker: Broker, *ids: str, **options: Any) -> None:
    assert broker.requests.ask([new(each, **options) for each in ids]) == [True] * len(ids)


def take(broker: Broker, places: int = 9, owner: str = "w", pool: str = "p") -> list[TakenRequest]:
    """Take requests, as a worker that runs all of its own."""
    own = [each.id for each in broker.requests.records(pool) if each.take.owner == owner]
    return list(broker.requests.take(owner, pool, places, own).requests)


def take_one(broker: Broker, id: str = "a", **options: Any) -> Take:
    ask(broker, id, **options)
    (taken,) = take(broker)
    return taken.take


def found(broker: Broker, id: str = "a") -> RequestRecord:
    record = broker.requests.find(id)
    assert record is not None
    return record


def ids(requests: Any) -> list[str]:
    return [each.take.id for each in requests]


def told(broker: Broker, queue: str = "told") -> list[bytes]:
    return [row.body for row in rows(broker, queue)]


MESSAGE = Outgoing("told", b"over", "k")


def test_a_request_is_stored_once(connect: Callable[..., Broker]) -> None:
    """By its id, whatever has become of it; its first priority, due and reply count."""
    store = connect().requests
    assert store.ask([new("a", priority=3, reply='{"then": "q"}'), new("a"), new("b")]) == [
        True,
        False,
        True,
    ]
    assert connect().requests.ask([new("a", due=FAR), new("c")]) == [False, True]
    (first, *_) = store.take("w", "p", 9, []).requests
    assert (first.priority, first.reply) == (3, '{"then": "q"}')
    assert store.end(first.take, "failed", error="E")
    assert store.ask([new("a")]) == [False]
    assert ids(store.records()) == ["a", "b", "c"]
    assert store.ask([]) == []


def test_an_id_with_another_body_is_refused(broker: Broker) -> None:
    """Or with another pool; none of the others is stored then."""
    ask(broker, "a")
    for other in (new("a", b"2"), new("a", pool="other")):
        with pytest.raises(RequestExistsError) as error:
            broker.requests.ask([new("b"), other, new("c")])
        assert error.value.details == {"id": "a"}
    with pytest.raises(RequestExistsError):
        broker.requests.ask([new("b"), new("b", b"2")])
    assert ids(broker.requests.records()) == ["a"]


def test_apps_do_not_see_each_other(connect: Callable[..., Broker]) -> None:
    """Not even by the same ids, pools and names of workers."""
    mine, other = connect(), connect("another")
    held = take_one(mine)
    assert other.requests.find("a") is None
    assert other.requests.owners() == other.requests.records() == []
    assert other.requests.due("w") == {}
    assert other.requests.counts() == {}
    assert ids(other.requests.take("w", "p", 9, []).requests) == []
    assert other.requests.give_back("w") == 0
    assert not other.requests.mark("a", CANCEL)
    assert not other.requests.end(held, "done")
    assert not other.requests.put_back(held, 1, 0.0, None)
    assert not other.requests.note(held, PAUSED, None)
    assert other.requests.ask([new("a", b"2")]) == [True]
    assert mine.requests.find("a") == found(mine)
    assert found(mine).take == held


def test_a_taken_request_has_all_that_was_asked(broker: Broker) -> None:
    """Bodies are any bytes; texts are kept to the letter."""
    began = time.time()
    headers, reply = '{"a": "\u00fc"}', '{"then": "q/\u00e4"}'
    request = replace(new("i/1 \u00fc\U0001f600", bytes(range(256))), reply=reply, priority=9)
    broker.requests.ask([replace(request, content=(request.content[0], headers))])
    (taken,) = take(broker)
    assert taken == TakenRequest(
        take=Take(request.id, "w", 1),
        pool="p",
        content=(bytes(range(256)), headers),
        priority=9,
        failed=0,
        crashed=False,
        error=None,
        asked=taken.asked,
        reply=reply,
    )
    assert began - 1 <= taken.asked <= time.time() + 1
    record = found(broker, request.id)
    assert record.content == taken.content
    assert (record.take, record.state, record.outcome) == (taken.take, RUNNING, None)
    assert taken.asked - 1 <= record.started <= time.time() + 1


def test_priorities_come_first_then_age(broker: Broker) -> None:
    """A request that waits again keeps its age."""
    ask(broker, "1", "2")
    ask(broker, "3", priority=0)
    ask(broker, "4", priority=9)
    ask(broker, "5")
    ask(broker, "6", pool="other")
    first = take(broker, places=2)
    assert ids(first) == ["3", "1"]
    assert broker.requests.put_back(first[1].take, 1, 0.0, "E")
    assert ids(take(broker)) == ["1", "2", "5", "4"]
    assert ids(take(broker, pool="other")) == ["6"]


def test_some_places_go_to_the_oldest_requests(broker: Broker) -> None:
    """Whatever their priorities; one that is the most urgent as well takes one place."""
    ask(broker, "far", due=FAR, priority=0)
    ask(broker, "1", "2", priority=9)
    ask(broker, "3", "4", "5", priority=0)
    ask(broker, "6", priority=5)
    for places, oldest, wanted in ((1, 1, {"1"}), (3, 1, {"2", "3", "4"}), (2, 2, {"5", "6"})):
        taken = broker.requests.take("w", "p", places, ["1", "2", "3", "4"], oldest)
        assert {*ids(taken.requests)} == wanted
    assert broker.requests.take("w", "p", 1, list("123456"), 1).next_due == pytest.approx(FAR)


def test_a_request_is_taken_once_it_is_due(broker: Broker) -> None:
    """Of those that are due, priority and age decide."""
    ask(broker, "far", due=FAR, priority=0)
    assert take(broker) == []
    assert broker.requests.take("w", "p", 9, []).next_due == pytest.approx(FAR)
    due = time.time() + 0.4
    ask(broker, "later", due=due, priority=1)
    ask(broker, "past", due=1.0)
    wait_until(lambda: time.time() > due, "it is due")
    ask(broker, "now")
    assert ids(take(broker)) == ["later", "past", "now"]
    assert broker.requests.take("x", "p", 9, []).next_due == pytest.approx(FAR)


def test_take_fills_places(broker: Broker) -> None:
    """It says when the next is due: in the past if there are more than places."""
    ask(broker, *map(str, range(5)))
    taken = broker.requests.take("w", "p", 2, [])
    assert ids(taken.requests) == ["0", "1"]
    assert taken.next_due is not None
    assert taken.next_due <= time.time()
    assert ids(broker.requests.take("w", "p", 0, ["0", "1"]).requests) == []
    taken = broker.requests.take("x", "p", 4, [])
    assert ids(taken.requests) == ["2", "3", "4"]
    assert taken.next_due is None


def test_lost_answers_are_taken_again(broker: Broker) -> None:
    """With another number, beyond all places, and only by their worker and of their pool."""
    ask(broker, "1", "2", "3")
    ask(broker, "4", pool="other")
    broker.requests.take("w", "other", 1, [])
    lost = broker.requests.take("w", "p", 2, []).requests
    assert ids(broker.requests.take("x", "p", 0, []).requests) == []
    again = broker.requests.take("w", "p", 0, ["1"]).requests
    assert [each.take for each in again] == [Take("2", "w", 2)]
    assert not broker.requests.end(lost[1].take, "done", messages=[MESSAGE])
    assert broker.requests.note(again[0].take, PAUSED, "n")
    both = broker.requests.take("w", "p", 1, []).requests
    assert {each.take for each in both} == {Take("1", "w", 2), Take("2", "w", 3), Take("3", "w", 1)}
    assert found(broker, "2").state == RUNNING
    assert told(broker) == []


def test_marks_reach_the_worker(broker: Broker) -> None:
    """Of running and paused requests; also the worker that takes one next."""
    held = take_one(broker)
    ask(broker, "b", due=FAR)
    assert broker.requests.take("w", "p", 1, ["a"]).marks == {}
    assert not broker.requests.mark("b", CANCEL)
    assert not broker.requests.mark("none", CANCEL)
    assert not broker.requests.mark("a", RESUME)
    assert broker.requests.mark("a", CANCEL)
    assert broker.requests.take("w", "p", 0, ["a", "gone"]).marks == {"a": CANCEL}
    assert broker.requests.take("x", "p", 1, []).marks == {}
    assert found(broker).mark == CANCEL
    assert broker.requests.put_back(held, 1, 0.0, "E")
    assert not broker.requests.mark("a", RESUME)
    taken = broker.requests.take("x", "p", 1, [])
    assert taken.marks == {"a": CANCEL}
    assert broker.requests.end(taken.requests[0].take, "cancelled", error="no")
    assert not broker.requests.mark("a", RESUME)
    assert found(broker).mark is None


def test_a_request_ends_once(broker: Broker) -> None:
    """With its messages, and its result; the same end may be repeated."""
    held = take_one(broker, keep_seconds=60.0)
    result = (bytes(range(256)), '{"h": "1"}')
    assert broker.requests.end(
        held, "done", result, messages=[MESSAGE, replace(MESSAGE, body=b"2")]
    )
    assert broker.requests.end(held, "done", result, messages=[MESSAGE])
    assert broker.requests.end(held, "failed", error="E", messages=[MESSAGE])
    assert told(broker) == [b"over", b"2"]
    assert [row.key for row in rows(broker, "told")] == ["k", "k"]
    record = found(broker)
    assert (record.state, record.outcome, record.error) == (OVER, "done", None)
    assert record.result == result
    assert record.content == (b"", None)
    assert record.until == pytest.approx(time.time() + 60, abs=5)
    assert not broker.requests.put_back(held, 1, 0.0, None)
    assert not broker.requests.note(held, RUNNING, "n")
    assert broker.requests.give_back("w") == 0
    assert take(broker) == []
    assert found(broker) == record


def test_an_older_take_changes_nothing(broker: Broker) -> None:
    """Neither of the same worker nor of another, whether it is taken, waits or is over."""

    def nothing(*takes: Take) -> None:
        before = found(broker)
        for each in takes:
            assert not broker.requests.end(each, "failed", error="old", messages=[MESSAGE])
            assert not broker.requests.put_back(each, 7, 0.0, "old")
            assert not broker.requests.note(each, PAUSED, "old", messages=[MESSAGE])
        assert found(broker) == before

    old = take_one(broker)
    assert broker.requests.put_back(old, 0, 0.0, None)
    nothing(old)
    (same,) = take(broker)
    nothing(old, replace_owner(same.take, "x"), replace_owner(same.take, ""))
    assert broker.requests.give_back("w") == 1
    nothing(old, same.take)
    (taken,) = take(broker, owner="x")
    assert taken.take.number == 3
    nothing(old, same.take, replace_owner(same.take, "x"))
    assert broker.requests.end(taken.take, "done", (b"3", None))
    nothing(old, same.take)
    assert told(broker) == []


def replace_owner(take: Take, owner: str) -> Take:
    return take._replace(owner=owner)


def test_an_end_and_its_message_are_one(broker: Broker) -> None:
    """A message that cannot be stored leaves the request as it was."""
    broker.max_queues = 1
    held = take_one(broker)
    bad = Outgoing("told", bytes(broker.capabilities.max_body_bytes + 1))
    for message, error in ((Outgoing("a/b", b"1"), QueueNameError), (bad, MessageTooLargeError)):
        with pytest.raises(error):
            broker.requests.end(held, "done", messages=[MESSAGE, message])
        with pytest.raises(error):
            broker.requests.note(held, PAUSED, "n", messages=[MESSAGE, message])
    both = [MESSAGE, replace(MESSAGE, queue="second")]
    with pytest.raises(QueueLimitError):
        broker.requests.end(held, "done", messages=both)
    with pytest.raises(QueueLimitError):
        broker.requests.note(held, PAUSED, "n", messages=both)
    assert (found(broker).state, told(broker)) == (RUNNING, [])
    assert broker.requests.note(held, PAUSED, "n", messages=[MESSAGE])
    assert broker.requests.end(held, "done", messages=[MESSAGE])
    assert told(broker) == [b"over", b"over"]


def test_a_request_is_paused_and_goes_on(broker: Broker) -> None:
    """The mark that resumed it is deleted then; a mark that cancels it stays."""
    held = take_one(broker)
    assert broker.requests.note(held, RUNNING, "50 %")
    assert (found(broker).state, found(broker).note) == (RUNNING, "50 %")
    assert broker.requests.note(held, PAUSED, "approve?", [MESSAGE])
    assert found(broker).asks
    assert broker.requests.mark("a", RESUME, found(broker).mark)
    assert broker.requests.note(held, PAUSED, "approve?")  # the answer to the first was lost
    assert (found(broker).state, found(broker).mark) == (PAUSED, RESUME)
    assert not found(broker).asks
    assert broker.requests.note(held, RUNNING, None)
    assert (found(broker).state, found(broker).note, found(broker).mark) == (RUNNING, None, None)
    assert broker.requests.note(held, PAUSED, "again?")
    asked = found(broker).mark
    assert broker.requests.mark("a", CANCEL)
    assert not broker.requests.mark("a", RESUME, asked)
    assert not broker.requests.mark("a", RESUME, CANCEL)
    assert broker.requests.mark("a", CANCEL)
    assert broker.requests.note(held, RUNNING, None)
    assert found(broker).mark == CANCEL
    assert told(broker) == [b"over"]


@pytest.mark.parametrize("lose", ["goes on", "put back", "given back", "taken again"])
def test_an_answer_is_for_one_question(broker: Broker, lose: str) -> None:
    """Of one take: neither an unread answer nor a late one is for the next question."""
    store, held = broker.requests, take_one(broker)
    assert store.note(held, PAUSED, "A?")
    first = found(broker).mark
    for other in (None, "", RESUME, '{"paused": 0}'):
        assert not store.mark("a", RESUME, other)
    assert store.mark("a", RESUME, first)
    assert not store.mark("a", RESUME, RESUME)
    if lose == "goes on":
        assert store.note(held, RUNNING, None)
    elif lose == "put back":
        assert store.put_back(held, 0, 0.0, None)
    elif lose == "given back":
        assert store.give_back("w") == 1
    if lose != "goes on":
        (taken,) = store.take("w", "p", 1, []).requests
        held = taken.take
    assert found(broker).mark is None
    assert not store.mark("a", RESUME, first)
    assert store.note(held, PAUSED, "B?")
    assert not store.mark("a", RESUME, first)
    assert found(broker).asks
    assert store.mark("a", RESUME, found(broker).mark)


def test_the_store_knows_which_pools_have_something(broker: Broker) -> None:
    """By one call: when their next request is due, and what a worker owns and does not run."""
    store, now = broker.requests, time.time()
    ask(broker, "1", due=-600.0, pool="later")
    ask(broker, "2", due=FAR, pool="now")
    ask(broker, "3", pool="now")
    ask(broker, "4", pool="lost")
    store.take("w", "lost", 1, [])
    found = store.due()
    assert found == {"later": pytest.approx(now + 600, abs=30), "now": found["now"]}
    assert store.due("x").keys() == store.due("w", ["4"]).keys() == {"later", "now"}
    assert all(store.due("w", ["5"])[pool] <= time.time() for pool in ("lost", "now"))


def test_a_request_is_put_back(broker: Broker) -> None:
    """Until it is due, with its failed attempts and the last error, also a paused one."""
    held = take_one(broker)
    assert broker.requests.note(held, PAUSED, "n")
    assert broker.requests.put_back(held, 1, 600.0, "E: \ud800 \0")
    record = found(broker)
    assert (record.state, record.take, record.failed) == (WAITING, Take("a", "", 1), 1)
    assert record.due == pytest.approx(time.time() + 600, abs=30)
    assert record.error == "E: \\ud800 \\x00"
    assert take(broker) == []
    assert broker.requests.owners() == []
    ask(broker, "b")
    (other,) = take(broker)
    assert broker.requests.put_back(other.take, 2, 0.0, "E")
    (again,) = take(broker)
    assert (again.take, again.failed, again.crashed) == (Take("b", "w", 2), 2, False)
    assert again.error == "E"
    assert broker.requests.put_back(again.take, 2, 0.0, None)
    assert take(broker)[0].error == "E"


def test_a_worker_that_is_gone_gives_back(broker: Broker) -> None:
    """All its requests wait again, each with an attempt that failed; others keep theirs."""
    ask(broker, "1", "2", "3", "4")
    (first, second, *_) = take(broker, places=3)
    take(broker, owner="x")
    assert broker.requests.put_back(first.take, 1, 0.0, "E")
    assert broker.requests.note(second.take, PAUSED, "n")
    assert sorted(broker.requests.owners()) == ["w", "x"]
    assert broker.requests.give_back("w") == 2
    assert broker.requests.give_back("w") == 0
    assert broker.requests.owners() == ["x"]
    assert not broker.requests.end(second.take, "done")
    taken = take(broker, owner="y")
    assert [(each.take.id, each.failed, each.crashed) for each in taken] == [
        ("1", 1, False),
        ("2", 1, True),
        ("3", 1, True),
    ]
    assert [each.error and "w died" in each.error for each in taken] == [False, True, True]
    assert broker.requests.put_back(taken[1].take, 1, 0.0, None)  # a drain: no attempt began
    assert [each.crashed for each in take(broker, owner="z")] == [True]


def test_a_cancelled_request_never_runs(broker: Broker) -> None:
    """One that waits is ended with the take of its record, unless it was taken since."""
    ask(broker, "a", "b", due=1.0)
    waiting = found(broker).take
    assert waiting == Take("a", "", 0)
    assert broker.requests.end(waiting, "cancelled", error="no", messages=[MESSAGE])
    assert broker.requests.end(waiting, "cancelled", error="no", messages=[MESSAGE])
    assert told(broker) == [b"over"]
    other = found(broker, "b").take
    assert ids(take(broker)) == ["b"]
    assert not broker.requests.end(other, "cancelled", error="no", messages=[MESSAGE])
    assert broker.requests.give_back("w") == 1
    assert not broker.requests.end(other, "cancelled", error="no", messages=[MESSAGE])
    assert told(broker) == [b"over"]
    assert (found(broker).outcome, found(broker).error) == ("cancelled", "no")
    assert ids(take(broker)) == ["b"]


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "skipped"])
def test_an_over_request_is_retried(broker: Broker, outcome: str) -> None:
    """It waits with its body, its attempts count anew, and the old end does not end it."""
    held = take_one(broker, body=b"body")
    assert not broker.requests.retry("a")
    assert broker.requests.put_back(held, 3, 0.0, "E")
    assert not broker.requests.retry("a")
    waiting = found(broker).take
    assert broker.requests.end(waiting, outcome, (b"r", None), "E")
    assert broker.requests.retry("a")
    assert not broker.requests.retry("a")
    record = found(broker)
    assert (record.state, record.outcome, record.result) == (WAITING, None, None)
    assert (record.failed, record.until, record.take.owner) == (0, 0.0, "")
    assert not broker.requests.end(waiting, outcome)
    (again,) = take(broker)
    assert (again.content, again.failed, again.crashed) == ((b"body", None), 0, False)
    assert again.take.number > held.number
    assert broker.requests.end(again.take, "done")
    assert not broker.requests.retry("a")
    assert not broker.requests.retry("none")


def test_over_requests_expire(broker: Broker) -> None:
    """After their time, at most 1,000 at once; no other is deleted, and ids may be used again."""
    number = 1001
    broker.requests.ask([new(f"{each}", keep_seconds=0.0) for each in range(number)])
    ask(broker, "kept")
    ask(broker, "waiting", keep_seconds=0.0, due=FAR)
    for each in broker.requests.take("w", "p", number + 1, []).requests:
        assert broker.requests.end(each.take, "done")
    assert broker.requests.expire() == 1000
    assert broker.requests.expire() == 1
    assert broker.requests.expire() == 0
    assert ids(broker.requests.records()) == ["kept", "waiting"]
    ask(broker, "0", body=b"other")
    assert ids(broker.requests.records()) == ["kept", "waiting", "0"]


def test_requests_are_counted_and_listed(broker: Broker) -> None:
    """By pool and state, the oldest first, without their bodies and results."""
    began = time.time()
    ask(broker, "1", "2", "3", "4", pool="a")
    ask(broker, "5", "6", pool="b")
    ask(broker, "7", due=FAR, pool="c")
    (first, second, *_) = take(broker, places=3, pool="a")
    assert broker.requests.end(first.take, "done", (b"result", None))
    assert broker.requests.note(second.take, PAUSED, "n")
    assert sorted(broker.requests.due()) == ["a", "b", "c"]
    counts = broker.requests.counts()
    oldest = {pool: each.oldest for pool, each in counts.items()}
    assert counts == {
        "a": PoolCounts(1, 1, 1, oldest["a"]),
        "b": PoolCounts(2, 0, 0, oldest["b"]),
        "c": PoolCounts(1, 0, 0, None),
    }
    assert [each and began - 1 < each < began + 5 for each in oldest.values()] == [1, 1, None]
    listed = broker.requests.records
    assert ids(listed()) == list("1234567")
    assert ids(listed("a")) == list("1234")
    assert ids(listed(limit=2)) == ["1", "2"]
    assert ids(listed(states=[RUNNING, PAUSED])) == ["2", "3"]
    assert ids(listed(states=[PAUSED])) == ["2"]
    assert ids(listed("b", [WAITING, OVER], 1)) == ["5"]
    assert ids(listed(states=[OVER, WAITING], limit=3)) == ["1", "4", "5"]
    assert ids(listed(states=[WAITING, PAUSED], limit=3, newest=True)) == ["7", "6", "5"]
    assert ids(listed("a", newest=True)) == list("4321")
    assert listed("none") == listed("a", [PAUSED], 0) == []
    for each in listed():
        assert (each.content, each.result) == ((b"", None), None)
        whole = found(broker, each.id)
        assert replace(whole, content=each.content, result=None) == each
        assert broker.requests.find(each.id, whole=False) == replace(each, result=whole.result)
    assert found(broker, "1").result == (b"result", None)
    assert broker.requests.find("none") is broker.requests.find("none", whole=False) is None
    for each in take(broker, pool="b"):
        broker.requests.end(each.take, "done")
    assert broker.requests.end(found(broker, "7").take, "cancelled")
    assert [*broker.requests.due()] == ["a"]
    assert [*broker.requests.counts()] == ["a"]


def test_failed_requests_stay_until_they_are_decided(broker: Broker) -> None:
    """They are counted, also once their time is over; discarding concerns no other request."""
    for id, outcome in (("a", "failed"), ("b", "failed"), ("c", "skipped"), ("d", "cancelled")):
        held = take_one(broker, id, keep_seconds=0.0)
        assert broker.requests.end(held, outcome, error="E", failed=3)
        assert (found(broker, id).failed, found(broker, id).ended > 1e9) == (3, True)
    ask(broker, "waiting", pool="other")
    assert ids(broker.requests.records(outcome="failed")) == ["a", "b"]
    assert ids(broker.requests.records("p", [OVER], 9, newest=True, outcome="failed")) == ["b", "a"]
    assert ids(broker.requests.records(outcome="skipped")) == ["c"]
    assert broker.requests.records("other", outcome="failed") == []
    assert broker.requests.expire() == 2
    assert {pool: each.failed for pool, each in broker.requests.counts().items()} == {
        "p": 2,
        "other": 0,
    }
    assert broker.requests.expire(["a", "waiting", "none"]) == 1
    assert broker.requests.retry("b")
    assert broker.requests.expire(["b"]) == 0
    assert broker.requests.counts()["p"].failed == 0


def test_an_id_is_free_again_after_its_time(broker: Broker) -> None:
    """A failed request does not keep its id for longer than others, and makes room for the new."""
    for id, keep in (("over", 0.0), ("kept", 3600.0)):
        assert broker.requests.end(take_one(broker, id, keep_seconds=keep), "failed", error="E")
    assert broker.requests.ask([new("over", b"2"), new("kept"), new("b")]) == [True, False, True]
    assert found(broker, "over").content == (b"2", None)
    with pytest.raises(RequestExistsError):
        broker.requests.ask([new("kept", b"2")])
    assert broker.requests.counts()["p"].failed == 1


def test_listeners_are_woken(connect: Callable[..., Broker]) -> None:
    """Soon after each change that they may have waited for, until they stop."""
    broker, other = connect(), connect()
    woken = threading.Event()
    stop = other.requests.listen(woken.set)

    def wakes(change: Callable[[], object]) -> None:
        woken.clear()
        assert change()
        assert woken.wait(5), change

    wakes(lambda: broker.requests.ask([new("a")]))
    held = take(broker)[0].take
    wakes(lambda: broker.requests.mark("a", CANCEL))
    wakes(lambda: broker.requests.put_back(held, 1, 0.0, None))
    take(broker)
    wakes(lambda: broker.requests.give_back("w"))
    assert broker.requests.end(take(broker)[0].take, "failed")
    wakes(lambda: broker.requests.retry("a"))
    stop()
    stop()
    woken.clear()
    again = threading.Event()
    last = other.requests.listen(again.set)
    ask(broker, "b")
    assert again.wait(5)
    assert not woken.is_set()
    last()


def test_requests_do_not_disturb_messages(broker: Broker) -> None:
    """Listeners of queues hear of the messages that ends send."""
    names: list[str] = []
    stop = broker.listen(names.extend)
    held = take_one(broker)
    assert broker.requests.end(held, "done", messages=[MESSAGE])
    wait_until(lambda: "told" in names, "the message is known")
    stop()
    assert set(names) == {"told"}
    assert "p" not in broker.catalog.names()


def test_many_requests_at_once(broker: Broker) -> None:
    """All or none of 1,000, in their order, with bodies of every size."""
    requests = [new(f"{each}", bytes(each)) for each in range(1000)]
    assert broker.requests.ask(requests) == [True] * 1000
    assert broker.requests.ask(requests) == [False] * 1000
    taken = broker.requests.take("w", "p", 5000, []).requests
    assert ids(taken) == [each.id for each in requests]
    assert [len(each.content[0]) for each in taken] == [*range(1000)]


def test_hostile_texts_are_refused(broker: Broker) -> None:
    changes: list[dict[str, Any]] = [{"id": bad} for bad in ("", "\ud800", "a\0", "x" * 201)]
    changes += [{"reply": bad} for bad in ("\ud800", "\0")]
    changes += [{"content": (b"1", bad)} for bad in ("\ud800", "\0")]
    changes += [{"pool": bad} for bad in ("", "a/b", "\ud800", "a\0")]
    for change in changes:
        with pytest.raises(UsageError):
            broker.requests.ask([new("b"), replace(new("a"), **change)])
    assert broker.requests.records() == []


def test_hostile_texts_of_jobs_are_kept_legible(broker: Broker) -> None:
    """An attempt must be able to end, whatever its error contains."""
    held = take_one(broker)
    for text in ("\ud800\0'\"; --", "%s {} \u202e\U0001f600"):
        assert broker.requests.note(held, RUNNING, text)
        assert found(broker).note == text.replace("\ud800\0", "\\ud800\\x00")
    with pytest.raises(UsageError):
        broker.requests.mark("a", '{"cancel": "\ud800"}')
    assert broker.requests.end(held, "failed", error="\ud800\0")
    assert found(broker).error == "\\ud800\\x00"
    for refused in (broker.requests.find, broker.requests.retry):
        with pytest.raises(UsageError):
            refused("\ud800")


def test_large_bodies_are_refused(broker: Broker) -> None:
    limit = broker.capabilities.max_body_bytes
    with pytest.raises(MessageTooLargeError) as error:
        broker.requests.ask([new("b"), new("a", bytes(limit + 1))])
    assert error.value.details == {"queue": "p", "size": limit + 1, "limit": limit}
    held = take_one(broker, "whole", body=bytes(limit))
    with pytest.raises(MessageTooLargeError):
        broker.requests.end(held, "done", (bytes(limit + 1), None))
    assert broker.requests.end(held, "done", (bytes(limit), None))
    result = found(broker, "whole").result
    assert result is not None
    assert len(result[0]) == limit


def test_a_take_fits_in_memory(broker: Broker) -> None:
    """It returns about 32 MiB of bodies; the rest comes with the next one."""
    for each in range(5):
        ask(broker, f"{each}", body=bytes(12 * MIB))
    first = broker.requests.take("w", "p", 9, [])
    assert ids(first.requests) in (["0", "1"], ["0", "1", "2"])
    assert first.next_due is not None
    running = ids(first.requests)
    lost = broker.requests.take("w", "p", 9, running).requests
    assert lost
    again = broker.requests.take("w", "p", 9, running).requests
    assert set(ids(again)) == set(ids(lost))


def test_each_request_is_taken_once(connect: Callable[..., Broker]) -> None:
    """By one of eight workers that take, end and put back at the same time."""
    asker = connect()
    brokers = [connect(), connect()]
    broker_ids = [f"{each}" for each in range(500)]
    for start in range(0, 500, 50):
        ask(asker, *broker_ids[start : start + 50])
    ended: Counter[str] = Counter()
    barrier = threading.Barrier(8)

    def work(number: int) -> list[Take]:
        store = brokers[number % 2].requests
        barrier.wait()
        taken: list[Take] = []
        while requests := store.take(f"w{number}", "p", 5, []).requests:
            for each in requests:
                taken.append(each.take)
                if each.failed:
                    message = Outgoing("told", each.take.id.encode())
                    assert store.end(each.take, "done", messages=[message])
                    ended[each.take.id] += 1
                else:
                    assert store.put_back(each.take, 1, 0.0, None)
        return taken

    with ThreadPoolExecutor(8) as threads:
        takes = [each for some in threads.map(work, range(8)) for each in some]
    while left := take(asker):  # those that a worker put back after others had stopped
        for each in left:
            takes.append(each.take)
            assert asker.requests.end(each.take, "done")
            ended[each.take.id] += 1
    assert ended == Counter(broker_ids)
    assert sorted((each.id, each.number) for each in takes) == sorted(
        (each, number) for each in broker_ids for number in (1, 2)
    )
    assert asker.requests.counts() == {}


def test_a_foreign_connection_is_refused(broker: Broker) -> None:
    """Where the broker is no database of apps."""
    if not isinstance(broker, PostgresqlBroker):
        with pytest.raises(UnsupportedError):
            broker.requests.ask([new("a")], connection=object())
        assert broker.requests.records() == []
