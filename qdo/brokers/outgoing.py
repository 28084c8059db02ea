"""Messages on their way to a broker."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.encoding import MAX_STORED_BODY_BYTES, is_utf8
from qdo.errors import MessageTooLargeError, UsageError
from qdo.message import Message
from qdo.queues import check_queue_name

# Default window of a deduplication key.
DEDUP_SECONDS = 300.0
# Window of what outboxes and repeated attempts send again: their longest pause in between.
LASTING_DEDUP_SECONDS = 604_800.0


@dataclass(frozen=True, slots=True)
class SendOptions:
    """When a message is delivered, and whether it is stored."""

    # Unix time in seconds before which it must not be delivered; None: at once; below 0: so many
    # seconds from now, by the clock of the store.
    due: float | None = None
    # A queue stores the first message with a key. For `dedup_seconds` from its sending, sending
    # another returns the id of the first.
    dedup_key: str | None = None
    dedup_seconds: float = DEDUP_SECONDS
    # The message whose job sends this one, if the key is made from it.
    once: Message | None = None

    def due_at(self, now: float) -> float | None:
        """Return the Unix time before which it must not be delivered; `now` is the store's."""
        return now - self.due if self.due is not None and self.due < 0 else self.due


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a broker, its body as it will be stored."""

    queue: str
    body: bytes
    key: str | None = None
    # JSON object of str to str, or None.
    headers: str | None = None
    # None for most: one field, because a million of these are made a minute.
    terms: SendOptions | None = None


def check_text(message: Outgoing, nul: bool = True) -> None:
    """Raise UsageError for characters that a broker cannot store; `nul`: it can store NUL."""
    options = message.terms
    texts = (
        ("key", message.key),
        ("headers", message.headers),
        ("dedup_key", None if options is None else options.dedup_key),
    )
    for word, text in texts:
        if text is None or ((text.isascii() or is_utf8(text)) and (nul or "\0" not in text)):
            continue
        what = "surrogate characters" if nul else "NUL or surrogate characters"
        raise UsageError(
            reason=f"the {word} of a message for queue {message.queue!r} must not contain {what}, "
            f"which the broker cannot store, got {text!r}"
        )


def checked_size(known: set[str], message: Outgoing, nul: bool = True) -> int:
    """Return the size of a body; raise an error if a broker cannot store the message.

    :param known: the names of queues that were checked before; this adds the message's.
    """
    if message.queue not in known:
        known.add(check_queue_name(message.queue))
    check_text(message, nul)
    size = len(message.body)
    if size > MAX_STORED_BODY_BYTES:
        raise MessageTooLargeError(queue=message.queue, size=size, limit=MAX_STORED_BODY_BYTES)
    return size
