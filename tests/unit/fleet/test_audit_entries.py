"""Entries of the action log: what is kept of any text, and which entries are too many."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qdo.fleet.audit_entries import (
    AHEAD_SECONDS,
    KEEP_SECONDS,
    MAX_ENTRIES,
    MAX_KEYS,
    MAX_TEXT,
    AuditEntry,
    entry_name,
    entry_time,
    surplus,
)

NOW = 1_790_000_000.0
NAME = entry_name(NOW, "0123abcd")


def test_an_entry_is_read_as_it_was_written() -> None:
    entry = AuditEntry(
        NAME,
        NOW,
        by="ann@office",
        account="sasl:ann",
        command="seek",
        target="orders",
        before={"last": 7, "position": None},
        after={"last": "x", "fast": True},
        reason="Ünïcode \x1b[31m",
    )
    assert AuditEntry.parse(NAME, entry.encode()) == entry


def test_an_entry_is_small_whatever_its_texts_are() -> None:
    text = "\U0001f600" * 100_000
    values: dict[str, Any] = {f"{text}{number}": text for number in range(100)}
    data = AuditEntry(NAME, NOW, text, text, text, text, values, {"v": text}, text).encode()
    assert len(data) < 12 * MAX_TEXT * (MAX_KEYS + 10)
    entry = AuditEntry.parse(NAME, data)
    assert entry.reason == f"{text[: MAX_TEXT - 3]}..."
    assert entry.fault is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"command": 7}',
        b'{"command": "seek", "from": NaN}',
        b'{"command": "seek", "from": %s}' % (b"9" * 5000),
        b"[" * 2000 + b"]" * 2000,
        b'{"from": ' * 2000 + b"1" + b"}" * 2000,
    ],
)
def test_a_foreign_value_is_reported(data: bytes) -> None:
    entry = AuditEntry.parse(NAME, data)
    assert entry.fault
    assert (entry.id, entry.at, entry.command) == (NAME, NOW, "")


def test_foreign_parts_of_an_entry_are_bounded() -> None:
    deep: Any = "x"
    for _ in range(50):
        deep = [deep]
    value = {"command": "seek", "by": 7, "from": [1], "to": {"a": deep, "b": 2**63, "c": "\ud800"}}
    entry = AuditEntry.parse("zoo", json.dumps(value).encode(), written=5.0)
    assert (entry.at, entry.by, entry.before, entry.fault) == (5.0, "", None, None)
    assert entry.after is not None
    assert entry.after["b"] == 2**63
    assert len(json.dumps(entry.after)) < 2 * MAX_TEXT
    json.dumps(entry.after, ensure_ascii=False).encode()


def test_a_glob_selects_by_command_or_target() -> None:
    entry = AuditEntry(NAME, NOW, command="acl apply", target="orders-7")
    assert all(map(entry.matches, ("*", "acl*", "orders-*", "orders-7")))
    assert not any(map(entry.matches, ("acl", "orders", "")))


def test_a_glob_selects_targets_that_are_globs() -> None:
    """Who asks about a queue is told of `qdo pause`, `qdo dead-letters retry` and others."""
    entry = AuditEntry(NAME, NOW, command="pause", target="orders-* mail")
    assert all(map(entry.matches, ("orders-7", "orders-?", "o*", "orders-* mail")))
    assert not any(map(entry.matches, ("order-7", "mail-7", "7-*")))
    assert AuditEntry(NAME, NOW, command="resume", target="*").matches("orders-7")


def test_names_sort_by_time() -> None:
    names = [entry_name(at, "ffffffff") for at in (1.0, 9.999, 1e9, NOW, 9e9)]
    assert names == sorted(names)
    assert entry_time(NAME) == NOW
    for name in ("zoo", "1790000000000-0123ABCD", f"{NAME}x", "٣" * 13 + "-0123abcd"):
        assert entry_time(name, 5.0) == 5.0


def test_entries_beyond_the_limits_are_surplus() -> None:
    """First what is too many, the oldest first; then what is too old."""
    fresh = [entry_name(NOW - number, f"{number:08x}") for number in range(MAX_ENTRIES)]
    assert surplus(fresh, NOW) == []
    one_more = entry_name(NOW, "ffffffff")
    assert surplus([*fresh, one_more], NOW) == [fresh[-1]]
    old = entry_name(NOW - KEEP_SECONDS - 1, "00000000")
    assert surplus([fresh[0], old, fresh[1]], NOW) == [old]
    assert surplus([fresh[0], fresh[1]], NOW + KEEP_SECONDS - 0.5) == [fresh[1]]


def test_forged_names_go_first_but_are_never_too_old() -> None:
    """Otherwise a client that may create entries could push out the true ones."""
    forged = ["zoo", entry_name(NOW + AHEAD_SECONDS + 10, "00000000")]
    assert surplus([*forged, NAME], NOW) == []
    fresh = [entry_name(NOW - number, f"{number:08x}") for number in range(MAX_ENTRIES)]
    assert set(surplus([*fresh, *forged], NOW)) == set(forged)
