"""State by key. A state is a JSON value that changes together with the progress of its messages.

The state and the progress of a job that counts or sums must agree. But after a crash a message runs
again, and a frozen worker may still write. `KeyedState` keeps the value of a queue or key in the
app's database, with the proof of `qdo.idempotency.FencedWrites`. The transaction that saves the
value also records the fence and the position of its message. Therefore a repeated message changes
nothing, and the database rejects writes of a former owner. Other effects of the job in this
database are part of the same transaction.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from qdo.encoding import strict_json
from qdo.errors import StaleClaimError, UsageError
from qdo.idempotency import MAX_NAME, FenceTable, SqlSession, Write, check_proof, execute
from qdo.message import Message

__all__ = ["KeyedState", "SavedState"]

# Maximum size of a value in bytes. Each message of a key writes the whole value.
MAX_STATE_BYTES = 1024 * 1024


class SavedState(dict[str, Any]):
    """A JSON value. The block of `KeyedState.of` saves the value if it ends without an error.

    :ivar new: whether the message is new. For a repeated message, this is the state after the last
        message, and changes are dropped. The job should then end without effects.
    """

    new = False


class KeyedState(FenceTable):
    """A JSON object for each app, queue and key, saved in transactions of the app.

    :param table: name of the table, of letters, digits and underscores.
    """

    def __init__(self, table: str = "qdo_state") -> None:
        columns = f"""
            scope VARCHAR({MAX_NAME}) NOT NULL,
            name VARCHAR({MAX_NAME}) NOT NULL,
            fence BIGINT NOT NULL,
            positions TEXT NOT NULL,
            value TEXT NOT NULL
        """
        super().__init__(table, columns, "scope, name")
        # Each statement locks the row, so two owners decide one after the other. Even a repeated
        # message raises the fence. The fence rejects a former owner that is ahead of the recorded
        # progress.
        self._enter = f"""
            INSERT INTO {table} (app, scope, name, fence, positions, value)
            VALUES (:app, :scope, :name, :fence, '{{}}', '{{}}')
            ON CONFLICT (app, scope, name) DO UPDATE SET fence = CASE
                WHEN excluded.fence > {table}.fence THEN excluded.fence ELSE {table}.fence END
            RETURNING fence, positions, value
        """  # noqa: S608 - ProofTable checks it
        self._save = f"""
            UPDATE {table} SET positions = :positions, value = :value
            WHERE app = :app AND scope = :scope AND name = :name
        """  # noqa: S608 - ProofTable checks it
        self._read = f"""
            SELECT value FROM {table} WHERE app = :app AND scope = :scope AND name = :name
        """  # noqa: S608 - ProofTable checks it

    @contextlib.contextmanager
    def of(
        self, session: SqlSession, message: Message, key: str | None = None
    ) -> Iterator[SavedState]:
        """Yield the state of the message's queue and key. Save it at the end of the block.

        Enter the block first in the transaction of the job's effects. Then the state and the
        effects are committed together, or neither. The block executes two statements. The row stays
        locked until the end of the transaction.

        :param session: a SQLAlchemy `Session` or `Connection`, a `psycopg.Connection`, or a
            `sqlite3.Connection`, in a transaction.
        :param key: the key of the state; None for the message's key. Pass "" for one state of the
            whole queue. The messages of a key must run in order.
        :raises StaleClaimError: another worker has since claimed the queue and entered a block.
        :raises UsageError: JSON cannot hold the state, the state exceeds 1 MiB, the key has more
            than 200 characters, or the session commits each statement separately.
        :raises UnsupportedError: the database is neither SQLite nor PostgreSQL, or the message gets
            a new position for each delivery, as with SQS.
        """
        own = key is None or key == message.key
        # The state of a key of a stream outlives its shards.
        scope = message.stream if own and message.key and message.stream else message.queue
        row = _row(message.app, scope, message.key if key is None else key)
        write, positions, value = self._decide(session, message, row)
        if write is Write.STALE:
            raise StaleClaimError(queue=message.queue, fence=message.fence)
        state = SavedState(value)
        state.new = bool(write)
        yield state
        if state.new:
            positions[str(message.priority)] = message.position
            saved = {"positions": json.dumps(positions), "value": _encoded(state, row)}
            execute(session, self._save, {**row, **saved})

    def read(
        self, session: SqlSession, queue: str, key: str = "", app: str | None = None
    ) -> dict[str, Any]:
        """Return the saved state of a queue or stream and a key, or an empty dict.

        :param app: the app, as in `message.app`. Required if the table has states of several apps.
        """
        row = _row(self._only_app(session, app), queue, key)
        stored = execute(session, self._read, row).fetchone()
        return {} if stored is None else _decoded(stored[0], row)

    def _decide(
        self, session: SqlSession, message: Message, row: dict[str, str]
    ) -> tuple[Write, dict[str, Any], dict[str, Any]]:
        """Lock the row. Return the decision, the positions and the value."""
        check_proof(session, message)
        self._use(session, message.app)
        entered = execute(session, self._enter, {**row, "fence": message.fence})
        # Read all rows, because otherwise SQLite refuses the commit.
        ((fence, positions, value),) = entered.fetchall()
        written = _decoded(positions, row)
        state = _decoded(value, row)
        if fence > message.fence:
            return Write.STALE, written, state
        is_new = message.position > written.get(str(message.priority), -1)
        return (Write.NEW if is_new else Write.REPEATED), written, state


def _row(app: str, queue: str, key: str | None) -> dict[str, str]:
    if key and len(key) > MAX_NAME:
        raise UsageError(
            reason=f"the key of a state must have at most {MAX_NAME} characters, got "
            f"{key!r:.60}...; pass a digest of it as key="
        )
    return {"app": app, "scope": queue, "name": key or ""}


def _encoded(state: SavedState, row: dict[str, str]) -> str:
    try:
        body = strict_json(dict(state))
    except ValueError as error:
        raise _invalid(row, f"a value that JSON cannot hold: {error}") from error
    if len(body) > MAX_STATE_BYTES:
        raise _invalid(row, f"{len(body)} bytes; keep large values in tables of the app")
    return body.decode()


def _decoded(text: str, row: dict[str, str]) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise _invalid(row, f"{text!r:.60}; another program wrote it: correct the row")


def _invalid(row: dict[str, str], found: str) -> UsageError:
    return UsageError(
        reason=f"the state of {row['scope']!r}, key {row['name']!r}, must be a JSON object of at "
        f"most {MAX_STATE_BYTES} bytes, got {found}"
    )
