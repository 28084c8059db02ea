"""How messages are written into Kinesis records, and read from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.brokers.kinesis.codec import (
    MAX_BODY_BYTES,
    RECORD_BYTES,
    check_size,
    decoded,
    encoded,
    key_of,
    partition_key,
)
from qdo.encoding import is_raw, parsed
from qdo.errors import MessageTooLargeError, UsageError


@pytest.mark.parametrize("body", [b'{"n": 1}', b" [1,\n2] ", b"2", b'"text"', b"null", b"-1.5"])
def test_json_without_headers_is_stored_as_it_is(body: bytes) -> None:
    """Every consumer of the stream can read it."""
    assert encoded(body, None, "q") == body
    assert decoded(body) == (body, None)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"n": 1}', '{"trace": "x"}'),
        (b' {"n":  1} ', '{"a":"}\\",\\"body\\":"}'),
        ("\u2713 {".encode(), '{"a": "\u2713"}'),
        (b"\x00\xff\xfe", '{"content-type": "image/png"}'),
        (b"", '{"content-type": "application/octet-stream"}'),
        (b"", '{"a": "b"}'),
        (b"1", "{broken"),
        (b"1", "[1]"),
        (b'{"body":1}', '"}'),
    ],
)
def test_headers_and_body_come_back_to_the_letter(body: bytes, headers: str) -> None:
    """The envelope keeps the text of both."""
    assert decoded(encoded(body, headers, "q")) == (body, headers)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1), st.binary(max_size=9))
def test_any_bytes_come_back_beside_any_headers(headers: dict[str, str], body: bytes) -> None:
    """Raw bodies are kept in base64, JSON bodies as they are."""
    import ujson

    for kind in ("application/octet-stream", "application/json"):
        text = ujson.dumps({**headers, "content-type": kind}, reject_bytes=True)
        sent = body if kind != "application/json" else ujson.dumps(list(body)).encode()
        assert decoded(encoded(sent, text, "q")) == (sent, text)


def test_the_envelope_is_json_for_others() -> None:
    """Consumers that do not know qdo find headers and body by name."""
    import json

    assert json.loads(encoded(b'{"n":1}', '{"a":"b"}', "q")) == {
        "qdo-headers": {"a": "b"},
        "body": {"n": 1},
    }
    assert json.loads(encoded(b"\x01", '{"content-type":"x/y"}', "q"))["base64"] == "AQ=="


def test_a_body_that_looks_like_an_envelope_comes_back() -> None:
    """It is put into one, so that it is not opened."""
    body = encoded(b"1", '{"a":"b"}', "q")
    stored = encoded(body, None, "q")
    assert stored != body
    assert decoded(stored) == (body, None)


@pytest.mark.parametrize(
    "data",
    [
        b'{"qdo-headers":{"a":"b"}}',
        b'{"qdo-headers":{"a":"b"},"other":1}',
        b'{"qdo-headers":7,"body":1}',
    ],
)
def test_what_only_begins_like_an_envelope_is_a_body(data: bytes) -> None:
    """A foreign producer wrote it."""
    assert decoded(data) == (data, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x01",
        b"a,b,c\n",
        b"{not json",
        b'{"qdo-headers":{"a":"b"},"base64":"?"',
        b"\xff\xfe{}",
        b"12x",
        b'{"qdo-headers":\xff',
    ],
)
def test_foreign_records_that_are_no_json_are_bytes(data: bytes) -> None:
    """The job gets them as they are, and does not fail for their sake."""
    body, headers = decoded(data)
    assert body == data
    assert is_raw(parsed(headers) or {})


def test_keys_are_partition_keys_and_no_key_is_none() -> None:
    """Messages without a key are spread over the shards, each by a random one."""
    assert partition_key("tenant 7", "q") == "tenant 7"
    assert key_of("tenant 7") == "tenant 7"
    one, two = partition_key(None, "q"), partition_key(None, "q")
    assert one != two
    assert (key_of(one), key_of(two)) == (None, None)
    assert key_of(None) is None


@pytest.mark.parametrize("key", ["", "x" * 257, "\ud800", "qdo-no-key-1"])
def test_keys_that_kinesis_cannot_take_are_refused(key: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError, match="queue 'q'"):
        partition_key(key, "q")


def test_headers_that_no_text_can_hold_are_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError, match="queue 'q'"):
        encoded(b"1", "\udfff", "q")


def test_the_largest_body_fits_beside_any_key() -> None:
    """A larger body is rejected with its size and the limit."""
    key = "\U0001f600" * 256
    assert check_size("q", bytes(MAX_BODY_BYTES), key, RECORD_BYTES) == RECORD_BYTES
    with pytest.raises(MessageTooLargeError, match=f"{RECORD_BYTES + 1}"):
        check_size("q", bytes(MAX_BODY_BYTES + 1), key, RECORD_BYTES)
