"""Check requests and their contents before storing them."""

from __future__ import annotations

from collections.abc import Sequence

from qdo.brokers.requests import Content, NewRequest
from qdo.encoding import is_utf8, utf8_text
from qdo.errors import MessageTooLargeError, UsageError
from qdo.queues import check_queue_name
from qdo.text import shorten

MAX_ID_CHARACTERS = 200
# The maximum number of characters of a note, an error or a traceback.
MOST_TEXT = 200_000


def check_requests(requests: Sequence[NewRequest], most: int) -> int:
    """Return the total size of bodies; raise an error if a store must refuse a request.

    :param most: the largest body that the broker stores.
    """
    for each in requests:
        check_queue_name(each.pool)
        if not 1 <= len(each.id) <= MAX_ID_CHARACTERS:
            raise UsageError(
                reason=f"the id of a request of pool {each.pool!r} must have 1 to "
                f"{MAX_ID_CHARACTERS} characters, got {len(each.id)}"
            )
        texts = {"id": each.id, "headers": each.content[1], "reply": each.reply}
        for word, text in texts.items():
            check_request_text(f"the {word} of a request of pool {each.pool!r}", text)
    return sum(check_content(each.pool, each.content, most) for each in requests)


def check_content(pool: str, content: Content | None, most: int) -> int:
    """Return the size of a body or result; raise MessageTooLargeError if it is above `most`."""
    size = 0 if content is None else len(content[0])
    if size > most:
        raise MessageTooLargeError(queue=pool, size=size, limit=most)
    return size


def check_request_text(subject: str, text: str | None) -> None:
    """Raise UsageError for text that some stores cannot keep."""
    if text is not None and ("\0" in text or not is_utf8(text)):
        raise UsageError(
            reason=f"{subject} must not contain NUL or surrogate characters, which brokers cannot "
            f"store, got {text!r}"
        )


def storable_text(text: str | None) -> str | None:
    """Return a note or error in a storable form, so that it never stops an attempt from ending."""
    return None if text is None else shorten(utf8_text(text).replace("\0", "\\x00"), MOST_TEXT)
