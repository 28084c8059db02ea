"""What is said of requests to SQS that are refused in part."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from qdo.brokers.aws_address import Place
from qdo.brokers.sqs_holding import Held, Holding
from qdo.brokers.sqs_messages import Received
from qdo.brokers.sqs_requests import Requests


class RefusingCalls:
    """Refuses every entry of a batch: its message is not in flight."""

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        failed = [
            {"Id": each["Id"], "SenderFault": True, "Code": "MessageNotInflight"}
            for each in value["Entries"]
        ]
        return {"Failed": failed}

    def close(self) -> None:
        """Nothing is open."""


def held_one(done: bool) -> list[Held]:
    """Return a message that is held, and maybe done."""
    holding = Holding(0, (), 60.0, lambda: 1000.0)
    holding.take([Received(7, 1, 1, b"1", "g", None, "receipt", "g", 1, None)], 1000.0)
    held = holding.undone()
    if done:
        holding.done(held[0].position)
    return held


@pytest.mark.parametrize(
    ("action", "done", "level"),
    [
        ("extend", False, logging.WARNING),
        ("extend", True, logging.DEBUG),
        ("delete", True, logging.WARNING),
    ],
)
def test_a_done_message_may_be_gone_before_it_is_extended(
    action: str, done: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its delete was under way: no reason to warn. Of anything else that is refused it is said."""
    caplog.set_level(logging.DEBUG)
    calls = RefusingCalls()
    requests = Requests(
        calls,
        calls,
        Place("sqs", "eu-west-1"),
        lambda queue: f"http://127.0.0.1/1/{queue}",
        wait_seconds=0,
        visibility_seconds=60,
    )
    held = held_one(done)
    answer = requests.delete("q", held) if action == "delete" else requests.extend("q", held)
    assert list(answer.refused) == held
    (record,) = [each for each in caplog.records if "is refused" in each.message]
    assert record.levelno == level
