"""Typed bodies in each executor of a real worker, encrypted, small and large."""

from __future__ import annotations

from pathlib import Path

from tests.support.app_runs import OperatorDesk
from tests.support.fakes.key_files import key, write_keys

APP = """
import dataclasses
from tests.apps.notes import app, job


@dataclasses.dataclass
class Placed:
    order: int
    note: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass
class Paid:
    order: int


async def coroutine(message, context):
    job(message, context)


for body in (Placed, Paid):
    for executor in ("greenlet", "thread", "process"):
        app.job(executor, body=body, executor=executor)(job)
    app.job("async", body=body)(coroutine)
"""
QUEUES = ("greenlet", "thread", "process", "async")


def test_each_executor_converts_bodies(local: OperatorDesk, tmp_path: Path) -> None:
    """In the queue's order; a misfit ends at its first attempt, also in a process of its own."""
    keys = write_keys(tmp_path / "keys", key("k1"))
    local.app.use(local.app.settings.merged({"keys": keys, "encrypt": ("bodies",)}, "the test"))
    for queue in QUEUES:
        local.app.send(queue, {"order": 1, "note": "x" * 1_100_000}, kind="Placed")
        for order, kind in ((2, "Paid"), ("x", "Paid"), (3, "New"), (4, "Paid")):
            local.app.send(queue, {"order": order}, kind=kind)
    worker = local.start(APP, "--burst", QDO_KEYS=keys, QDO_ENCRYPT="bodies")
    assert worker.wait(60.0) == 0, worker.output
    for queue in QUEUES:
        assert local.runs(queue) == [
            ("Placed(order=1)", 1),
            ("Paid(order=2)", 1),
            ("Paid(order=4)", 1),
        ]
    letters = local.broker.dead_letters.records()
    assert {(each.queue, each.error.partition(":")[0], each.attempts) for each in letters} == {
        (queue, error, 1) for queue in QUEUES for error in ("BodyTypeError", "UnknownKindError")
    }
