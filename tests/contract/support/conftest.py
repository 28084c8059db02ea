"""Queues of the SQS server that a module's fixture `sqs` is a client of."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def standard(sqs: Any, aws_prefix: str) -> str:
    """A standard queue of the test's own."""
    return str(sqs.create_queue(QueueName=f"{aws_prefix}standard")["QueueUrl"])


@pytest.fixture
def fifo(sqs: Any, aws_prefix: str) -> str:
    """A FIFO queue of the test's own."""
    made = sqs.create_queue(QueueName=f"{aws_prefix}q.fifo", Attributes={"FifoQueue": "true"})
    return str(made["QueueUrl"])
