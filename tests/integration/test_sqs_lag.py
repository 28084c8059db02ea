"""How far behind queues of SQS are, as their owners say it."""

from __future__ import annotations

import json
from typing import Any

from tests.support.sqs_stage import Stage

OFTEN = "import qdo.worker.worker\nqdo.worker.worker.DESCRIBE_SECONDS = 0.1"


def ages(stage: Stage) -> dict[str, float | None]:
    """Return what `qdo queues` says."""
    items: list[dict[str, Any]] = json.loads(stage.qdo("queues", "-o", "json").out)["items"]
    return {item["queue"]: item["behind_seconds"] for item in items}


def test_a_queue_says_how_old_its_first_undone_message_is(sqs_stage: Stage) -> None:
    """It grows while the job runs, and is gone when all is done."""
    sqs_stage.make("slow.fifo")
    sqs_stage.make("idle.fifo")
    sqs_stage.job('order="key"', OFTEN)
    sqs_stage.send("slow.fifo", {"n": 0, "gate": "open"}, {"n": 1})
    sqs_stage.start()
    sqs_stage.wait(1, "begin")
    sqs_stage.until(lambda: (ages(sqs_stage)["slow.fifo"] or 0) > 1.5, "the age is told")
    assert not ages(sqs_stage)["idle.fifo"]
    first = ages(sqs_stage)["slow.fifo"] or 0
    sqs_stage.until(lambda: (ages(sqs_stage)["slow.fifo"] or 0) > first, "the age grows")
    sqs_stage.open("open")
    sqs_stage.wait_empty()
    sqs_stage.until(lambda: not ages(sqs_stage)["slow.fifo"], "nothing is behind")
