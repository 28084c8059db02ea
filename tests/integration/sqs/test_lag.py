"""The lag of SQS queues, as their owners report it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.aws.server_process import serving
from tests.support.sqs_workers import SqsWorkers

OFTEN = "import qdo.worker.worker\nqdo.worker.worker.DESCRIBE_SECONDS = 0.1"


def ages(stage: SqsWorkers) -> dict[str, float | None]:
    """Return the ages in the output of `qdo queues`."""
    items: list[dict[str, Any]] = stage.qdo("queues", "-o", "json").items()
    return {item["queue"]: item["behind_seconds"] for item in items}


@pytest.fixture
def stage(tmp_path: Path, aws_prefix: str) -> Iterator[SqsWorkers]:
    """Queues of a server of the test's own: on the one of all tests the clock may be set."""
    with (
        serving("tests.support.aws.sqs_server") as server,
        contextlib.closing(SqsWorkers(tmp_path, server, aws_prefix)) as made,
    ):
        yield made


def test_a_queue_says_how_old_its_first_undone_message_is(stage: SqsWorkers) -> None:
    """It grows while the job runs, and is gone when all is done."""
    stage.make("slow.fifo")
    stage.make("idle.fifo")
    stage.job('order="key"', OFTEN)
    stage.send("slow.fifo", {"n": 0, "gate": "open"}, {"n": 1})
    stage.start()
    stage.wait(1, "begin")
    stage.until(lambda: (ages(stage)["slow.fifo"] or 0) > 1.5, "the age is told")
    assert not ages(stage)["idle.fifo"]
    first = ages(stage)["slow.fifo"] or 0
    stage.until(lambda: (ages(stage)["slow.fifo"] or 0) > first, "the age grows")
    stage.open("open")
    stage.wait_empty()
    stage.until(lambda: not ages(stage)["slow.fifo"], "nothing is behind")
