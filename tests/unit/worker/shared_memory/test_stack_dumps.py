"""Stacks that a process writes for its parent, also while it computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from qdo.worker import stacks
from qdo.worker.stacks import StackDumps, functions

CHILD = """
import re, sys
from qdo.worker.stacks import write_at_signal

def outer():
    print("ready", flush=True)
    re.match("(a+)+$", 60 * "a" + "b")

write_at_signal(int(sys.argv[1]))
outer()
"""


def test_a_computing_process_writes_its_stacks() -> None:
    """It holds the interpreter lock all the time. Each dump replaces the one before."""
    dumps = StackDumps()
    argv = [sys.executable, "-c", CHILD, str(dumps.fd)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=[dumps.fd]) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            first, second = dumps.take(child.pid), dumps.take(child.pid)
        finally:
            child.kill()
            dumps.close()
    for dump in (first, second):
        [stack] = functions(dump)
        assert [name for _, name in stack][:2] == ["<module>", "outer"]


def test_a_stopped_process_writes_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "PATIENCE_SECONDS", 0.05)
    dumps = StackDumps()
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        os.kill(child.pid, signal.SIGSTOP)
        assert dumps.take(child.pid) == ""
        child.kill()
    dumps.close()


def test_no_signal_is_sent_after_the_end() -> None:
    """The pid may belong to another process by then."""
    dumps = StackDumps()
    dumps.close()
    assert dumps.take(os.getpid()) == ""  # this process would end


def test_only_frames_are_functions() -> None:
    dump = """Thread 0x00007f (most recent call first):
  File "/a/b.py", line 3 in inner
  File "/a/c d.py", line ??? in <module>

Current thread 0x00008f (most recent call first):
  <no Python frame>
garbage
"""
    assert functions(dump) == [[("/a/c d.py", "<module>"), ("/a/b.py", "inner")]]
