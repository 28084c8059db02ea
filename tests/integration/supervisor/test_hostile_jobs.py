"""Jobs that write to what their worker process shares with its parent, and then kill it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from qdo.app import App
from tests.support.paths import ROOT
from tests.support.processes import Proc

JOBS = """
import gc, json, mmap, os, struct, time
import qdo

app = qdo.App("hostile")

def memory(name):
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{name}"):
                return int(fd)
        except FileNotFoundError:
            pass

def pipe():
    from qdo.worker.parent_link import ParentLink
    (link,) = [each for each in gc.get_objects() if isinstance(each, ParentLink)]
    return link._pipe.fileno()

def names():
    # An unused entry: names that are no UTF-8, longer than the entry.
    for table in ("qdo-in-flight", "qdo-receipts"):
        fd = memory(table)
        os.ftruncate(fd, max(os.fstat(fd).st_size, 10240))
        os.pwrite(fd, struct.pack("<qHH", 7, 9, 60000) + b"\\xff" * 500, 9216)
        os.pwrite(fd, struct.pack("<HHHH", 9, 60000, 0xffff, 0xffff) + b"\\xff" * 500, 8192)

def huge():
    for table in ("qdo-in-flight", "qdo-receipts"):
        os.ftruncate(memory(table), 1 << 44)

def uneven():
    for table in ("qdo-in-flight", "qdo-receipts"):
        os.ftruncate(memory(table), 5000)

def deep():
    os.write(pipe(), b"[" * 100000 + b"\\n")

def endless():
    os.set_blocking(pipe(), True)
    for _ in range(100):
        os.write(pipe(), b"x" * 100000)

def values():
    for line in (
        b"1", b"null", b'"settings"', b"\\xff", b"{}", b'{"files": 1}', b'{"settings": {"x": 1}}',
        b'{"settings": {"log_config": "/nowhere", "processes": 100}}',
        b'{"session": "1", "password": "", "timeout": NaN}',
        b'{"session": "1", "password": "", "timeout": -1}',
        b'{"session": "' + b"f" * 99 + b'", "password": "", "coordinator": "nowhere:", "root": 1}',
    ):
        os.write(pipe(), line + b"\\n")

@app.job()
def job(message, context):
    if message.attempt > 1:
        print("done", message.body, flush=True)
        return
    print("attack", flush=True)
    globals()[message.body]()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("attack", ["names", "huge", "uneven", "deep", "endless", "values"])
def test_a_parent_survives_what_a_job_writes(tmp_path: Path, attack: str) -> None:
    """The process is replaced, its message runs again, and the parent obeys its signals."""
    (tmp_path / "hostile.py").write_text(JOBS)
    files = tmp_path / "messages.db", tmp_path / "coordination.db"
    with App("hostile", broker=f"sqlite:{files[0]}") as app:
        app.send("q", attack)
    argv = ("-m", "qdo.cli.worker", "hostile:app", "--session-timeout-seconds", "2")
    places = ("--broker", f"sqlite:{files[0]}", "--coordinator", f"sqlite:{files[1]}")
    env = {"PYTHONPATH": str(ROOT)}
    with Proc.python(*argv, *places, cwd=tmp_path, env=env) as parent:
        parent.wait_for_line(f"done {attack}")
        parent.send(signal.SIGTERM)
        assert parent.wait() == 0
        assert "Traceback" not in parent.output
