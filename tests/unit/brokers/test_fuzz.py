"""Readers of bytes that somebody else wrote: every input, and nothing but documented errors.

2,000 inputs each; ``pytest --fuzz 100000 tests/unit/brokers/test_fuzz.py`` tries more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import ujson
from hypothesis import strategies as st

from qdo.brokers.aws.http import answer_of
from qdo.brokers.dead_letters import DeadLetterRecord, retried_headers
from qdo.brokers.kinesis.api import parse_records
from qdo.brokers.kinesis.codec import encoded as kinesis_data
from qdo.brokers.kinesis.dead_letters import read, written
from qdo.brokers.sqs.codec import decode_received
from qdo.brokers.sqs.dead_letter_codec import letter_entry, letter_of
from qdo.cli.commands.send import LineFormat, LineProblem
from qdo.encoding import is_raw
from qdo.errors import UsageError
from qdo.message import Message
from tests.support.aws.messages import received_message
from tests.unit.brokers.kinesis.test_deaggregation import answer, field, varint

Fuzz = Callable[[st.SearchStrategy[Any], Callable[[Any], None]], None]

pytestmark = pytest.mark.slow


# --- inputs -----------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 1e300, -0.0]
)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TEXTS = st.text() | st.text(st.characters(codec=None, categories=["Cs", "Cc", "L"]), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DEEP = st.sampled_from(["[" * 3000, '{"a":' * 3000, "[" * 1100 + "]" * 1100, "9" * 5000, "1e400"])
JSON = VALUES.map(lambda value: json.dumps(value, ensure_ascii=True))
SOURCES = TEXTS | JSON | DEEP | st.sampled_from(["", "-", "01", "NaN", "null", "empty", "base64"])


def cut(text: str, at: int) -> str:
    return text[: at % (len(text) + 1)]


ROUGH = SOURCES | st.builds(cut, JSON, st.integers(0, 99))
BYTES = st.binary() | ROUGH.map(lambda text: text.encode("utf-8", "surrogatepass"))

INDEXES = st.integers(0, 3) | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
PACKED_MESSAGE = st.builds(
    lambda key, hash_index, data: field(
        3,
        b"\x08"
        + varint(key)
        + (b"" if hash_index is None else b"\x10" + varint(hash_index))
        + field(3, data),
    ),
    INDEXES,
    st.none() | INDEXES,
    BYTES,
)
PACKED = st.lists(
    PACKED_MESSAGE
    | st.builds(field, st.sampled_from([1, 2]), st.binary(max_size=3) | st.just(b"k" * 300))
    | st.builds(field, st.sampled_from([1, 2]), st.sampled_from([b"k", b"9" * 39, b"9" * 50]))
    | st.binary(max_size=9),
    max_size=5,
).map(b"".join)
SEALED = PACKED.map(lambda data: b"\xf3\x89\x9a\xc2" + data + hashlib.md5(data).digest())
ENVELOPES = st.builds(
    lambda headers, part, body, end: b'{"qdo-headers":' + headers + part + body + end,
    BYTES,
    st.sampled_from([b',"body":', b',"base64":"', b",", b""]),
    BYTES,
    st.sampled_from([b"}", b'"}', b""]),
)
RECORDS = BYTES | SEALED | ENVELOPES

KNOWN = ("ExtendedPayloadSize", "SQSLargePayloadSize", "Content-Type", "content-type", "other")
OWN = ("qdo-encoding", "qdo-headers", "qdo-key", "qdo-dead-letter", "qdo-traceback")
NAMES = st.sampled_from(OWN + KNOWN)
OBJECTS = st.dictionaries(
    st.sampled_from(["content-type", "qdo-id", "qdo-sent", "a"]) | TEXTS, VALUES, max_size=3
)
ATTRIBUTES = st.dictionaries(
    NAMES | TEXTS,
    st.fixed_dictionaries(
        {},
        optional={
            "DataType": st.sampled_from(["String", "Number", "String.json", "Binary"]),
            "StringValue": ROUGH | OBJECTS.map(json.dumps),
            "BinaryValue": st.binary(max_size=5),
        },
    ),
    max_size=4,
)
POINTERS = st.builds(
    lambda name, place: json.dumps([name, place]),
    st.sampled_from(["software.amazon.payloadoffloading.PayloadS3Pointer", "x"]),
    st.dictionaries(st.sampled_from(["s3BucketName", "s3Key"]), VALUES),
)
FIELDS = st.sampled_from(
    ["queue", "position", "error", "attempts", "worker", "fence", "dead_at", "body", "key"]
)

# --- what a worker and a store do with a row ----------------------------------------------


def use(body: bytes, key: str | None, headers: str | None) -> None:
    """Do with a message what a worker does: decode it, or store it as a dead letter and retry."""
    assert isinstance(body, bytes)
    try:
        found = {} if headers is None else ujson.loads(headers)
        content = body if found and is_raw(found) else ujson.loads(body)
    except Exception:  # noqa: BLE001 - the engine's only place for it
        assert headers is None or isinstance(headers, str)
    else:
        message = Message("q", 1, content, key, found)
        assert all(isinstance(value, str) for value in found.values())
        assert isinstance(message.id, str)
        assert isinstance(message.time, float)
        assert message.due is None or isinstance(message.due, float)
    letter = DeadLetterRecord("q", 1, body, key, headers, "e", "", 1, "w", 1, 1.0)
    assert read(written(letter)) == letter
    retried = retried_headers(headers, "id")
    made = letter_entry(letter, fifo=False)
    json.dumps(made, ensure_ascii=False).encode()
    again = letter_of(received_message(made["MessageBody"], made["MessageAttributes"]))
    assert again is not None
    assert again.pointer is not None or again.record.body == body
    with contextlib.suppress(UsageError):  # surrogates, which no row of Kinesis has
        kinesis_data(body, retried, "q")


# --- readers ------------------------------------------------------------------------------


def test_records_of_kinesis_are_messages(fuzz: Fuzz) -> None:
    """Each costs itself only, whatever is in it."""

    def check(data: bytes) -> None:
        found = parse_records(answer([b"1", data, b"2"]), (0, 2**127))
        assert (found.rows[0][1], found.rows[-1][1]) == (b"1", b"2")
        assert found.first == 1
        for _, body, key, headers in found.rows:
            use(body, key, headers)
            if headers is not None:
                headers.encode()

    fuzz(RECORDS, check)


def test_messages_of_sqs_are_messages(fuzz: Fuzz) -> None:
    """Also with the attributes of qdo, of the extended clients and of anybody else."""

    def check(given: tuple[str, dict[str, Any]]) -> None:
        found = decode_received(received_message(*given))
        assert found.receipt == "handle"
        use(found.body, found.key, found.headers)

    fuzz(st.tuples(ROUGH | POINTERS, ATTRIBUTES), check)


def test_dead_letters_of_sqs_are_read_or_left(fuzz: Fuzz) -> None:
    """Anybody who may send to their queue may forge one."""
    letter = DeadLetterRecord("q", 1, b"1", "k", None, "e", "t", 1, "w", 1, 1.0)
    made = letter_entry(letter, fifo=False)
    fields = json.loads(made["MessageAttributes"]["qdo-dead-letter"]["StringValue"])

    def check(given: tuple[dict[str, Any], dict[str, Any], str]) -> None:
        changed, attributes, body = given
        forged = {"DataType": "String.json", "StringValue": json.dumps({**fields, **changed})}
        found = letter_of(received_message(body, {"qdo-dead-letter": forged, **attributes}))
        if found is not None:
            entry = found.entry()
            json.dumps([entry.queue, entry.error, entry.worker], ensure_ascii=False).encode()
            assert isinstance(found.own_id, str)
            assert 0 <= entry.dead_at < 1e12
            retried_headers(entry.headers, found.own_id)

    fuzz(st.tuples(st.dictionaries(FIELDS, VALUES, max_size=2), ATTRIBUTES, ROUGH), check)


def test_dead_letters_of_kinesis_are_read_or_refused(fuzz: Fuzz) -> None:
    """With the documented errors: anything may lie in a bucket."""
    letter = DeadLetterRecord("q", 1, b"1", "k", None, "e", "t", 1, "w", 1, 1.0)
    fields = json.loads(written(letter))

    def check(text: bytes) -> None:
        try:
            found = read(text)
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        assert isinstance(found.entry().queue, str)

    changed = st.dictionaries(FIELDS, VALUES, max_size=2)
    fuzz(BYTES | changed.map(lambda each: json.dumps({**fields, **each}).encode()), check)


def test_lines_of_a_file_are_messages_or_problems(fuzz: Fuzz) -> None:
    """`qdo send --file` names the line of each problem."""
    form = LineFormat(None, "queue", "key", 1000)

    def check(line: bytes) -> None:
        try:
            made = form.outgoing(line)
        except LineProblem:
            return
        assert made.body == line

    lines = st.fixed_dictionaries({"queue": VALUES}, optional={"key": VALUES})
    fuzz(BYTES | lines.map(lambda each: json.dumps(each).encode()), check)


def test_answers_are_objects_or_not_of_aws(fuzz: Fuzz) -> None:
    """A proxy or a login page may answer anything."""

    def check(content: bytes) -> None:
        found = answer_of(content, known=True)
        assert found is None or isinstance(found, dict)

    fuzz(BYTES, check)
