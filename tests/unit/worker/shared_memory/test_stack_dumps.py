"""Stacks that a process writes for its parent, also while it computes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from qdo.worker import stacks
from qdo.worker.stacks import StackDumps

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
        names = re.findall(r"^  File .* in (.*)$", dump, re.MULTILINE)
        assert names[-2:] == ["outer", "<module>"]
        assert names.count("<module>") == 1


SLOW_CHILD = """
import os, signal, sys, time
from qdo.worker.stacks import STACKS_SIGNAL

def handler():
    os.write(fd, b"one half")
    time.sleep(0.2)
    os.write(fd, b", the other half")

fd = int(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
print("ready", flush=True)
signal.sigwait([STACKS_SIGNAL])
handler()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])
time.sleep(60)
"""


def test_no_half_of_the_stacks_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes slowly may pause for longer than between two looks at its memory."""
    monkeypatch.setattr(stacks, "PATIENCE_SECONDS", 60.0)  # the machine may pause both
    dumps = StackDumps()
    argv = [sys.executable, "-c", SLOW_CHILD, str(dumps.fd)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=[dumps.fd]) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            assert dumps.take(child.pid) == "one half, the other half"
        finally:
            child.kill()
            dumps.close()


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
