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


OUTAGES: list[Exception] = []


@dataclasses.dataclass
class Known:
    """Its check asks a database, which may be away."""

    order: int

    def __post_init__(self) -> None:
        if OUTAGES:
            raise OUTAGES.pop()


Job = Callable[[Any, Any], Any]
NOW = datetime(2026, 1, 2, tzinfo=UTC)


class KindShop:
    """An app, and the bodies that each of its jobs got."""

    def __init__(self) -> None:
        self.app = qdo.App("shop", attempts=5)
        self.got: list[tuple[str, Any]] = []

    def job(
        self, name: str, queues: str = "q*", hint: str = "Any", wait: bool = False, **options: Any
    ) -> None:
        """Register a job, whose first parameter has an annotation.

        :param wait: the job is a coroutine.
        """

        def job(message: Any, context: Any) -> None:
            is_batch = isinstance(message, qdo.Batch)
            self.got.append((name, [each.body for each in message] if is_batch else message.body))

        async def coroutine(message: Any, context: Any) -> None:
            await asyncio.sleep(0)
            job(message, context)

        for each in (job, coroutine):
            each.__annotations__["message"] = hint
        self.app.job(queues, **options)(coroutine if wait else job)

    def store(self, queue: str, body: Any, kind: str | None = None) -> None:
        """Send like another program, which does not check."""
        known, self.app.type_of = self.app.type_of, None
        self.app.send(queue, body, kind=kind)
        self.app.type_of = known

    def errors(self, kit: TestKit) -> list[tuple[str, str, int]]:
        """Run all messages; return the outcome and error of each failed attempt."""
        kit.run_until_settled()
        return [
            (each.outcome, each.error.partition(":")[0], each.attempt)
            for each in kit.attempts()
            if each.error is not None
        ]


@pytest.fixture
def shop() -> KindShop:
    return KindShop()


Options = dict[str, Any]
PLACED: Options = {"body": Placed}
PAID: Options = {"body": Paid}
TYPE = ("dead-letter", "BodyTypeError", 1)
KIND = ("dead-letter", "UnknownKindError", 1)
ORDERS = [{"order": each} for each in range(6)]
X = {"order": "x"}
PLAIN = (ORDERS[1], None, ("placed", Placed(1)))
IN_BATCH = (ORDERS[1], None, ("placed", [Placed(1)]))
ROUTES: dict[str, tuple[dict[str, Options], *tuple[tuple[Any, str | None, tuple[Any, ...]], ...]]]
ROUTES = {
    "objects have the kind of their class, or that of its job; other bodies name it": (
        {"placed": {"kind": "Old", **PLACED}, "paid": PAID, "raw": {"kind": "Image"}, "rest": {}},
        (Placed(1), None, ("placed", Placed(1))),
        (Paid(1, NOW), None, ("paid", Paid(1, NOW))),
        (ORDERS[2], "Old", ("placed", Placed(2))),
        ({"order": 3, "at": NOW}, "Paid", ("paid", Paid(3, NOW))),
        (b"\xff", "Image", ("raw", b"\xff")),
        (ORDERS[4], "New", ("rest", ORDERS[4])),
        (ORDERS[5], None, ("rest", ORDERS[5])),
    ),
    "the only job, with an annotation, takes messages without a kind": (
        {"placed": {"hint": "qdo.Message[Placed]"}},
        PLAIN,
        (ORDERS[2], "Placed", ("placed", Placed(2))),
    ),
    "a kind does not choose between globs": (
        {"rest": {}, "placed": {"queues": "q-*", **PLACED}},
        (ORDERS[1], "Paid", KIND),
        PLAIN,
    ),
    "coroutines and misfits": (
        {"placed": {"wait": True, **PLACED}, "paid": {"wait": True, **PAID}},
        (X, "Placed", TYPE),
        (ORDERS[1], "Plcaed", KIND),
        (ORDERS[1], None, KIND),
        (Paid(1, NOW), None, ("paid", Paid(1, NOW))),
    ),
    "a batch with a misfit runs one by one": (
        {"placed": {"hint": "qdo.Batch[Placed]", "batch": 10}},
        IN_BATCH,
        IN_BATCH,
        (X, None, TYPE),
        IN_BATCH,
    ),
}
"""Jobs by name; bodies that are sent, each with a kind, and its end: the job, or an error."""


@pytest.mark.parametrize("case", ROUTES)
def test_a_message_reaches_the_job_of_its_kind(shop: KindShop, case: str) -> None:
    """In the queue's order. A sender refuses what ends at once if another program sends it."""
    jobs, *sent = ROUTES[case]
    for name, options in jobs.items():
        shop.job(name, **options)
    stream = shop.app.stream("q-s", shards=2)
    with TestKit(shop.app) as kit:
        for body, kind, ending in sent:
            if len(ending) == 3:
                for send in (shop.app.send, stream.send):
                    with pytest.raises(UsageError):
                        send("q-1", body, kind=kind)
                shop.store("q-1", body, kind)
            else:
                shop.app.send("q-1", body, kind=kind)
        assert shop.errors(kit) == [each for _, _, each in sent if len(each) == 3]
        assert shop.got == [each for _, _, each in sent if len(each) == 2]


def test_a_request_is_not_for_a_queues_job(shop: KindShop) -> None:
    """The job of its pool may be in another program."""
    shop.job("placed", "*", body=Placed)
    with TestKit(shop.app, without_job="elsewhere"):
        shop.app.request("elsewhere", {"other": 1})


def test_a_webhook_has_the_kind_of_its_declaration(shop: KindShop) -> None:
    """Its sender gets no error for a body that does not fit: an operator sees the dead letter."""
    shop.job("placed", body=Placed)
    shop.job("rest")
    shop.app.webhook("/placed", queue="q", verify="none", kind="Placed")
    with TestKit(shop.app) as kit:
        assert [kit.deliver("/placed", {"order": each}) for each in (1, "x")] == [202, 202]
        assert shop.errors(kit) == [TYPE]
    assert shop.got == [("placed", Placed(1))]


def test_an_outage_within_a_type_is_no_misfit(shop: KindShop) -> None:
    """The message is retried as after an error of the job."""
    shop.job("known", body=Known)
    shop.job("rest")
    with TestKit(shop.app) as kit:
        shop.store("q", Known(1))
        OUTAGES.append(ConnectionError("away"))
        assert shop.errors(kit) == [("retry", "ConnectionError", 1)]
    assert shop.got == [("known", Known(1))]


def test_answers_and_results_have_a_type(shop: KindShop) -> None:
    """An answer that does not fit fails the attempt, and the request asks again."""

    @shop.app.job("ask", pool=True)
    def ask(request: qdo.Request[Placed], context: Any) -> Paid:
        assert request.body == Placed(1)
        return request.pause("when?", type=Paid)

    @shop.app.job("answers")
    def answer(message: qdo.Message[dict[str, Any]], context: Any) -> None:
        if message.body["outcome"] == "paused":
            handle.resume(1 if message.body["take"] == 1 else Paid(1, NOW))

    with TestKit(shop.app) as kit:
        handle = shop.app.request("ask", Placed(1), then="answers", events=True)
        kit.run_until_settled()
        assert handle.result(type=Paid) == Paid(1, NOW)
        assert handle.result() == {"order": 1, "at": "2026-01-02T00:00:00Z"}
        with pytest.raises(RequestFailedError):
            handle.result(type=list[int])


def test_middleware_and_hooks_see_json(shop: KindShop) -> None:
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        (PLACED, {"kind": "Placed"}),
        (PLACED, {**PAID, "order": "key"}),
        (PLACED, {**PAID, "wait": True}),
        ({**PLACED, "policy": qdo.Policy(attempts=2)}, PAID),
        ({**PLACED, "batch": 5}, {**PAID, "batch": 5}),
        ({}, {"kind": ""}),
        ({}, {"kind": 5}),
        ({}, {"kind": "\ud800"}),
        ({"pool": True}, {"kind": "Placed"}),
        ({**PLACED, "hint": "qdo.Message[Nowhere]"}, {"hint": "qdo.Message[Nowhere]"}),
        ({**PAID, "hint": "qdo.Message[Paid]"}, {**PLACED, "hint": "qdo.Message[Paid]"}),
    ],
)
def test_jobs_that_cannot_share_a_glob(shop: KindShop, first: Options, second: Options) -> None:
    """Or have no type. The refusal leaves the first one as it was."""
    shop.job("first", **first)
    before = shop.app.jobs
    with pytest.raises(UsageError):
        shop.job("second", **second)
    assert shop.app.jobs == before


async def coroutine(message: Any, context: Any) -> None: ...


def test_a_job_without_a_type_is_its_function(shop: KindShop) -> None:
    """So that it costs nothing, and errors and logs name the functions of others."""
    shop.app.job("a")(coroutine)
    shop.app.job("b", body=Placed)(coroutine)
    shop.app.job("c", body=Placed)(coroutine)
    shop.app.job("c", body=Paid)(coroutine)
    names = [job.name for each in "abc" if (job := shop.app.job_for(each)) is not None]
    assert shop.app.jobs[0].function is coroutine
    assert names == [names[0], names[0], f"{names[0]}, coroutine"]
