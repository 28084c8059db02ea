"""Deduplication keys of messages that are sent with ``once=`` or ``unique=``.

A key of `once` is a digest of the job's message and the sent message. A repeated attempt makes the
same key. An attempt that sends different content makes a different key. Equal messages of one
attempt have different numbers in their keys. If a message may not have been stored, a later message
uses its number again.

A message with ``unique=`` carries its key, which the worker frees at the end of the message, before
it records the end. After a crash between the two, the message runs again although another message
with its key may be waiting. In the other order, the key would stay, and suppress new messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from qdo.brokers.base import LASTING_DEDUP_SECONDS, Broker, Outgoing, SendOptions
from qdo.encoding import ID
from qdo.errors import UsageError
from qdo.message import Message
from qdo.system.native import native_lock

# The header with the key of a message that was sent with `unique`.
UNIQUE = "qdo-unique"
_numbering = native_lock()


def free_key(
    broker: Broker, queue: str, key: str | None, headers: Mapping[str, str], id: str
) -> None:
    """Free the text of a message that was sent with `unique`; ignore other messages.

    :param id: the id that the message has without a header.
    """
    text = headers.get(UNIQUE)
    if text and isinstance(text, str):  # another program may write any value
        broker.delayed.free(queue, key, text, headers.get(ID) or id)


def once_options(once: Any, options: SendOptions, *sent: str | None, body: bytes) -> SendOptions:
    """Return options with which a repeated job of the message `once` stores a message only once.

    :param options: the sender's options. The result keeps only the delay.
    :param sent: queue, key and headers of the message.
    """
    if not isinstance(once, Message):
        raise UsageError(reason=f"once must be one message of a job or batch, got {once!r:.60}")
    if options.dedup_key is not None:
        raise UsageError(reason="use once or dedup_key, not both")
    content = ascii((once.id, *sent)).encode() + body  # each text has a distinct literal
    digest = hashlib.blake2b(content, digest_size=20).hexdigest()
    with _numbering:
        number = once._equal_sends.get(digest, 0)
        once._equal_sends[digest] = number + 1
    return SendOptions(options.due, f"{digest}-{number}", LASTING_DEDUP_SECONDS, once)


def release_numbers(messages: Sequence[Outgoing]) -> None:
    """Release the numbers of messages that may not have been stored, in reverse order."""
    for terms in reversed([each.terms for each in messages]):
        if terms is not None and terms.once is not None:
            digest, _, number = str(terms.dedup_key).partition("-")
            with _numbering:
                if terms.once._equal_sends[digest] == int(number) + 1:
                    terms.once._equal_sends[digest] -= 1
