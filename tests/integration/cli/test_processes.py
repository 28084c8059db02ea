"""The command line as real processes: exit codes, pipes, limits of the system."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from qdo.app import App
from qdo.brokers.dead_letters import DeadLetterRecord
from tests.support.cli import QDO, WORKER, clean_environment, command, run_in
from tests.support.forks.processes import Popen


def test_send_loads_little(tmp_path: Path) -> None:
    """Sending needs neither gevent nor kazoo nor rich: it starts quickly."""
    code = (
        "import sys; from qdo.cli.main import qdo; from qdo.cli.framework import run; "
        "assert run(qdo, 'qdo', ['send', '--app', 'a', 'q', '1']) == 0; "
        "print({'gevent', 'kazoo', 'rich', 'sqlite3'} & set(sys.modules))"
    )
    ended = command("-c", code, cwd=tmp_path)
    assert ended.out.splitlines()[-1] == "{'sqlite3'}"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`qdo config | head -1` ends quietly."""
    process = subprocess.Popen(
        [sys.executable, *QDO, "config", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment({"PYTHONUNBUFFERED": "1"}),
        cwd=tmp_path,
    )
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("no pipes")
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), told) == (0, b"")


def test_a_full_disk_behind_stdout(tmp_path: Path) -> None:
    """Data that could not be written is an error, reported in one line."""
    with open("/dev/full", "wb") as full:
        ended = command(*QDO, "config", "-o", "json", cwd=tmp_path, stdout=full)
    assert (ended.code, ended.err) == (1, "qdo: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("program", ["main", "worker"])
def test_ctrl_c_while_a_program_loads_shows_no_traceback(tmp_path: Path, program: str) -> None:
    """Before any code of the command runs."""
    (tmp_path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    code = f"from qdo.__main__ import {program}; {program}()"
    ended = command("-c", code, cwd=tmp_path)
    assert (ended.code, ended.err) == (-signal.SIGINT, "")


@pytest.mark.parametrize("output", ["table", "csv"])
def test_a_name_that_a_stream_cannot_encode_hides_no_other(tmp_path: Path, output: str) -> None:
    with App("a", broker=f"sqlite:{tmp_path / 'messages.db'}") as app:
        for queue in ("caf\u00e9", "z"):
            position = uuid.UUID(app.send(queue, 1)).time
            letter = DeadLetterRecord(queue, position, b"1", None, None, "no", "", 1, "", 1)
            app.broker.dead_letters.store(letter)
    argv = ("dead-letters", "--app", "a", "--broker", "sqlite:messages.db", "-o", output)
    ended = command(*QDO, *argv, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 0, ended.err
    assert "caf\\xe9" in ended.out
    assert ended.out.splitlines()[-1].startswith("z")


def test_closed_standard_streams(tmp_path: Path) -> None:
    """Started without any of them, as `<&- >&- 2>&-` does, commands do their work all the same."""
    (tmp_path / "work.py").write_text(
        "import pathlib\ndef job(message, context): pathlib.Path('done').touch()\n"
    )

    def close() -> None:
        os.closerange(0, 3)

    for arguments in (
        (*QDO, "send", "--app", "a", "q", "1"),
        (*QDO, "send", "--app", "a", "q", "--file", "-"),
        (*QDO, "queues", "--app", "a"),
        (*WORKER, "--app", "a", "--job", "work:job", "--burst"),
    ):
        assert command(*arguments, cwd=tmp_path, preexec=close).code == 0
    assert (tmp_path / "done").exists()


def test_no_room_for_the_file(tmp_path: Path) -> None:
    """A limit reached midway: the messages reported as sent are stored, and none is torn."""
    lines = b'{"q": "a", "filler": "%s"}\n' % (b"x" * 1000)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))

    words = ("send", "--app", "a", "--file", "-", "--queue-field", "q")
    ended = command(*QDO, *words, cwd=tmp_path, stdin=lines * 20_000, preexec=limit)
    assert ended.code in (1, 3)
    told, error = ended.err.splitlines()
    count = told.split()[1]
    assert told == f"sent {count} messages, up to line {count} of standard input"
    assert error.startswith("qdo: database qdo-data/messages.db")
    path = tmp_path / "qdo-data" / "messages.db"
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()
    listed = command(*QDO, "queues", "--app", "a", "-o", "jsonl", cwd=tmp_path)
    assert f'"backlog": {count},' in listed.out
    assert 0 < int(count) < 20_000


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_zookeeper_out_of_reach(tmp_path: Path) -> None:
    """Exit code 3 after the time it was given, and the address in one line."""
    url = f"zookeeper://127.0.0.1:{closed_port()}"
    words = ("queues", "--app", "a", "--coordinator", url, "--connect-seconds", "0.5")
    ended = command(*QDO, *words, cwd=tmp_path)
    assert (ended.code, ended.out) == (3, "")
    [line] = [line for line in ended.err.splitlines() if not line.startswith("hint: ")]
    assert line.startswith("qdo: ")
    assert url in line


WRONG = {
    "a broken module": (("--job", "broken:job"), 2, "ZeroDivisionError: division by zero"),
    "no server": (("--coordinator", "zookeeper://127.0.0.1:1"), 3, "zookeeper://127.0.0.1:1"),
    "no broker's file": (("--broker", "sqlite:broken.py"), 3, "broken.py"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_worker_that_cannot_begin_says_so_in_one_line(tmp_path: Path, what: str) -> None:
    """With the documented exit code; the worker process is not started again."""
    (tmp_path / "broken.py").write_text("1 / 0")
    options, code, reason = WRONG[what]
    usual = ("--app", "a", "--job", "qdo.programs.echo:job", "--connect-seconds", "0.5")
    ended = command(*WORKER, *usual, *options, cwd=tmp_path)
    assert ended.code == code, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("qdo-worker: ")]
    assert reason in line
    assert "Traceback" not in ended.err


def test_a_closed_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """`qdo-worker 2>&1 | head -1` ends, too: an app without a module is not started again."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as closed:
        os.close(reader)
        process = subprocess.Popen(
            [sys.executable, *WORKER, "no_such_module:app"],
            stderr=closed,
            cwd=tmp_path,
            env=clean_environment(),
        )
    try:
        assert process.wait(timeout=30) == 2
    finally:
        process.kill()


def on_terminal(width: int, cwd: Path, *argv: str) -> str:
    terminal, inside = pty.openpty()
    shown = bytearray()
    with open(terminal, "rb", buffering=0) as screen, open(inside, "wb", buffering=0) as stdout:
        process = Popen(
            [sys.executable, *QDO, *argv],
            cwd=cwd,
            env=clean_environment({"COLUMNS": str(width)}),
            stdout=stdout,
        )
        stdout.close()
        with contextlib.suppress(OSError):  # EIO: the process has ended
            while data := screen.read(10_000):
                shown += data
        process.wait(60)
    return shown.decode()


@pytest.mark.parametrize("width", [40, 80, 110])
def test_ids_and_reasons_on_a_terminal(tmp_path: Path, width: int) -> None:
    """Ids are arguments of other commands, and a long error is wrapped."""
    queue = "invoices-of-a-tenant"
    with App("a", broker=f"sqlite:{tmp_path / 'messages.db'}", attempts=1) as app:
        sent = app.send(queue, 1)
        position = uuid.UUID(sent).time
        letter = DeadLetterRecord(queue, position, b"1", None, None, "no " * 99, "", 1, "", 1)
        app.broker.dead_letters.store(letter)
    shown = on_terminal(
        width, tmp_path, "dead-letters", "--app", "a", "--broker", "sqlite:messages.db"
    )
    assert sent in shown
    assert queue in shown
    assert shown.split().count("no") >= 40
    assert max(map(len, shown.splitlines())) <= max(width, 60)


PLACES = ("--app", "a", "--coordinator", "sqlite:coordination.db")
BROKER = ("--broker", "sqlite:messages.db")


SHOWN: dict[tuple[str, ...], set[str]] = {
    ("peek", "tax-7", "--body", *BROKER): {"DUE", "BODY", "SENT", "KIND"},
    ("peek", "tax-7", "--kind", "delayed", *BROKER): {"DUE", "SENT", "KIND"},
    ("pause", "--list"): {"KIND", "QUEUES", "UNTIL", "WHO", "WHY"},
    ("audit",): {"BY", "COMMAND", "TARGET", "REASON"},
    ("queues", *BROKER): {"STATE", "BACKLOG", "DELAYED", "WHY"},
    ("doctor", *BROKER): {"STATUS", "FOUND", "REMEDY"},
}
"""Commands, and the headings of their tables."""


def test_80_columns_show_each_value(tmp_path: Path) -> None:
    """Values that do not fit are wrapped, or follow below the row; empty columns are left out."""
    pause = ("pause", "tax-*", "--for", "1h", "--allow-none", "--yes", *PLACES)
    reason = "the tax service moves to another host, and its address changes"
    with App("a", broker=f"sqlite:{tmp_path / 'messages.db'}") as app:
        app.send("tax-7", "the name of the customer", delay_seconds=3600)
        app.send("tax-7", 1)
    assert command(*QDO, *pause, "--reason", reason, cwd=tmp_path).code == 0
    for argv, headings in SHOWN.items():
        shown = on_terminal(80, tmp_path, *argv, *PLACES)
        assert headings <= set(shown.split())
        assert not {"KEY", "ATTEMPT", "ERROR"} & set(shown.split())
        assert "…" not in shown
        assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line)
        ended = command(*QDO, *argv, *PLACES, "-o", "json", cwd=tmp_path)
        items = ended.items(1 if argv[0] == "doctor" else 0)
        texts = [str(item.get(key.lower()) or "") for item in items for key in headings]
        assert [word for text in texts for word in text.split() if word not in shown] == []


def test_what_may_not_be_read_is_not_called_empty(tmp_path: Path) -> None:
    """An onlooker of another user gets an error: a monitor must not stay green."""
    held = tmp_path / "held"
    held.mkdir()
    with App("a", broker=f"sqlite:{held / 'messages.db'}") as app:
        app.send("q", 1)
    places = (
        *("--broker", f"sqlite:{held / 'messages.db'}"),
        *("--coordinator", f"sqlite:{held / 'coordination.db'}"),
    )
    held.chmod(0)
    try:
        for words in (("dead-letters", *places[:2]), ("queues", *places), ("workers", *places[2:])):
            ended = command(*QDO, *words, "--app", "a", cwd=tmp_path, preexec=_obey_file_modes)
            assert (ended.code, ended.out) == (3, ""), words
            assert "Permission denied" in ended.err
    finally:
        held.chmod(0o755)


def _obey_file_modes() -> None:
    """Take away from root what lets it read every file: two capabilities, from exec on."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails for others, who need it not


def test_logging_is_configured_for_parent_and_workers(tmp_path: Path) -> None:
    """One file for all of them; a file that cannot be used ends the command before it starts."""
    (tmp_path / "log.json").write_text(
        json.dumps(
            {
                "formatters": {"own": {"format": "OWN %(name)s"}},
                "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "own"}},
                "root": {"handlers": ["err"], "level": "INFO"},
            }
        )
    )
    work = (*WORKER, "--app", "a", "--job", "qdo.programs.echo:job", "--burst", "--log-config")
    ended = command(*work, "log.json", cwd=tmp_path)
    lines = ended.err.splitlines()
    assert (ended.code, [line for line in lines if not line.startswith("OWN ")]) == (0, [])
    for part in ("qdo.worker.supervisor", "qdo.worker.worker"):  # the parent, and a worker
        assert any(part in line for line in lines)
    (tmp_path / "bad.json").write_text('{"handlers": 1}')
    for name in ("missing.json", "bad.json"):
        refused = command(*work, name, cwd=tmp_path)
        assert (refused.code, refused.err.count("\n"), name in refused.err) == (2, 1, True)


def test_commands_run_beside_a_kubernetes_service_named_qdo(tmp_path: Path) -> None:
    """Workers, senders and commands; a typo in a setting is still found."""
    service = {
        "QDO_SERVICE_HOST": "10.0.0.1",
        "QDO_SERVICE_PORT": "80",
        "QDO_PORT": "tcp://10.0.0.1:80",
        "QDO_PORT_80_TCP_ADDR": "10.0.0.1",
        "QDO_WEB_SERVICE_HOST": "10.0.0.2",
    }
    (tmp_path / "k8s.py").write_text(
        "import qdo\napp = qdo.App('k')\n@app.job()\ndef j(message, context):\n"
        "    print('got', message.body, flush=True)\n"
    )
    sent = command("-c", "import k8s; k8s.app.send('x', 1)", cwd=tmp_path, env=service)
    assert (sent.code, sent.err) == (0, "")
    worked = command(*WORKER, "k8s:app", "--burst", cwd=tmp_path, env=service)
    assert (worked.code, worked.out) == (0, "got 1\n")
    typo = command(*QDO, "config", cwd=tmp_path, env={**service, "QDO_BURTS": "1"})
    assert typo.code == 2
    assert "QDO_BURTS" in typo.err


NOT_UTF8 = b"\xff"


@pytest.mark.parametrize(
    "words",
    [
        *[("dead-letters", verb, NOT_UTF8, "1") for verb in ("show", "retry", "discard")],
        ("dead-letters", "list", NOT_UTF8),
        ("dead-letters", "export", NOT_UTF8),
        ("seek", NOT_UTF8, "earliest"),
        ("delete", NOT_UTF8, "--yes"),
        ("queues", "--broker", b"sqlite:" + NOT_UTF8),
        ("send", "q", "--file", NOT_UTF8),
    ],
)
def test_arguments_that_are_not_utf8(tmp_path: Path, words: tuple[str | bytes, ...]) -> None:
    """One line and exit code 2, before anything is opened."""
    ended = run_in(tmp_path, *map(os.fsdecode, words), env={"QDO_APP": "a"})
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert r"'\udcff'" in ended.err or r":\udcff'" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["BROKER", "COORDINATOR"])
def test_a_path_in_the_environment_that_is_not_utf8(tmp_path: Path, place: str) -> None:
    """Commands and workers refuse it alike."""
    env = {"QDO_APP": "a", f"QDO_{place}": os.fsdecode(b"sqlite:" + NOT_UTF8)}
    job = ("--job", "qdo.programs.echo:job", "--burst")
    for argv in ((*QDO, "queues"), (*WORKER, *job)):
        ended = command(*argv, cwd=tmp_path, env=env)
        assert (ended.code, ended.err.count("\n")) == (2, 1), argv
