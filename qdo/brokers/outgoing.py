"""Messages on their way to a broker."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.encoding import MAX_STORED_BODY_BYTES, is_utf8
from qdo.errors import MessageTooLargeError, UsageError
from qdo.message import Message
from qdo.queues import check_queue_name

# The default time for which a deduplication key is valid.
DEDUP_SECONDS = 300.0
# The validity of keys of outboxes and repeated attempts, which may send again after long pauses.
LASTING_DEDUP_SECONDS = 604_800.0


@dataclass(frozen=True, slots=True)
class SendOptions:
    """The delivery time and the deduplication of a message."""

    # The Unix time before which the broker must not deliver the message; None for no delay. A
    # negative value is a delay in seconds by the clock of the store.
    due: float | None = None
    # A queue stores the first message with a key. For `dedup_seconds`, sending another message with
    # the same key only returns the id of the first message.
    dedup_key: str | None = None
    dedup_seconds: float = DEDUP_SECONDS
    # The message of the sending job, if the id of that message is part of the key.
    once: Message | None = None
    # Whether the end of the message frees the key; see `DelayedMessages.free`.
    until_done: bool = False

    def due_at(self, now: float) -> float | None:
        """Return the Unix time of the earliest delivery; `now` is the time by the store's clock."""
        return now - self.due if self.due is not None and self.due < 0 else self.due


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a broker, with its body in the stored form."""

    queue: str
    body: bytes
    key: str | None = None
    # A JSON object of str to str, or None.
    headers: str | None = None
    # The send options; None for most messages. One field for all options saves time, because a
    # sender makes a million messages a minute.
    terms: SendOptions | None = None


def check_text(message: Outgoing, nul: bool = True) -> None:
    """Raise UsageError for characters that a broker cannot store; `nul` allows NUL characters."""
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

    :param known: the names of queues that passed the check; the function adds the message's queue.
    """
    if message.queue not in known:
        known.add(check_queue_name(message.queue))
    check_text(message, nul)
    size = len(message.body)
    if size > MAX_STORED_BODY_BYTES:
        raise MessageTooLargeError(queue=message.queue, size=size, limit=MAX_STORED_BODY_BYTES)
    return size
