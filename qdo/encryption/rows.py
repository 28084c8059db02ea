"""Opens stored messages: drops ids without proof, and decrypts bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from qdo.encryption.marks import IdMarks

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

Row = tuple[int, bytes, "str | None", "str | None"]
"""Position, body, key and headers of a message, as `brokers.base.Row`."""


class RowOpener:
    """Opens rows.

    :param marks: None: ids need no proof.
    """

    def __init__(self, vault: BodyVault, marks: IdMarks | None) -> None:
        self._vault = vault
        self._marks = marks

    def open(self, queue: str, row: Row) -> Row:
        """Return a row with its body decrypted; see `BodyVault.open`."""
        position, body, key, headers = row
        if self._marks is not None:
            headers = self._marks.proven(queue, headers, body)
        body, headers = self._vault.open(queue, body, headers)
        return position, body, key, headers


class OpenedRows:
    """Decrypts rows one after the other: an iterator for the loop that runs jobs.

    A row that cannot be decrypted comes without body and headers, which no loop can decode, so
    that its position is known where the error is handled.

    :ivar row: the last row as it is stored.
    :ivar fault: why it cannot be decrypted, None if it could be.
    """

    def __init__(self, opener: RowOpener, queue: str, rows: Iterable[Row]) -> None:
        self._opener = opener
        self._queue = queue
        self._rows = iter(rows)
        self.row: Row
        self.fault: Exception | None = None

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        self.row = row = next(self._rows)
        try:
            opened = self._opener.open(self._queue, row)
        except Exception as error:  # noqa: BLE001 - raised where the position is known
            self.fault = error
            return row[0], b"", row[2], None
        self.fault = None
        return opened
