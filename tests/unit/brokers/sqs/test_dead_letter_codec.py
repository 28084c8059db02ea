"""How a dead letter stands in a queue of SQS, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.sqs.codec import make_position, pointing, size_of
from qdo.brokers.sqs.dead_letter_codec import (
    FoundDeadLetter,
    letter_entry,
    letter_of,
    with_traceback,
)
from qdo.brokers.sqs.url import MAX_SQS_MESSAGE
from qdo.errors import UnsupportedError
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.aws.messages import received_message

POSITION = make_position(10**17, 77, 123456789)
LETTER = dead_letter("a.fifo", POSITION)


def found(made: dict[str, Any], group: str | None = None) -> FoundDeadLetter | None:
    """Read an entry back as SQS would give it."""
    system = {"MessageGroupId": group} if group else {}
    return letter_of(received_message(made["MessageBody"], made.get("MessageAttributes"), **system))


def packed(letter: DeadLetterRecord, fifo: bool = True) -> dict[str, Any]:
    return with_traceback(letter_entry(letter, fifo), letter.traceback)


text = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    error=text,
    traceback=text,
    key=st.none() | text,
    body=st.binary(),
    headers=st.none() | st.dictionaries(text, text).map(json.dumps),
    fifo=st.booleans(),
)
def test_every_letter_comes_back_as_it_was(
    error: str, traceback: str, key: str | None, body: bytes, headers: str | None, fifo: bool
) -> None:
    """Including characters that SQS would reject, and in at most the ten allowed attributes."""
    letter = replace(LETTER, error=error, traceback=traceback, key=key, body=body, headers=headers)
    made = packed(letter, fifo)
    assert len(made["MessageAttributes"]) <= 10
    again = found(made, made.get("MessageGroupId"))
    assert again is not None
    assert again.record == letter
    assert (again.body_bytes, again.receipt, again.pointer) == (len(body), "handle", None)


def test_letters_of_a_fifo_queue_do_not_hide_each_other() -> None:
    """Each has a group of its own; the same one is taken once, also after another receipt."""
    first = packed(LETTER)
    again = packed(replace(LETTER, position=make_position(10**17 + 5, 77, 123456789), error="x"))
    other = packed(replace(LETTER, position=POSITION + 1))
    assert first["MessageGroupId"] == again["MessageGroupId"] != other["MessageGroupId"]
    assert first["MessageDeduplicationId"] == again["MessageDeduplicationId"]
    assert "MessageGroupId" not in packed(replace(LETTER, queue="a"), fifo=False)


def test_the_body_stands_as_it_did() -> None:
    """Other tools can move it back."""
    made = packed(LETTER)
    assert made["MessageBody"] == '{"n":1}'
    said = json.loads(made["MessageAttributes"]["qdo-dead-letter"]["StringValue"])
    assert (said["queue"], said["error"], said["attempts"]) == ("a.fifo", "ValueError: no", 10)


def test_a_long_traceback_loses_its_beginning() -> None:
    """Down to nothing; the letter itself is never cut."""
    lines = "".join(f"line {number}\n" for number in range(20_000))
    kept = found(packed(replace(LETTER, traceback=lines)))
    assert kept is not None
    assert 60_000 < len(kept.record.traceback) <= 64_000
    assert lines.endswith(kept.record.traceback)
    own = size_of(letter_entry(replace(LETTER, body=b"x"), True)) - 1
    for room in (0, 100, 1000):
        body = b"x" * (MAX_SQS_MESSAGE - own - room)
        made = packed(replace(LETTER, body=body, traceback=lines))
        assert size_of(made) <= MAX_SQS_MESSAGE
        again = found(made)
        assert again is not None
        assert lines.endswith(again.record.traceback)
        assert (len(again.record.traceback) > 0) is (room > 0)


def test_a_letter_that_does_not_fit_names_the_remedy() -> None:
    """A body of 1 MiB leaves no room for its error."""
    with pytest.raises(UnsupportedError, match="bucket="):
        packed(replace(LETTER, body=b"x" * MAX_SQS_MESSAGE))


def test_a_very_long_error_is_cut() -> None:
    """Its beginning is the most useful part."""
    again = found(packed(replace(LETTER, error="e" * 100_000, traceback="\ud800")))
    assert again is not None
    assert len(again.record.error) == 8_000
    assert again.record.traceback == "\\ud800"


def test_a_body_in_s3_is_told_with_its_size() -> None:
    """It is read when it is asked for."""
    made = pointing(letter_entry(LETTER, True), BodyPointer("b", "k"), 10**6)
    again = found(with_traceback(made, ""))
    assert again is not None
    assert (again.pointer, again.body_bytes, again.record.body) == (
        BodyPointer("b", "k"),
        10**6,
        b"",
    )
    assert again.entry().body_bytes == 10**6


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"qdo-dead-letter": {"DataType": "String", "StringValue": "no JSON"}},
        {"qdo-dead-letter": {"DataType": "String", "StringValue": "[]"}},
        {"qdo-dead-letter": {"DataType": "String", "StringValue": '{"queue":"a"}'}},
        {"qdo-dead-letter": {"DataType": "Binary", "BinaryValue": b"{}"}},
    ],
)
def test_messages_of_others_are_no_letters(attributes: dict[str, Any]) -> None:
    """SQS itself, too, moves messages into dead-letter queues: they carry no error."""
    assert found({"MessageBody": "1", "MessageAttributes": attributes}) is None
