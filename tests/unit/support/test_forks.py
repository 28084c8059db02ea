"""A forked process is like one that exec started: same output, exit code and surroundings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks.processes import Popen, choice, run
from tests.support.paths import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)
PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.orig_argv, __name__)",
    "path": "import sys; print(sys.path)",
    "error": "def f(): raise ValueError(1)\nf()",
    "chain": "try: 1/0\nexcept ArithmeticError as e: raise KeyError('a') from e",
    "sentence": "raise SystemExit('no')",
    "code": "raise SystemExit(7)",
    "quit": "raise SystemExit",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "input": "import sys; print(sys.stdin.read())",
    "atexit": "import atexit; atexit.register(print, 'bye')",
    "thread": "import threading as t; t.Timer(0.05, print, ['late']).start()",
    "files": "import os; print(sorted(os.listdir('/proc/self/fd')), os.getcwd())",
    "surroundings": "import os; print(os.umask(0), sorted(os.environ.items()))",
    "group": "import os; print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())",
    "signals": "import signal as s; print([(n, s.getsignal(n)) for n in s.Signals])",
    "masks": "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))",
    "streams": "import sys as s; print([(f, f.errors) for f in (s.stdin, s.stdout, s.stderr)])",
    "no stdout": "import sys; sys.stdout.close()",
    "threads": "import threading; print(threading.active_count())",
    "collector": "import gc; print(gc.get_threshold(), gc.isenabled())",
    "patched": "import gevent.monkey as m; print(m.is_anything_patched())",
    "unflushed": "import sys, os; print('x'); sys.stdout.flush(); os.close(1); print('y')",
}


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let a test choose how processes start."""
    monkeypatch.setattr(choice, "exec_now", False)
    return monkeypatch


def both(restored: pytest.MonkeyPatch, *argv: str, **options: Any) -> list[Any]:
    """Run a program by exec and by a fork; return exit codes and outputs."""
    ended = []
    for exec_now in (True, False):
        restored.setattr(choice, "exec_now", exec_now)
        with Popen([sys.executable, *argv], env=ENVIRONMENT, **options) as process:
            assert (process._answers is None) is exec_now
            out, err = process.communicate(b"words", 20)
        ended.append((process.returncode, out, err))
    return ended


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_is_like_exec(restored: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Down to the traceback of an error."""
    by_exec, forked = both(restored, "-c", PROGRAMS[name], "a", "b", cwd=tmp_path, **PIPES)
    assert forked == by_exec


def test_a_module_runs_once(restored: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As ``__main__``, although the server has imported it."""
    for argv in (("-m", "qdo"), ("-m", "qdo.cli.worker", "--help"), ("-m", "qdo", "queues")):
        by_exec, forked = both(restored, *argv, cwd=tmp_path, **PIPES)
        assert forked == by_exec


def test_a_full_stdout_is_an_error(restored: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python's exit code for what it could not write is 120."""
    with Path("/dev/full").open("wb") as full:
        options = {"stdin": subprocess.PIPE, "stdout": full, "stderr": subprocess.DEVNULL}
        by_exec, forked = both(restored, "-c", "print(1)", cwd=tmp_path, **options)
    assert forked[0] == by_exec[0] == 120


def test_a_session_of_its_own(restored: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that the test can kill the whole group."""
    options = {**PIPES, "start_new_session": True, "cwd": tmp_path}
    by_exec, forked = both(restored, "-c", PROGRAMS["group"], **options)
    assert forked == by_exec == (0, b"True True\n", b"")


def test_a_signal_right_after_the_fork_is_not_lost(restored: pytest.MonkeyPatch) -> None:
    """The parent of the worker handles it, and the worker has this handler until its reset."""
    program = """
import os, signal, sys
from tests.support.forks.server import ForkedWorker

def setsid(real=os.setsid):
    os.kill(os.getpid(), signal.SIGTERM)
    real()

signal.signal(signal.SIGTERM, lambda *_: None)
os.setsid = setsid
argv = [sys.executable, "-m", "this"]
print(ForkedWorker(argv, stdin=-3, env={}, pass_fds=(), start_new_session=True).wait())
"""
    command = [sys.executable, "-c", program]
    assert run(command, timeout=20, env=ENVIRONMENT, capture_output=True).stdout == b"-15\n"


def test_a_process_is_waited_for(restored: pytest.MonkeyPatch) -> None:
    """With a deadline, and killed by its pid."""
    source = "import time; time.sleep(600)"
    with Popen([sys.executable, "-c", source], env=ENVIRONMENT) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == process.poll() == -signal.SIGTERM


def test_unusual_processes_start_by_exec(restored: pytest.MonkeyPatch) -> None:
    """Other programs, other settings of the interpreter, steps before exec."""
    python = [sys.executable, "-c", ""]
    for argv, options in (
        (["/bin/true"], {}),
        ([sys.executable, "-I", "-c", ""], {}),
        (python, {"preexec_fn": os.getpid}),
        (python, {"env": {**ENVIRONMENT, "PYTHONHASHSEED": "1"}}),
        (python, {"pass_fds": (0,)}),
    ):
        with Popen(argv, **{"env": ENVIRONMENT, **options}) as process:
            assert process._answers is None
            assert process.wait(20) == 0


def test_run_gives_up_at_its_deadline(restored: pytest.MonkeyPatch) -> None:
    """And leaves no process behind."""
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        run(argv, timeout=0.05, capture_output=True, env=ENVIRONMENT)
