"""Jobs that spoil the shared memory and the pipe of their process."""

from __future__ import annotations

import gc
import os
import struct

import qdo
from qdo import Message

app = qdo.App("hostile")


def memory(name: str) -> int:
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{name}"):
                return int(fd)
        except FileNotFoundError:
            pass
    raise LookupError(name)


def pipe() -> int:
    from qdo.worker.parent_link import ParentLink

    (link,) = [each for each in gc.get_objects() if isinstance(each, ParentLink)]
    return link._pipe.fileno()


def names() -> None:
    # An unused entry: names that are no UTF-8, longer than the entry.
    for table in ("qdo-in-flight", "qdo-receipts"):
        fd = memory(table)
        os.ftruncate(fd, max(os.fstat(fd).st_size, 10240))
        os.pwrite(fd, struct.pack("<qHH", 7, 9, 60000) + b"\xff" * 500, 9216)
        os.pwrite(fd, struct.pack("<HHHH", 9, 60000, 0xFFFF, 0xFFFF) + b"\xff" * 500, 8192)


def huge() -> None:
    for table in ("qdo-in-flight", "qdo-receipts"):
        os.ftruncate(memory(table), 1 << 44)


def uneven() -> None:
    for table in ("qdo-in-flight", "qdo-receipts"):
        os.ftruncate(memory(table), 5000)


def deep() -> None:
    os.write(pipe(), b"[" * 100000 + b"\n")


def endless() -> None:
    os.set_blocking(pipe(), True)
    for _ in range(100):
        os.write(pipe(), b"x" * 100000)


def values() -> None:
    for line in (
        b"1",
        b"null",
        b'"settings"',
        b"\xff",
        b"{}",
        b'{"files": 1}',
        b'{"settings": {"x": 1}}',
        b'{"settings": {"log_config": "/nowhere", "processes": 100}}',
        b'{"session": "1", "password": "", "timeout": NaN}',
        b'{"session": "1", "password": "", "timeout": -1}',
        b'{"session": "' + b"f" * 99 + b'", "password": "", "coordinator": "nowhere:", "root": 1}',
    ):
        os.write(pipe(), line + b"\n")


@app.job()
def job(message: Message, context: object) -> None:
    if message.attempt > 1:
        print("done", message.body, flush=True)
        return
    print("attack", flush=True)
    globals()[message.body]()
    os.kill(os.getpid(), 9)
