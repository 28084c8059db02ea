"""The stacks of all greenlets and threads of this process, and of its running jobs by name."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import gevent

from qdo.worker.engine.pipeline import running_in

_GREENLET: Any = gevent.Greenlet.__mro__[-2]
"""The class `greenlet.greenlet`: callbacks of gevent's hub are greenlets without being its own."""
MAX_FRAMES = 60
"""The innermost frames of a stack that are shown."""

_Key = tuple[str, tuple[tuple[str, int, str], ...]]


def all_stacks() -> str:
    """Return the stacks of this process: running jobs first, equal stacks once.

    Has no values of variables, because they may be bodies of messages.
    """
    counts = Counter(_key(what, frame) for what, frame in _frames())
    order = sorted(counts, key=lambda key: (not key[0].startswith("job"), -counts[key], key))
    return "\n".join(_shown(key, counts[key]) for key in order)


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the stacks of all threads but this greenlet, and of greenlets that do not run."""
    own, names = sys._getframe(), {each.ident: each.name for each in threading.enumerate()}
    current = threading.get_ident()
    for ident, frame in sys._current_frames().items():
        if not _contains(frame, own):
            name = "main" if ident == current else names.get(ident, str(ident))
            yield f"thread {name}", frame
    for found in gc.get_objects():
        if issubclass(type(found), _GREENLET):  # `isinstance` asks the object, which may lie
            frame = found.gr_frame
            if frame is not None and not _contains(frame, own):
                yield "greenlet", frame


def _contains(frame: FrameType | None, wanted: FrameType) -> bool:
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def _key(what: str, frame: FrameType) -> _Key:
    running = running_in(frame)
    if running is not None:
        message = running.message
        what = f"job {running.job.name}, queue {message.queue}, message {message.id}, in a {what}"
    lines: list[tuple[str, int, str]] = []
    for each, number in traceback.walk_stack(frame):
        code = each.f_code
        lines.append((code.co_filename, number, code.co_name))
        if len(lines) == MAX_FRAMES:
            break
    return what, tuple(reversed(lines))


def _shown(key: _Key, count: int) -> str:
    what, lines = key
    times = "" if count == 1 else f" ({count} with this stack)"
    stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(file, number, name) for file, number, name in lines]
    )
    return f"{what}{times}\n{''.join(stack.format())}"
