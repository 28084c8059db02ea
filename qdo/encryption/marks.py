"""Prove message ids with signing keys (HMAC-SHA256), and decrypt stored messages.

A retried dead letter and a message from an outbox have their id in a header. A foreign sender could
copy the id of another message, and a worker would then skip the other message as done. With a
signing key, a worker accepts an id only with a valid mark. The mark covers the message's place (see
`qdo.encryption.bodies`), id and stored body.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from qdo.encoding import ID, MARK, parsed, with_header
from qdo.encryption.key_ring import Key, KeyRing

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

_CONTEXT = b"qdo id\0"
# Position, body, key and headers of a message; the same type as `brokers.base.Row`.
Row = tuple[int, bytes, "str | None", "str | None"]


class IdMarks:
    """Makes and checks marks that are bound to a place. This class is thread-safe."""

    def __init__(self, ring: KeyRing, place: Callable[[str], str]) -> None:
        self._ring = ring
        self._place = place

    def marked(self, queue: str, headers: str | None, body: bytes) -> str | None:
        id = (parsed(headers) or {}).get(ID)
        if not isinstance(id, str):
            return headers
        key = self._ring.in_use("sign")
        return with_header(headers, qdo_mark=f"{key.id}.{self._digest(key, queue, id, body)}")

    def proven(self, queue: str, headers: str | None, body: bytes) -> str | None:
        """Return the headers; remove an id that has no valid mark."""
        if headers is None or ID not in headers:
            return headers
        found = parsed(headers)
        if not found or ID not in found or self._is_valid(queue, found, body):
            return headers
        return with_header(headers, qdo_id=None, qdo_mark=None)

    def _is_valid(self, queue: str, found: Mapping[str, object], body: bytes) -> bool:
        id = found[ID]
        mark = found.get(MARK)
        if not isinstance(id, str) or not isinstance(mark, str):
            return False
        name, _, digest = mark.partition(".")
        key = self._ring.find("sign", name)
        if key is None or not digest.isascii():
            return False
        return hmac.compare_digest(self._digest(key, queue, id, body), digest)

    def _digest(self, key: Key, queue: str, id: str, body: bytes) -> str:
        place = self._place(queue).encode("utf-8", "surrogatepass")
        parts = (place, id.encode("utf-8", "surrogatepass"), body)
        digests = (hashlib.sha256(part).digest() for part in parts)
        return hmac.new(key.secret, _CONTEXT + b"".join(digests), hashlib.sha256).hexdigest()


class RowOpener:
    """Decrypts rows, and removes ids without a valid mark; without `marks`, accepts all ids."""

    def __init__(self, vault: BodyVault, marks: IdMarks | None) -> None:
        self._vault = vault
        self._marks = marks

    def open(self, queue: str, row: Row) -> Row:
        position, body, key, headers = row
        if self._marks is not None:
            headers = self._marks.proven(queue, headers, body)
        body, headers = self._vault.open(queue, body, headers)
        return position, body, key, headers


class OpenedRows:
    """Decrypts rows one by one, as an iterator for the loop that runs jobs.

    If the iterator cannot decrypt a row, it yields the row without body and headers. The loop then
    fails to decode the row, and knows the row's position when it handles the error.

    :ivar row: the last row in its stored form.
    :ivar fault: the error of the last decryption; None if it succeeded.
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
