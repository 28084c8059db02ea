"""Messages of timers on every broker that apps choose queues of."""

from __future__ import annotations

from pathlib import Path

import pytest

import qdo
from qdo.jobs.timers import Occurrence
from qdo.sending.timers import recognizes, send_occurrences
from tests.support.brokers import ADDRESSES

STORED = {"embedded": 1, "postgresql": 1, "sqs-fifo": 1, "sqs-standard": 3}
"""Messages after three leaders have sent the same occurrence."""


@pytest.mark.parametrize("kind", STORED)
def test_an_occurrence_sent_again(
    kind: str, tmp_path: Path, aws_stream: str, request: pytest.FixtureRequest
) -> None:
    queue = "nightly.fifo" if kind == "sqs-fifo" else "nightly"
    with qdo.App("clock", broker=ADDRESSES[kind](tmp_path, aws_stream, request)) as app:
        app.timer("nightly", every_seconds=86_400, queue=queue)
        due = [(app.timers["nightly"], Occurrence(86_400))]
        ids = {send_occurrences(app, due)[0] for _ in range(3)}
        assert (len(ids) == 1) == (STORED[kind] == 1)
        assert recognizes(app.broker.capabilities) == (not kind.startswith("sqs"))
        send_occurrences(app, due, runs=True)
        assert app.broker.catalog.backlog(queue, 0).count == STORED[kind] + 1
