"""The shell program: the inputs of commands, and the effect of their exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from qdo import DeadLetter, Message, Retry, Stop
from qdo.errors import SettingsError, UsageError
from qdo.programs import shell
from qdo.programs._options import read
from qdo.programs.shell import CommandFailedError, Runner, ShellOptions, TryAgainError
from tests.support.processes import alive, wait_until


def message(body: Any = None, **more: Any) -> Message:
    more = {"id": "0f5d2f8e-0000-4000-8000-000000000001", "fence": 7, **more}
    queue = more.pop("queue", "orders")
    return Message(queue, 140049072629181272, {"n": 1} if body is None else body, **more)


def run(command: str, each: Message | None = None, **changes: Any) -> None:
    Runner(ShellOptions(command=command, **changes)).run(message() if each is None else each)


# --- inputs of a command ------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ({"name": "Zoë", "path": "a/b"}, '{"name":"Zoë","path":"a/b"}\n'.encode()),
        (None, b'{"n":1}\n'),
        (b"\x00\xffraw", b"\x00\xffraw"),
        (b"", b""),
    ],
)
def test_the_body_is_its_standard_input(tmp_path: Path, body: Any, given: bytes) -> None:
    """A line of JSON, or the bytes that were sent."""
    run(f"cat > {tmp_path}/got", message(body))
    assert (tmp_path / "got").read_bytes() == given


def test_commands_do_not_get_the_coordinators_password(tmp_path: Path) -> None:
    environ = {**os.environ, "QDO_COORDINATOR_PASSWORD": "secret", "KEPT": "yes"}
    out = tmp_path / "out"
    options = ShellOptions(command=f"echo $KEPT-$QDO_COORDINATOR_PASSWORD > {out}")
    Runner(options, environ).run(message())
    assert out.read_text() == "yes-\n"


def test_a_command_need_not_read_its_input() -> None:
    """However long that is."""
    run("exit 0", message(b"x" * 1_000_000))


def test_the_rest_is_in_its_environment(tmp_path: Path) -> None:
    """By name, and the key only where there is one."""
    each = message(key="ada lovelace", attempt=3)
    run(f"env | grep ^QDO_MESSAGE_ | sort > {tmp_path}/got", each)
    assert (tmp_path / "got").read_text().splitlines() == [
        "QDO_MESSAGE_ATTEMPT=3",
        "QDO_MESSAGE_FENCE=7",
        "QDO_MESSAGE_ID=0f5d2f8e-0000-4000-8000-000000000001",
        "QDO_MESSAGE_KEY=ada lovelace",
        "QDO_MESSAGE_POSITION=140049072629181272",
        "QDO_MESSAGE_QUEUE=orders",
        f"QDO_MESSAGE_TIME={each.time:.6f}",
    ]


def test_what_is_inherited(tmp_path: Path) -> None:
    """The worker's environment, without the variables of another message."""
    options = ShellOptions(command=f'echo "$PLACE ${{QDO_MESSAGE_KEY-none}}" > {tmp_path}/got')
    environ = {"PATH": os.environ["PATH"], "PLACE": "here", "QDO_MESSAGE_KEY": "of another"}
    Runner(options, environ).run(message())
    assert (tmp_path / "got").read_text() == "here none\n"


def test_messages_never_become_part_of_the_command(tmp_path: Path) -> None:
    """Whatever a sender writes is data."""
    evil = f"$(touch {tmp_path}/evil); touch {tmp_path}/evil"
    run('printf %s "$QDO_MESSAGE_QUEUE$QDO_MESSAGE_KEY" > /dev/null', message(queue=evil, key=evil))
    assert not (tmp_path / "evil").exists()


def test_a_key_that_no_environment_can_hold() -> None:
    """A retry would fail as well, so the message becomes a dead letter."""
    with pytest.raises(DeadLetter, match="NUL"):
        run("true", message(key="a\0b"))


# --- how it ends --------------------------------------------------------------------


def test_75_is_tried_again() -> None:
    """The error includes the command's output."""
    with pytest.raises(TryAgainError, match=r": busy just now$") as caught:
        run("echo busy >&2; echo just now >&2; exit 75")
    assert isinstance(caught.value, Retry)
    assert caught.value.after is None


def test_65_is_a_dead_letter() -> None:
    """The error includes the command's output."""
    with pytest.raises(DeadLetter, match=r": no order$"):
        run("echo no order >&2; exit 65")


@pytest.mark.parametrize(
    ("command", "ended", "said"),
    [
        ("exit 1", "1", ""),
        ("nothing-of-this-name", "127", "not found"),
        ("kill -9 $$", "SIGKILL", ""),
        ("echo $QDO_MESSAGE_QUEUE >&2; exit 3", "3", ": orders"),
    ],
)
def test_other_ends_are_failures(command: str, ended: str, said: str) -> None:
    """The error has the exit code or signal, and the end of stderr."""
    with pytest.raises(CommandFailedError) as caught:
        run(command)
    details = caught.value.details
    assert details["ended"].split()[-1] == ended
    assert details["said"].endswith(said)
    assert bool(details["said"]) is bool(said)


def test_long_words_are_cut_at_the_front() -> None:
    """The end of a command's output explains its failure."""
    with pytest.raises(CommandFailedError) as caught:
        run("seq 100000 >&2; exit 1")
    assert str(caught.value).endswith("99999 100000")
    assert len(str(caught.value)) < 2500


def test_a_grandchild_that_stays_holds_nothing_up(tmp_path: Path) -> None:
    """The attempt ends with the command, not with its background processes."""
    run(f"sleep 600 & echo $! > {tmp_path}/child; exit 0")
    child = int((tmp_path / "child").read_text())
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_time_out_ends_the_whole_group(tmp_path: Path) -> None:
    """First SIGTERM, which the command may use to clean up; then nothing is left."""
    command = (
        f"trap 'echo cleaned > {tmp_path}/cleaned; exit 0' TERM; "
        f"(trap '' TERM; echo $(exec sh -c 'echo $PPID') > {tmp_path}/child; sleep 60) & wait"
    )
    runner = Runner(ShellOptions(command=command, timeout_seconds=1.0, kill_seconds=1.0))
    with pytest.raises(CommandFailedError) as caught:
        runner.run(message())
    assert caught.value.details["ended"].endswith(" 1 s")
    assert (tmp_path / "cleaned").read_text() == "cleaned\n"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child), "the grandchild is killed")


def test_a_command_that_ignores_sigterm_is_killed() -> None:
    """After the time that it has to end."""
    with pytest.raises(CommandFailedError) as caught:
        run("trap '' TERM; sleep 600 & wait; wait", timeout_seconds=0.2, kill_seconds=0.2)
    assert caught.value.details["ended"].endswith(" 0.2 s")


def test_a_command_ends_with_its_worker(tmp_path: Path) -> None:
    """A worker that is killed leaves no command behind that works beside the next owner's."""
    program = (
        "from qdo import Message\n"
        "from qdo.programs.shell import Runner, ShellOptions\n"
        f"command = 'echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60'\n"
        "Runner(ShellOptions(command=command)).run(Message('q', 1, None))\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until((tmp_path / "pid").exists, "the command runs")
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_until(lambda: not alive(pid), "the command has ended, too")


def test_commands_of_several_queues_run_at_once(tmp_path: Path) -> None:
    """One runner serves every queue of a process: each waits here until all have started."""
    meet = f"touch {tmp_path}/$$; until [ $(ls {tmp_path} | wc -l) -eq 4 ]; do sleep 0.02; done"
    runner = Runner(ShellOptions(command=meet))
    with ThreadPoolExecutor(4) as pool:
        ended = [pool.submit(runner.run, message()) for _ in range(4)]
        # The first to end: where one fails the others wait for it, and must not hide its error.
        assert [each.result() for each in as_completed(ended, 30)] == [None] * 4


# --- options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({}, "COMMAND", "/bin/sh"),
        ({"QDO_SHELL_COMMAND": "true", "QDO_SHELL_TIMEOUT_SECONDS": "0"}, "TIMEOUT_SECONDS", "0.0"),
        ({"QDO_SHELL_COMMAND": "true", "QDO_SHELL_KILL_SECONDS": "x"}, "KILL_SECONDS", "'x'"),
    ],
)
def test_options_that_will_not_do(environ: dict[str, str], name: str, value: str) -> None:
    """The error names the option and its value, or its meaning if it is missing."""
    with pytest.raises(SettingsError) as caught:
        read(ShellOptions, environ)
    assert caught.value.details["name"] == f"QDO_SHELL_{name}"
    assert value in caught.value.details["reason"]
    with pytest.raises(UsageError, match="did you mean"):
        read(ShellOptions, {"QDO_SHELL_COMAND": "true"})


def test_a_command_that_is_no_shell() -> None:
    """A quote that is not closed is seen before the first message."""
    with pytest.raises(SettingsError) as caught:
        Runner(ShellOptions(command="echo 'a"))
    assert caught.value.details["name"] == "QDO_SHELL_COMMAND"


def test_a_job_without_its_context() -> None:
    """The worker stops and names the setting to make; the message is not touched."""
    with pytest.raises(Stop, match=r"qdo\.programs\.shell:job_context"):
        shell.job(message(), {})  # type: ignore[arg-type]


def test_a_body_that_cannot_be_json_is_a_dead_letter() -> None:
    """At once: no retry can help."""
    with pytest.raises(DeadLetter):
        shell.standard_input(Message("q", 1, {"n": float("inf")}))
    assert shell.standard_input(Message("q", 1, "\ud800")) == b'"\\ud800"\n'
