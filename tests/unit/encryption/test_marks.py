"""Marks of ids: what they prove, and that senders cannot make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.encoding import ID, MARK, parsed
from qdo.encryption.marks import IdMarks
from qdo.settings.settings import Settings
from qdo.settings.vaults import marks_of
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from tests.support.fakes.key_files import key, write_keys

HEADERS = f'{{"{ID}":"7","trace":"x"}}'
SQS = "sqs://eu-west-1/a-"


def marks(folder: Path, name: str = "s1", broker: str = SQS) -> IdMarks:
    keys = write_keys(folder / name, key(name, "sign"))
    found = marks_of(Settings(keys=keys, broker=broker), "a", str)
    assert found is not None
    return found


def id_of(headers: str | None) -> str | None:
    return (parsed(headers) or {}).get(ID)


def test_a_marked_id_is_proven(tmp_path: Path) -> None:
    """Other headers stay, and headers without an id are left alone."""
    made = marks(tmp_path)
    headers = made.marked("q", HEADERS, b"1")
    assert made.proven("q", headers, b"1") == headers
    assert (parsed(headers) or {})["trace"] == "x"
    for other in (None, '{"trace":"x"}', "not json"):
        assert made.marked("q", other, b"1") == other
        assert made.proven("q", other, b"1") == other


@pytest.mark.parametrize(
    "headers",
    [
        HEADERS,
        f'{{"{ID}":"7","{MARK}":"s1.00"}}',
        f'{{"{ID}":"7","{MARK}":"s9.00"}}',
        f'{{"{ID}":"7","{MARK}":7}}',
        f'{{"{ID}":7,"{MARK}":"s1.\u00fc"}}',
        f'{{"{ID}":"7","{MARK}":"s1.\u00fc"}}',
    ],
)
def test_a_forged_id_is_dropped(tmp_path: Path, headers: str) -> None:
    """The message then has the id of its broker."""
    found = parsed(marks(tmp_path).proven("q", headers, b"1"))
    assert found is not None
    assert not found.keys() & {ID, MARK}


def test_a_mark_proves_one_message_only(tmp_path: Path) -> None:
    """In one queue, with one body, under one key."""
    made = marks(tmp_path)
    headers = made.marked("q", HEADERS, b"1")
    assert id_of(made.proven("p", headers, b"1")) is None
    assert id_of(made.proven("q", headers, b"2")) is None
    assert id_of(marks(tmp_path, "s2").proven("q", headers, b"1")) is None
    moved = (headers or "").replace('"7"', '"8"')
    assert id_of(made.proven("q", moved, b"1")) is None


def test_marks_need_a_key_and_foreign_senders(tmp_path: Path) -> None:
    """A file that only qdo writes to needs no proof."""
    keys = write_keys(tmp_path / "k", key("k1"))
    assert marks_of(Settings(keys=keys, broker=SQS), "a", str) is None
    assert marks_of(Settings(broker=SQS), "a", str) is None
    keys = write_keys(tmp_path / "s", key("s1", "sign"))
    assert marks_of(Settings(keys=keys), "a", str) is None
    for broker in ("kinesis://eu-west-1/s", "postgresql://localhost/d"):
        assert marks_of(Settings(keys=keys, broker=broker), "a", str) is not None


def test_a_retry_marks_only_ids_that_are_proven(tmp_path: Path) -> None:
    """The operator's retry must not prove what a sender has forged."""
    store = MemoryBroker(MemoryStore(), "a").dead_letters
    made = marks(tmp_path)

    def again(headers: str | None) -> str | None:
        letter = DeadLetterRecord("q", 1, b"1", None, headers, "e", "", 1, "w", 1)
        return id_of(made.proven("q", store.headers_again(letter, "own"), b"1"))

    assert id_of(store.headers_again(DeadLetterRecord(
        "q", 1, b"1", None, HEADERS, "e", "", 1, "w", 1), "own")) == "7"  # fmt: skip
    store.marks = lambda: made
    assert again(made.marked("q", HEADERS, b"1")) == "7"
    assert again(HEADERS) == "own"
    assert again(None) == "own"
