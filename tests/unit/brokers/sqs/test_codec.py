"""How a message of qdo stands in SQS, both ways."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.base import Outgoing
from qdo.brokers.kinesis.codec import decoded
from qdo.brokers.sqs.codec import Received, decode_received, entry, is_storable, pointing, size_of
from qdo.encoding import CONTENT_TYPE, RAW, encoded, is_raw, parsed
from qdo.errors import UsageError
from qdo.positions import position_of_time
from tests.support.aws.messages import received_message

ID = uuid.UUID("5fea7756-0ea4-451a-a703-a558b933e274")


def as_received(made: dict[str, Any], **system: str) -> Received:
    """Return an entry as SQS would give it to a consumer."""
    if "MessageGroupId" in made:
        system |= {"MessageGroupId": made["MessageGroupId"], "SequenceNumber": "7"}
    attributes = made.get("MessageAttributes")
    return decode_received(received_message(made["MessageBody"], attributes, **system))


def text(value: str, kind: str = "String") -> dict[str, str]:
    return {"DataType": kind, "StringValue": value}


def test_plain_json_stands_as_it_is() -> None:
    """No attributes: any other producer or consumer understands it."""
    made = entry(Outgoing("q", b'{"a":"\xc3\xb6"}'), fifo=False)
    assert made == {"MessageBody": '{"a":"ö"}'}
    assert as_received(made) == Received(
        sent=position_of_time(1700000000) + 1_230_000,
        sequence=0,
        message_id=ID.int,
        body=b'{"a":"\xc3\xb6"}',
        key=None,
        headers=None,
        receipt="handle",
        group=None,
        receive_count=1,
    )


def test_fifo_group_is_the_key() -> None:
    """Without a key all messages of the queue share one group, so that their order holds."""
    made = entry(Outgoing("q", b"1", key="tenant 1"), fifo=True)
    assert made["MessageGroupId"].startswith("sha256-")  # SQS takes no spaces
    assert as_received(made).key == "tenant 1"
    made = entry(Outgoing("q", b"1", key="t1"), fifo=True)
    assert (made["MessageGroupId"], "MessageAttributes" in made) == ("t1", False)
    found = as_received(made)
    assert (found.key, found.group, found.sequence) == ("t1", "t1", 7)
    made = entry(Outgoing("q", b"1"), fifo=True)
    assert (made["MessageGroupId"], as_received(made).key) == ("-", None)


def test_fifo_messages_without_dedup_key_are_never_duplicates() -> None:
    """Each has a deduplication id of its own, also where bodies are the same."""
    message = Outgoing("q", b"1")
    ids = {entry(message, fifo=True)["MessageDeduplicationId"] for _ in range(3)}
    assert len(ids) == 3
    assert entry(message, True, "order-1")["MessageDeduplicationId"] == "order-1"
    long = entry(message, True, "x" * 1000)["MessageDeduplicationId"]
    assert long == entry(message, True, "x" * 1000)["MessageDeduplicationId"] != "x" * 1000
    assert len(long) <= 128


@given(
    key=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    headers=st.none()
    | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.characters(exclude_categories=["Cs"])),
    ),
    body=st.binary() | st.text(st.characters(exclude_categories=["Cs"])),
    fifo=st.booleans(),
)
def test_every_message_comes_back_as_it_was_sent(
    key: str | None, headers: dict[str, str] | None, body: bytes | str, fifo: bool
) -> None:
    """Bytes, text, keys and headers of any characters; those that SQS rejects are never sent."""
    headers = None if headers is None else {f"x{name}": each for name, each in headers.items()}
    data, head = encoded("q", body, headers)
    made = entry(Outgoing("q", data, key, head), fifo)
    assert is_storable(made["MessageBody"])
    for attribute in made.get("MessageAttributes", {}).values():
        assert is_storable(attribute["StringValue"])
    found = as_received(made)
    assert (found.body, found.key) == (data, key)
    assert json.loads(found.headers or "{}") == json.loads(head or "{}")


@pytest.mark.parametrize("word", ["key", "headers"])
def test_stray_surrogates_are_refused(word: str) -> None:
    """They have no UTF-8."""
    message = Outgoing("q", b"1", **{word: '{"a":"\ud800"}'})
    with pytest.raises(UsageError, match=f"the {word} of a message for queue 'q'"):
        entry(message, fifo=False)


def test_attributes_of_other_producers_are_headers() -> None:
    """Texts and numbers; bytes are left out, and headers written by qdo take precedence."""
    made = {
        "MessageBody": "{}",
        "MessageAttributes": {
            "colour": text("red"),
            "size": text("3", "Number"),
            "label": text("x", "String.custom"),
            "image": {"DataType": "Binary", "BinaryValue": b"\0"},
            "qdo-unknown": text("later"),
        },
    }
    assert json.loads(as_received(made).headers or "") == {
        "colour": "red",
        "size": "3",
        "label": "x",
    }
    made["MessageAttributes"]["qdo-headers"] = text('{"colour":"blue"}')
    assert json.loads(as_received(made).headers or "")["colour"] == "blue"
    made["MessageAttributes"]["qdo-headers"] = text("{broken")
    assert as_received(made).headers == "{broken"


def test_other_producers_say_what_their_bodies_are() -> None:
    """In any spelling of the header's case: the job gets bytes if the body is not JSON."""
    made = {"MessageBody": "hello", "MessageAttributes": {"Content-Type": text("text/plain")}}
    found = as_received(made)
    assert found.body == b"hello"
    assert is_raw(parsed(found.headers) or {})


NEARLY_JSON = ["-", "01", "1.", "-01", "1.e5", '"a\tb"', '{"n":-}', "[01]"]
"""ujson decodes them."""


@pytest.mark.parametrize(
    "body", ["hello", "{broken", "tomorrow", "<xml/>", "12 monkeys", *NEARLY_JSON]
)
def test_text_of_other_producers_is_bytes(body: str) -> None:
    """As a record of Kinesis; unless they claim that it is JSON."""
    found = as_received({"MessageBody": body})
    assert found.body == body.encode()
    assert parsed(found.headers) == {CONTENT_TYPE: RAW}
    assert decoded(body.encode()) == (found.body, found.headers)
    made: dict[str, Any] = {"MessageBody": body, "MessageAttributes": {"colour": text("red")}}
    assert parsed(as_received(made).headers) == {"colour": "red", CONTENT_TYPE: RAW}
    made["MessageAttributes"] = {"content-type": text("application/json")}
    assert not is_raw(parsed(as_received(made).headers) or {})


def test_groups_of_standard_queues_are_keys() -> None:
    """Fair queues have them."""
    assert as_received({"MessageBody": "1"}, MessageGroupId="tenant").key == "tenant"


def test_what_cannot_be_decoded_is_passed_on() -> None:
    """It shows the fault of its producer, and its job gets the decoding error."""
    made: dict[str, Any] = {
        "MessageBody": "no base64!",
        "MessageAttributes": {"qdo-encoding": text("base64"), "qdo-key": text("1", "String.json")},
    }
    assert (as_received(made).body, as_received(made).key) == (b"no base64!", "1")
    made["MessageAttributes"] = {"ExtendedPayloadSize": text("1", "Number")}
    assert (as_received(made).pointer, as_received(made).body) == (None, b"no base64!")


CURRENT = "software.amazon.payloadoffloading.PayloadS3Pointer"
LEGACY = "com.amazon.sqs.javamessaging.MessageS3Pointer"
PLACE = '{"s3BucketName":"bucket","s3Key":"some/key"}'
WRITTEN_BY_CLIENTS = [
    # Java 2.x, and 1.1 and 1.2: useLegacyReservedAttributeName is true by default.
    (f'["{CURRENT}",{PLACE}]', "SQSLargePayloadSize"),
    # Java 2.x with withLegacyReservedAttributeNameDisabled(), and JavaScript.
    (f'["{CURRENT}",{PLACE}]', "ExtendedPayloadSize"),
    # Python, whose json.dumps adds spaces.
    (
        f'["{CURRENT}", {{"s3BucketName": "bucket", "s3Key": "some/key"}}]',
        "ExtendedPayloadSize",
    ),
    # Python with use_legacy_attribute, and Java 1.0.
    (f'["{LEGACY}", {PLACE}]', "SQSLargePayloadSize"),
    # Python's client for SNS before its version 1.0: the old class with the new attribute.
    (f'["{LEGACY}", {PLACE}]', "ExtendedPayloadSize"),
]
"""Body and marker of messages of AWS's extended clients, from their documentation and sources."""


@pytest.mark.parametrize(("body", "marker"), WRITTEN_BY_CLIENTS)
def test_pointers_of_all_extended_clients_are_read(body: str, marker: str) -> None:
    """The marker is not a header of the message, and tells how much memory the body needs."""
    attributes = {marker: text("300000", "Number"), "colour": text("red")}
    found = as_received({"MessageBody": body, "MessageAttributes": attributes})
    assert (found.pointer, found.size) == (BodyPointer("bucket", "some/key"), 300000)
    assert json.loads(found.headers or "") == {"colour": "red"}


def test_a_pointer_is_what_the_extended_clients_of_aws_write() -> None:
    """Bytes stand in S3 as they are; key and headers stay with the message.

    Both markers are set: a Java client 1.x, and a Python client with `use_legacy_attribute`, look
    for the legacy one only.
    """
    made = entry(Outgoing("q", b"\xff" * 9, "k", *encoded("q", b"", {"a": "b"})[1:]), fifo=False)
    made = pointing(made, BodyPointer("bucket", "some/key"), 9)
    assert json.loads(made["MessageBody"]) == [
        CURRENT,
        {"s3BucketName": "bucket", "s3Key": "some/key"},
    ]
    markers = {name: made["MessageAttributes"][name] for _, name in WRITTEN_BY_CLIENTS}
    assert markers == dict.fromkeys(
        ("SQSLargePayloadSize", "ExtendedPayloadSize"), text("9", "Number")
    )
    found = as_received(made)
    assert (found.pointer, found.key) == (BodyPointer("bucket", "some/key"), "k")
    assert json.loads(found.headers or "") == {"a": "b", CONTENT_TYPE: RAW}


def test_size_counts_attributes() -> None:
    """Names, types and values, in bytes of UTF-8, as AWS counts them."""
    made = entry(Outgoing("q", '"ö"'.encode(), "kö"), fifo=False)
    assert size_of(made) == 4 + len("qdo-key") + len("String") + 3
