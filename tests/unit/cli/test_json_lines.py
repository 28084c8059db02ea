"""JSON lines to messages: reading in pieces, checking, batches."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.brokers.base import Outgoing
from qdo.cli.commands import send as lines
from qdo.cli.commands.send import LineFormat, LineProblem, LineSender, chunks_of_lines
from qdo.errors import DatabaseFullError, InputLineError

FORM = LineFormat(queue=None, queue_field="q", key_field=None, max_bytes=100)


class Pieces(io.RawIOBase):
    """A stream that returns its data in pieces, like a pipe."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        buffer[: len(piece)] = piece
        return len(piece)


class LimitedBroker:
    """A broker as far as sending goes; `room` messages fit."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.batches: list[list[Outgoing]] = []
        self._room = room

    def send_many(self, messages: list[Outgoing]) -> list[str]:
        if sum(map(len, self.batches)) + len(messages) > self._room:
            raise DatabaseFullError(path="x.db", reason="no room")
        self.batches.append(list(messages))
        return []


def send(store: LimitedBroker, pieces: list[bytes]) -> LineSender:
    sending = LineSender(store, FORM, "x.jsonl")  # type: ignore[arg-type]
    sending.run(chunks_of_lines(io.BufferedReader(Pieces(pieces))), lambda size: None)
    return sending


@given(st.lists(st.binary(max_size=6).map(lambda data: data.replace(b"\r", b"\n")), max_size=8))
def test_lines_are_whole_however_they_arrive(pieces: list[bytes]) -> None:
    """Lines do not depend on where reads happen to end."""
    chunks = chunks_of_lines(io.BufferedReader(Pieces(pieces)))
    assert [line for chunk in chunks for line in chunk] == b"".join(pieces).splitlines(True)


def test_slow_input_is_sent_as_it_arrives() -> None:
    """A batch does not wait for lines that cannot be read yet."""
    store = LimitedBroker()
    send(store, [b'{"q":"a"}\n{"q":"b"}\n{"q":', b'"c"}\n', b'{"q":"d"}'])
    assert [[message.queue for message in batch] for batch in store.batches] == [
        ["a", "b"],
        ["c"],
        ["d"],
    ]


def test_large_input_is_sent_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are bounded in messages and in bytes."""
    monkeypatch.setattr(lines, "BATCH_MESSAGES", 4)
    store = LimitedBroker()
    sending = send(store, [b'{"q":"a"}\n' * 10])
    assert list(map(len, store.batches)) == [4, 4, 2]
    assert (sending.sent, sending.line) == (10, 10)
    monkeypatch.setattr(lines, "BATCH_BYTES", 18)
    store = LimitedBroker()
    send(store, [b'{"q":"a"}\n' * 5])
    assert list(map(len, store.batches)) == [2, 2, 1]


def test_bodies_are_the_unchanged_lines() -> None:
    """Bodies are not re-encoded; spaces around them, a BOM and empty lines are dropped."""
    store = LimitedBroker()
    sending = send(store, [b'\xef\xbb\xbf {"q": "a", "n": 1.50}\r\n\n  \n{"q":7}\n'])
    [batch] = store.batches
    assert [(message.queue, message.body) for message in batch] == [
        ("a", b'{"q": "a", "n": 1.50}'),
        ("7", b'{"q":7}'),
    ]
    assert sending.line == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"nonsense", "not valid JSON: .*Expecting value at column 1"),
        (b'{"q": "a"', "not valid JSON: .*Expecting ',' delimiter at column 10"),
        (b'{"q": "a"} x', "not valid JSON: .*Extra data at column 12"),
        (b'{"q": NaN}', "not valid JSON: .*NaN"),
        (b'{"q": 01}', "not valid JSON: .*Expecting ',' delimiter at column 8"),
        (b'{"q": "a\tb"}', "not valid JSON: .*Invalid control character at at column 9"),
        (b'{"q": "\xff"}', "not valid JSON: .*byte 8"),
        (b"[" * 100_000, "not valid JSON: .*"),
        (b'{"q": "a", "n": [1e400]}', "not valid JSON: .*1e400"),
        (b'{"q": "a", "n": -1.5E999}', "not valid JSON: .*-1.5E999"),
        (b'{"q": "a", "n": "\\ud800"}', "not valid JSON: .*surrogate"),
        (b'{"q": "a", "\\uDC00": 1}', "not valid JSON: .*surrogate"),
        (b'{"q": "a", "n": {"x": 1, "x": 2}}', "not valid JSON: .*'x'"),
        (b'{"q": "a", "n": ' + b"1" * 5000 + b"}", "not valid JSON: .*4300"),
        (b"5", "'q'"),
        (b'{"p": "a"}', "'q'"),
        (b'{"q": null}', "'q'"),
        (b'{"q": true}', "'q'"),
        (b'{"q": "a/b"}', "'a/b'"),
        (
            b'{"q": "' + b"x" * 99 + b'"}',
            "100 bytes with this broker, got 108",
        ),
    ],
)
def test_bad_lines(line: bytes, reason: str) -> None:
    """Everything before an invalid line is sent, nothing after it; the error has the counts."""
    store = LimitedBroker()
    good = b'{"q":"a"}\n'
    with pytest.raises(InputLineError) as caught:
        send(store, [good * 2 + line + b"\n" + good])
    assert list(map(len, store.batches)) == [2]
    details = caught.value.details
    assert (details["where"], details["sent"]) == ("line 3 of x.jsonl", 2)
    assert re.search(reason, details["reason"])


def test_what_was_sent_is_known_when_the_broker_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and lines of whole batches are counted."""
    monkeypatch.setattr(lines, "BATCH_MESSAGES", 4)
    store = LimitedBroker(room=9)
    sending = LineSender(store, FORM, "x")  # type: ignore[arg-type]
    with pytest.raises(DatabaseFullError):
        sending.run([[b'{"q":"a"}\n', b"\n"] * 20], lambda size: None)
    assert (sending.sent, sending.line) == (8, 15)


def test_keys() -> None:
    """A key field is required and must be text or an integer."""
    form = LineFormat(queue="all", queue_field=None, key_field="k", max_bytes=100)
    assert form.outgoing(b'{"k": 5}') == Outgoing("all", b'{"k": 5}', "5")
    with pytest.raises(LineProblem, match="'k'"):
        form.outgoing(b"{}")


def test_one_queue_for_all_needs_no_object() -> None:
    """Without fields any JSON is valid."""
    form = LineFormat(queue="all", queue_field=None, key_field=None, max_bytes=100)
    assert form.outgoing(b'"text"') == Outgoing("all", b'"text"')


def test_the_largest_body_is_taken() -> None:
    form = LineFormat(queue="all", queue_field=None, key_field=None, max_bytes=100)
    assert len(form.outgoing(b'"%s"' % (b"x" * 98)).body) == 100
    with pytest.raises(LineProblem):
        form.outgoing(b'"%s"' % (b"x" * 99))


def test_an_endless_line_is_refused_before_it_is_read() -> None:
    """It would take all memory: 800 MB once took 2.4 GB."""
    stream = io.BufferedReader(Pieces([b"x" * 8000] * 100))
    (part,) = next(iter(chunks_of_lines(stream, 100)))
    assert len(part) < 300_000
    with pytest.raises(LineProblem, match="at most"):
        FORM.outgoing(part)
