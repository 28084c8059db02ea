"""Jobs by kind: which function gets a message, as which type, and what ends at once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import qdo
from qdo.errors import RequestFailedError, UsageError
from qdo.testing import TestKit


@dataclasses.dataclass
class Placed:
    order: int


@dataclasses.dataclass
class Paid:
    order: int
    at: datetime


Job = Callable[[Any, Any], Any]
NOW = datetime(2026, 1, 2, tzinfo=UTC)


class KindApp:
    """An app, the bodies that each of its jobs got, and its kit."""

    def __init__(self) -> None:
        self.app = qdo.App("shop", attempts=5)
        self.got: list[tuple[str, Any]] = []

    def job(self, name: str, queues: str = "customer-*", **options: Any) -> None:
        def job(message: Any, context: Any) -> Any:
            if isinstance(message, qdo.Batch):
                self.got.append((name, [each.body for each in message]))
            else:
                self.got.append((name, message.body))

        self.app.job(queues, **options)(job)

    def stored(self, queue: str, body: Any, kind: str | None = None) -> None:
        """Store a body that another program does not check."""
        known, self.app.type_of = self.app.type_of, None
        self.app.send(queue, body, kind=kind)
        self.app.type_of = known


@pytest.fixture
def shop() -> KindApp:
    return KindApp()


def errors(kit: TestKit) -> list[tuple[int, str]]:
    return [(each.attempts, each.error.partition(":")[0]) for each in kit.dead_letters()]


# --- which function gets a message ---


def test_jobs_share_a_queue_in_its_order(shop: KindApp) -> None:
    """Objects have the kind of their class; other bodies name it."""
    shop.job("placed", body=Placed)
    shop.job("paid", body=Paid)
    shop.job("raw", kind="Image")
    shop.job("rest")
    sent = [Placed(1), Paid(1, NOW), Placed(2)]
    with TestKit(shop.app) as kit:
        for body in sent:
            shop.app.send("customer-1", body)
        shop.app.send("customer-1", {"order": 3, "at": NOW}, kind="Paid")
        shop.app.send("customer-1", b"\xff", kind="Image")
        shop.app.send("customer-1", {"order": 4}, kind="New")
        shop.app.send("customer-1", {"order": 5})
        kit.run_until_settled()
    expected = ["placed", "paid", "placed", "paid", "raw", "rest", "rest"]
    assert [name for name, _ in shop.got] == expected
    bodies = [body for _, body in shop.got]
    assert bodies == [*sent, Paid(3, NOW), b"\xff", {"order": 4}, {"order": 5}]


@pytest.mark.parametrize("kind", [None, "Placed"])
def test_the_only_job_takes_messages_without_a_kind(shop: KindApp, kind: str | None) -> None:
    """Senders that know no kinds need no change."""
    shop.job("placed", body=Placed)
    with TestKit(shop.app) as kit:
        shop.app.send("customer-1", {"order": 1}, kind=kind)
        kit.run_until_settled()
    assert shop.got == [("placed", Placed(1))]


def test_the_most_specific_glob_wins(shop: KindApp) -> None:
    """A kind does not choose between globs."""
    shop.job("rest", "customer-*")
    shop.job("vip", "customer-vip-*", body=Placed)
    with TestKit(shop.app) as kit:
        shop.stored("customer-vip-1", {"order": 1}, "Paid")
        shop.app.send("customer-vip-1", Placed(1))
        kit.run_until_settled()
        assert errors(kit) == [(1, "UnknownKindError")]
    assert shop.got == [("vip", Placed(1))]


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        ({"order": "x"}, "Placed", "BodyTypeError"),
        ({"order": 1}, "Plcaed", "UnknownKindError"),
        ({"order": 1}, None, "UnknownKindError"),
    ],
)
def test_a_misfit_ends_at_once(shop: KindApp, body: Any, kind: str | None, error: str) -> None:
    """The sender refuses it; a message of another program becomes a dead letter."""
    shop.job("placed", body=Placed)
    shop.job("paid", body=Paid)
    with TestKit(shop.app) as kit:
        for send in (shop.app.send, shop.app.stream("customer-s", shards=2).send):
            with pytest.raises(UsageError):
                send("customer-1", body, kind=kind)
        shop.stored("customer-1", body, kind)
        shop.app.send("customer-1", Placed(2))
        kit.run_until_settled()
        assert errors(kit) == [(1, error)]
    assert shop.got == [("placed", Placed(2))]


def test_a_misfit_blocks_a_queue_that_its_policy_blocks(shop: KindApp) -> None:
    shop.job("placed", body=Placed, policy=qdo.Policy(then="block"))
    with TestKit(shop.app) as kit:
        shop.stored("customer-1", {"order": "x"})
        shop.app.send("customer-1", Placed(2))
        kit.run_until_settled()
        assert list(kit.blocked()) == ["customer-1"]
    assert shop.got == []


def test_a_batch_with_a_misfit_runs_one_by_one(shop: KindApp) -> None:
    """A part of it cannot run before the error, which a transaction of middleware would undo."""
    shop.job("placed", body=Placed, batch=10)
    with TestKit(shop.app) as kit:
        for body in [{"order": 1}, {"order": 2}, {"order": "x"}, {"order": 4}]:
            shop.stored("customer-1", body)
        kit.run_until_settled()
        assert errors(kit) == [(1, "BodyTypeError")]
    assert [bodies for _, bodies in shop.got] == [[Placed(1)], [Placed(2)], [Placed(4)]]


def test_a_request_is_not_for_a_queues_job(shop: KindApp) -> None:
    """The job of its pool may be in another program."""
    shop.job("placed", "*", body=Placed)
    with TestKit(shop.app, without_job="elsewhere"):
        shop.app.request("elsewhere", {"other": 1})


def test_a_webhook_has_the_kind_of_its_declaration(shop: KindApp) -> None:
    """Its sender gets no error for a body that does not fit: an operator sees the dead letter."""
    shop.job("placed", "hooks", body=Placed)
    shop.job("rest", "hooks")
    shop.app.webhook("/placed", queue="hooks", verify="none", kind="Placed")
    with TestKit(shop.app) as kit:
        assert [kit.deliver("/placed", {"order": each}) for each in (1, "x")] == [202, 202]
        kit.run_until_settled()
        assert errors(kit) == [(1, "BodyTypeError")]
    assert shop.got == [("placed", Placed(1))]


# --- annotations, coroutines, middleware ---


def test_an_annotation_is_a_type(shop: KindApp) -> None:
    """Of messages, batches and requests; `Any` and other annotations are none."""

    @shop.app.job("a")
    def one(message: qdo.Message[Placed], context: Any) -> None:
        shop.got.append(("one", message.body))

    @shop.app.job("b", batch=5)
    def many(batch: qdo.Batch[Placed], context: Any) -> None:
        shop.got.append(("many", batch[0].body))

    @shop.app.job("c", pool=True)
    def asked(request: qdo.Request[Placed], context: Any) -> Paid:
        return Paid(request.body.order, NOW)

    @shop.app.job("d")
    def free(message: qdo.Message[Any], context: Any) -> None:
        shop.got.append(("free", message.body))

    with TestKit(shop.app) as kit:
        for queue in "abd":
            shop.app.send(queue, {"order": 1})
        handle = shop.app.request("c", Placed(1))
        kit.run_until_settled()
        assert handle.result(type=Paid) == Paid(1, NOW)
        assert handle.result() == {"order": 1, "at": "2026-01-02T00:00:00Z"}
        with pytest.raises(RequestFailedError):
            handle.result(type=list[int])
    fitting = [("free", {"order": 1}), ("many", Placed(1)), ("one", Placed(1))]
    assert sorted(shop.got, key=str) == sorted(fitting, key=str)


def test_an_answer_has_a_type(shop: KindApp) -> None:
    """One that does not fit fails the attempt, and the request asks again."""

    @shop.app.job("ask", pool=True)
    def ask(request: qdo.Request[Placed], context: Any) -> None:
        shop.got.append(("ask", request.pause("when?", type=Paid)))

    @shop.app.job("answers")
    def answer(message: qdo.Message[dict[str, Any]], context: Any) -> None:
        if message.body["outcome"] == "paused":
            answers = 1 if message.body["take"] == 1 else Paid(1, NOW)
            shop.app.handle("a").resume(answers)

    with TestKit(shop.app) as kit:
        shop.app.request("ask", Placed(1), id="a", then="answers", events=True)
        kit.run_until_settled()
    assert shop.got == [("ask", Paid(1, NOW))]


def test_an_unknown_name_in_an_annotation_is_refused(shop: KindApp) -> None:
    def job(message: qdo.Message[Nowhere], context: Any) -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(UsageError):
        shop.app.job("a")(job)
    shop.app.job("a", body=Placed)(job)


def test_a_renamed_class_is_sent_as_its_old_kind(shop: KindApp) -> None:
    shop.job("placed", "a", body=Placed, kind="OrderPlaced")
    shop.job("paid", "a", body=Paid)
    with TestKit(shop.app) as kit:
        shop.app.send_many([("a", Placed(1)), ("a", Paid(1, NOW))])
        shop.app.send("a", {"order": 2}, kind="OrderPlaced")
        kit.run_until_settled()
    assert shop.got == [("placed", Placed(1)), ("paid", Paid(1, NOW)), ("placed", Placed(2))]


def test_an_outage_within_a_type_is_no_misfit(shop: KindApp) -> None:
    """A check may ask a database; the message is retried as after an error of the job."""
    outages = [ConnectionError("away")]

    @dataclasses.dataclass
    class Known:
        order: int

        def __post_init__(self) -> None:
            if outages:
                raise outages.pop()

    shop.job("known", "a", body=Known)
    with TestKit(shop.app) as kit:
        shop.stored("a", {"order": 1})
        kit.run_until_settled()
        assert [each.outcome for each in kit.attempts("a")] == ["retry", "done"]
    assert shop.got == [("known", Known(1))]


def test_two_types_of_one_job_are_refused(shop: KindApp) -> None:
    def job(message: qdo.Message[Paid], context: Any) -> None: ...

    with pytest.raises(UsageError):
        shop.app.job("a", body=Placed)(job)
    shop.app.job("a", body=Paid)(job)


def test_coroutines_share_a_queue(shop: KindApp) -> None:
    @shop.app.job("a", body=Placed)
    async def placed(message: qdo.Message[Placed], context: Any) -> None:
        await asyncio.sleep(0)
        shop.got.append(("placed", message.body))

    @shop.app.job("a", body=Paid)
    async def paid(message: qdo.Message[Paid], context: Any) -> None:
        shop.got.append(("paid", message.body))

    with TestKit(shop.app) as kit:
        shop.app.send_many([("a", Placed(1)), ("a", Paid(1, NOW))])
        kit.run_until_settled()
    assert shop.got == [("placed", Placed(1)), ("paid", Paid(1, NOW))]


def test_middleware_and_hooks_see_json(shop: KindApp) -> None:
    """Only the job's own message has the type; both number equal sends together."""
    shop.job("rest", "out")

    @shop.app.job("a", body=Placed, policy=qdo.Policy(attempts=1))
    def placed(message: qdo.Message[Placed], context: Any) -> None:
        shop.app.send("out", message.body.order, once=message)
        raise ValueError

    @shop.app.middleware
    def around(call_next: Job, message: qdo.Message, context: Any) -> None:
        if message.queue == "a":
            shop.app.send("out", message.body["order"], once=message)
            shop.app.send("out", message.body["order"], once=message, kind="Other")
        call_next(message, context)

    @shop.app.failure
    def failed(message: qdo.Message, context: Any, error: BaseException) -> None:
        shop.got.append(("failed", message.body))

    with TestKit(shop.app) as kit:
        shop.app.send("a", Placed(1))
        kit.run_until_settled()
    assert sorted(shop.got, key=str) == [("failed", {"order": 1}), *[("rest", 1)] * 3]


# --- registration ---


async def coroutine(message: Any, context: Any) -> None: ...


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"body": Placed}, {"kind": "Placed"}),
        ({"body": Placed}, {"body": Paid, "order": "key"}),
        ({"body": Placed, "policy": qdo.Policy(attempts=2)}, {"body": Paid}),
        ({"body": Placed, "batch": 5}, {"body": Paid, "batch": 5}),
        ({}, {"kind": ""}),
        ({}, {"kind": 5}),
        ({}, {"kind": "\ud800"}),
        ({"pool": True}, {"kind": "Placed"}),
    ],
)
def test_jobs_that_cannot_share_a_glob(
    shop: KindApp, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The refusal leaves the first one as it was."""
    shop.job("first", **first)
    before = shop.app.jobs
    with pytest.raises(UsageError):
        shop.job("second", **second)
    assert shop.app.jobs == before


def test_sync_and_async_jobs_cannot_share_a_glob(shop: KindApp) -> None:
    shop.job("first", body=Placed)
    with pytest.raises(UsageError):
        shop.app.job("customer-*", body=Paid)(coroutine)


def test_a_job_without_a_type_is_its_function(shop: KindApp) -> None:
    """So that it costs nothing, and errors and logs name the functions of others."""
    shop.app.job("a")(coroutine)
    shop.app.job("b", body=Placed)(coroutine)
    shop.app.job("c", body=Placed)(coroutine)
    shop.app.job("c", body=Paid)(coroutine)
    names = [job.name for each in "abc" if (job := shop.app.job_for(each)) is not None]
    assert shop.app.jobs[0].function is coroutine
    assert names == [names[0], names[0], f"{names[0]}, coroutine"]
