"""Deduplication keys of messages that a job sends with ``once=``.

A key is a digest of the job's message and of the sent one. A repeated attempt makes the same key,
and an attempt that decides otherwise another one. Equal messages of one attempt are numbered. A
number is used again if its message was perhaps not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from qdo.brokers.base import LASTING_DEDUP_SECONDS, Outgoing, SendOptions
from qdo.errors import UsageError
from qdo.message import Message
from qdo.system.native import native_lock

_numbering = native_lock()


def once_options(once: Any, options: SendOptions, *sent: str | None, body: bytes) -> SendOptions:
    """Return options that store a message once, however often the job of `once` runs.

    :param options: of the sender; only the delay remains.
    :param sent: queue, key and headers of the message.
    """
    if not isinstance(once, Message):
        raise UsageError(reason=f"once must be one message of a job or batch, got {once!r:.60}")
    if options.dedup_key is not None:
        raise UsageError(reason="use once or dedup_key, not both")
    content = ascii((once.id, *sent)).encode() + body  # no other text has the same literal
    digest = hashlib.blake2b(content, digest_size=20).hexdigest()
    with _numbering:
        number = once._equal_sends.get(digest, 0)
        once._equal_sends[digest] = number + 1
    return SendOptions(options.due, f"{digest}-{number}", LASTING_DEDUP_SECONDS, once)


def release_numbers(messages: Sequence[Outgoing]) -> None:
    """Take back the numbers of messages that were perhaps not stored, the last ones first."""
    for terms in reversed([each.terms for each in messages]):
        if terms is not None and terms.once is not None:
            digest, _, number = str(terms.dedup_key).partition("-")
            with _numbering:
                if terms.once._equal_sends[digest] == int(number) + 1:
                    terms.once._equal_sends[digest] -= 1
