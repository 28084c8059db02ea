"""State by key: as new as the messages that made it, in any kind of session."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from qdo import Message
from qdo.brokers.sqs.codec import SQS_POSITIONS
from qdo.errors import StaleClaimError, UnsupportedError, UsageError
from qdo.message import Origin
from qdo.state import MAX_STATE_BYTES, KeyedState
from tests.unit.test_idempotency import Transaction, core, orm, plain

STATES = KeyedState()


def message(position: int, fence: int = 1, key: str | None = "ada", **more: Any) -> Message:
    return Message("q", position, None, key, fence=fence, **more)


@pytest.fixture(params=[plain, core, orm], ids=lambda each: each.__name__)
def transaction(request: pytest.FixtureRequest, tmp_path: Path) -> Transaction:
    """Begins a transaction on a file with the table."""
    path = tmp_path / "app.db"
    with request.param(path) as session:
        STATES.create(session)
    return lambda: request.param(path)


def count(transaction: Transaction, each: Message, key: str | None = None) -> bool:
    """Count the message in its state; return whether it was new."""
    with transaction() as session, STATES.of(session, each, key) as state:
        state["count"] = state.get("count", 0) + 1
        return state.new


def counted(transaction: Transaction, key: str = "ada", queue: str = "q") -> Any:
    with transaction() as session:
        return STATES.read(session, queue, key).get("count")


def test_messages_change_the_state_of_their_key(transaction: Transaction) -> None:
    """Each key has its own; messages without one share that of the queue."""
    given = [(message(1), None), (message(2), None), (message(3, key="bob"), None)]
    given += [(message(4, key=None), None), (message(6), "")]
    assert all(count(transaction, *each) for each in given)
    assert [counted(transaction, key) for key in ("ada", "bob", "")] == [2, 1, 2]
    assert counted(transaction, queue="p") is None


def test_a_repetition_changes_nothing(transaction: Transaction) -> None:
    """And shuts out a former owner, also one that is ahead."""
    count(transaction, message(5))
    for fence in (1, 2):
        assert not count(transaction, message(5, fence))
        assert not count(transaction, message(4, fence))
    with pytest.raises(StaleClaimError) as refused:
        count(transaction, message(6))
    assert refused.value.details == {"queue": "q", "fence": 1}
    assert counted(transaction) == 1
    assert count(transaction, message(6, fence=2))


def test_priorities_have_positions_of_their_own(transaction: Transaction) -> None:
    """An urgent message overtakes; the overtaken one is new all the same."""
    each = [message(9, headers={"qdo-priority": "0"}), message(3)]
    assert [count(transaction, other) for other in each * 2] == [True, True, False, False]
    assert counted(transaction) == 2


def test_a_failed_block_saves_nothing(transaction: Transaction) -> None:
    """Even if the transaction is committed all the same."""
    failing = contextlib.suppress(LookupError)
    with transaction() as session, failing, STATES.of(session, message(1)) as state:
        state["count"] = 7
        raise LookupError
    assert counted(transaction) is None
    assert count(transaction, message(1))


def test_several_messages_share_a_transaction(transaction: Transaction) -> None:
    """Each sees what those before it have saved."""
    with transaction() as session:
        for position in (1, 2, 3):
            with STATES.of(session, message(position)) as state:
                state["seen"] = [*state.get("seen", []), position]
        assert STATES.read(session, "q", "ada") == {"seen": [1, 2, 3]}


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), math.nan, b"x", "\ud800", {1: 2}, "x" * MAX_STATE_BYTES],
    ids=["set", "object", "nan", "bytes", "surrogate", "number", "large"],
)
def test_values_that_cannot_be_stored(transaction: Transaction, value: Any) -> None:
    """The message fails, and its transaction changes nothing."""
    refused = pytest.raises(UsageError, match=r"'q', key 'ada'")
    with refused, transaction() as session, STATES.of(session, message(1)) as state:
        state["value"] = value
    assert count(transaction, message(1))


@pytest.mark.parametrize("text", ["", "7", "[]", "{", "x" * 10_000])
def test_a_row_that_another_program_damaged(text: str, tmp_path: Path) -> None:
    """It is named, and stays as it is."""
    with plain(tmp_path / "app.db") as db:
        STATES.create(db)
        db.execute("INSERT INTO qdo_state VALUES ('', 'q', 'ada', 1, '{}', ?)", (text,))
        for use in (lambda: STATES.read(db, "q", "ada"), STATES.of(db, message(2)).__enter__):
            with pytest.raises(UsageError, match="'q', key 'ada', must be a JSON object"):
                use()


def test_messages_that_cannot_have_a_state(transaction: Transaction) -> None:
    """The database would cut the key; each receipt from SQS has another position."""
    with pytest.raises(UsageError, match="200"):
        count(transaction, message(1, key="k" * 201))
    with pytest.raises(UnsupportedError):
        count(transaction, message(5 << 256, id=SQS_POSITIONS))
    assert counted(transaction) is None


def test_the_state_of_a_key_outlives_the_shards_of_a_stream(transaction: Transaction) -> None:
    """It is read with the stream's name; a state of the whole queue is that of the shard.

    A queue that is only named like a shard has a state of its own.
    """
    for position, queue in enumerate(("s.-80", "s.-80", "s.40-80", "s.40-80.2"), 1):
        sent = Message(queue, position, None, "ada", fence=position, origin=Origin(stream="s"))
        assert count(transaction, sent)
        assert count(transaction, sent, "")
    with transaction() as session:
        assert STATES.read(session, "s", "ada") == {"count": 4}
        assert STATES.read(session, "s.-80") == {"count": 2}
        assert STATES.read(session, "s.40-80.2") == {"count": 1}
    assert count(transaction, Message("s.20-24", 1, None, "ada", fence=1))
