"""The protocol between a worker process and a job's process.

A frame is two lengths (32 bits each, network order), a JSON object and raw bytes: the body of a
message if it is bytes, the JSON of a large one, otherwise nothing. There is no pickle: an answer is
only data, whatever code ran in the job's process.

==========  ===========================================================================
frame       JSON
==========  ===========================================================================
ready       ``ready`` and its `pid`, or ``{"failed": "why"}`` and the process ends
message     its fields, and ``serial``
answer      ``serial`` and ``done``, or an `outcome`, or an `error`, see `errors`; or
            ``undecodable`` with the reason
==========  ===========================================================================
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qdo.encoding import JsonText
from qdo.message import Message
from qdo.positions import position_of_time
from qdo.worker.large_bodies import load_large

_LENGTHS = struct.Struct("!II")
ANSWER_LIMIT = 4 << 20
"""Maximum length of an answer; qdo writes no longer one."""
_CHUNK = 1 << 18


class WireError(Exception):
    """The other process sent an invalid frame."""


def pack(head: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return a frame."""
    text = json.dumps(head).encode()
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


def read(
    receive: Callable[[int], bytes], limit: int | None = None
) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, None at the end.

    :param receive: returns at most the requested number of bytes, none at the end.
    :param limit: maximum bytes of a frame.
    :raises WireError: the frame is too long, or its head is not a JSON object.
    """
    lengths = _exactly(receive, _LENGTHS.size)
    if lengths is None:
        return None
    text_size, blob_size = _LENGTHS.unpack(lengths)
    if limit is not None and text_size + blob_size > limit:
        raise WireError(f"a frame must have at most {limit} bytes, got {text_size + blob_size}")
    text, blob = _exactly(receive, text_size), _exactly(receive, blob_size)
    if text is None or blob is None:
        return None
    try:
        head = json.loads(text)
    except ValueError as error:
        raise WireError("its head is not JSON") from error
    if not isinstance(head, dict):
        raise WireError("its head is not a JSON object")
    return head, blob


def _exactly(receive: Callable[[int], bytes], size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = receive(min(size, _CHUNK))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pack_message(message: Message, serial: int) -> bytes:
    """Return the frame of a message."""
    raw, large = isinstance(message.body, bytes), type(message.body) is JsonText
    head = {
        "serial": serial,
        "queue": message.queue,
        "position": message.position,
        "key": message.key,
        "headers": dict(message.headers),
        "fence": message.fence,
        "attempt": message.attempt,
        "id": message.id,
        "time": message.time,
        "stable": message.stable,
        "raw": raw,
        "large": large,
        "body": None if raw else message.body,
    }
    return pack(head, message.body if raw else b"")


def message_of(head: dict[str, Any], blob: bytes) -> Message:
    """Return the message of a frame.

    :raises ValueError: its large body is not JSON.
    """
    return Message(
        head["queue"],
        head["position"],
        load_large(blob) if head["large"] else blob if head["raw"] else head["body"],
        head["key"],
        head["headers"],
        head["fence"],
        head["attempt"],
        _WorkerPositions(head["id"], head["time"], head["stable"]),
    )


@dataclass(frozen=True, slots=True)
class _WorkerPositions:
    """Values that the worker derived from the position of one message."""

    id: str
    time: float
    stable: bool

    def to_time(self, position: int) -> int:
        return position_of_time(self.time)

    def message_id(self, position: int, node: int) -> str:
        return self.id


VARIABLE = "QDO_EXECUTOR"
