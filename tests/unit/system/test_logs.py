"""The log of qdo's processes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qdo.errors import SettingsError
from qdo.system import logs as log
from tests.support.fakes.hostile_text import HOSTILE, HOSTILE_NAME, TEXT, unsafe


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_a_line_says_when_how_bad_where_and_what(stream: io.StringIO):
    log.configure("info", stream)
    logging.getLogger("qdo.worker.supervisor.supervisor").info("process %d started", 3)
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z INFO    "
        rf"qdo\.worker\.supervisor\.supervisor\[{os.getpid()}\] process 3 started\n",
        stream.getvalue(),
    )


def test_lines_below_the_level_are_left_out(stream: io.StringIO):
    log.configure("WARNING", stream)
    logging.getLogger("qdo").info("not worth it")
    logging.getLogger("qdo").warning("worth it")
    assert "not worth it" not in stream.getvalue()
    assert "worth it" in stream.getvalue()


def test_configuring_again_does_not_double_the_lines(stream: io.StringIO):
    log.configure("info", stream)
    log.configure("info", stream)
    logging.getLogger("qdo").info("once")
    assert stream.getvalue().count("once") == 1


def test_an_unknown_level_is_refused():
    with pytest.raises(SettingsError, match="'loud'") as caught:
        log.configure("loud")
    assert caught.value.details["name"] == "log_level"


def test_of_kazoo_only_errors_are_shown_unless_debugging(stream: io.StringIO):
    """qdo has a line of its own for each event of a connection."""
    log.configure("info", stream)
    logging.getLogger("kazoo.client").warning("Connection dropped")
    assert stream.getvalue() == ""
    logging.getLogger("kazoo.client").error("Unhandled exception")
    assert "Unhandled exception" in stream.getvalue()
    log.configure("debug", stream)
    logging.getLogger("kazoo.client").info("Connecting to")
    assert "Connecting to" in stream.getvalue()


def test_secrets_of_botocore_are_not_logged_at_debug_level(stream: io.StringIO):
    """Signed requests are at level debug; the place of credentials is logged only in debugging."""
    log.configure("info", stream)
    logging.getLogger("botocore.credentials").info("Found credentials")
    assert stream.getvalue() == ""
    log.configure("debug", stream)
    logging.getLogger("botocore.credentials").info("Found credentials")
    logging.getLogger("botocore.auth").debug("x-amz-security-token:secret")
    logging.getLogger("urllib3.connectionpool").debug("POST /hooks/secret")
    assert "Found credentials" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_a_foreign_line_break_begins_no_log_line(stream: io.StringIO):
    """Messages and tracebacks keep their lines, and all but the first are indented."""
    log.configure("info", stream)
    try:
        raise ValueError(TEXT)
    except ValueError:
        logging.getLogger("qdo").exception("queue %s failed: %s", HOSTILE_NAME, TEXT)
    written = stream.getvalue()
    assert unsafe(written) == set()
    first, *others = written.removesuffix("\n").split("\n")
    assert re.match(r"\d{4}-\d\d-\d\dT", first)
    assert all(line.startswith("    ") for line in others)
    assert "    Traceback (most recent call last):" in others
    assert any(line.startswith("    ValueError: <\\x00\\x01") for line in others)


def test_warnings_of_commands_are_escaped(capsys: pytest.CaptureFixture[str]):
    """Commands configure no log: Python prints their warnings as a last resort."""
    log.escape_last_resort()
    assert logging.lastResort is not None
    record = logging.LogRecord("qdo", logging.WARNING, "", 0, "%s", (HOSTILE,), None)
    logging.lastResort.handle(record)
    written = capsys.readouterr().err
    assert "\\x1b[2J" in written
    assert unsafe(written) == set()


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    """Return the objects of a log in JSON: one in each line."""
    text = stream.getvalue()
    assert text.isascii()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def test_a_record_in_json_has_the_fields_of_a_line(stream: io.StringIO):
    log.configure("info", stream, format="json")
    logging.getLogger("qdo.worker.supervisor.supervisor").info("process %d started", 3)
    (record,) = records(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert record == {
        "level": "info",
        "logger": "qdo.worker.supervisor.supervisor",
        "process": os.getpid(),
        "message": "process 3 started",
    }


@pytest.mark.parametrize(
    ("text", "arguments", "fields"),
    [
        ("%s: lost", ("worker-0000000007",), {"worker": "worker-0000000007"}),
        ("queue %s: 100%% of %d", ("a", 5), {"queue": "a"}),
        ("%d of queue %s, message %s", (1, "a", "m"), {"queue": "a", "message_id": "m"}),
        ("%.2f s: message %s of queue %s", (0.5, "m", "a"), {"queue": "a", "message_id": "m"}),
        (
            "%s: message %s",
            (log.LogSubject.of("w, queue q", queue="q", fence=9), "m"),
            {"fence": 9},
        ),
        ("%d queues, %d messages", (1, 2), {}),
        ("no arguments %s", (), {}),
    ],
)
def test_a_record_in_json_names_what_it_is_about(
    text: str, arguments: tuple[object, ...], fields: dict[str, object]
):
    record = logging.LogRecord("qdo.x", logging.INFO, "", 0, text, arguments, None)
    found = log.fields_of(record)
    assert {**found, **fields} == found
    assert fields or not found


def test_lines_of_qdo_name_the_worker_of_their_process(stream: io.StringIO):
    """Once; in JSON as a field, and another worker that a line names stays."""
    log.configure("info", stream)
    log.name_worker("worker-0000000003")
    try:
        logger = logging.getLogger("qdo.x")
        logger.info("queue %s: no job", "a")
        logger.info("%s: registered", "worker-0000000003")
        logging.getLogger("app").info("mine")
        log.configure("info", stream, format="json")
        logger.info("queue %s: no job", "a")
        logger.info("%s: gone", "worker-0000000007")
    finally:
        log.name_worker("")
    logger.info("step 6")
    *text, own, other, after = stream.getvalue().splitlines()
    assert [line.partition("] ")[2] for line in text] == [
        "worker-0000000003, queue a: no job",
        "worker-0000000003: registered",
        "mine",
    ]
    assert json.loads(own)["worker"] == "worker-0000000003"
    assert json.loads(own)["message"] == "queue a: no job"
    assert json.loads(other)["worker"] == "worker-0000000007"
    assert "worker" not in json.loads(after)


def test_lines_of_others_have_no_fields_of_qdo(stream: io.StringIO):
    log.configure("info", stream, format="json")
    logging.getLogger("app").info("queue %s", "not of qdo")
    assert "queue" not in records(stream)[0]


def test_hostile_text_in_json_stays_in_its_line(stream: io.StringIO):
    """Escaped, so that neither a terminal nor a reader of lines is deceived."""
    log.configure("info", stream, format="json")
    logging.getLogger("qdo").warning("queue %s", HOSTILE_NAME)
    hostile = f"{HOSTILE}\u2028\x85".encode(errors="replace").decode()
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("qdo").exception("%s", hostile)
    first, second = records(stream)
    assert first["message"] == f"queue {HOSTILE_NAME}"
    assert second["message"] == hostile
    assert "ValueError" in second["traceback"]
    # Not logged: pytest cannot pass half of a surrogate pair from process to process.
    record = logging.LogRecord("qdo", logging.INFO, "", 0, "\ud800%s", (HOSTILE,), None)
    assert json.loads(log.JsonFormatter().format(record))["message"] == f"\ud800{HOSTILE}"
    assert unsafe(stream.getvalue()) == unsafe("\n")


def test_a_traceback_in_json_has_a_limited_length(stream: io.StringIO):
    log.configure("info", stream, format="json")
    try:
        raise ValueError("x" * 1_000_000)
    except ValueError:
        logging.getLogger("qdo").exception("failed")
    assert len(records(stream)[0]["traceback"]) < 50_000


def test_a_fault_that_is_retried_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A line for each fault, whatever the number of attempts, and one when it has ended."""
    retries = log.RetryLog(logging.getLogger("qdo.test"), "database a:1/b")
    with caplog.at_level(logging.INFO, "qdo.test"):
        retries.succeeded()
        for fault in ("refused", "refused", "no room", "refused"):
            retries.failed(fault, 2.0)
        retries.succeeded()
        retries.succeeded()
    lines = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert lines == [
        ("WARNING", "refused; retrying every 2 s"),
        ("WARNING", "no room; retrying every 2 s"),
        ("WARNING", "refused; retrying every 2 s"),
        ("INFO", "database a:1/b answers again"),
    ]


class FullPipe:
    """A pipe whose reader does not read, as a stream."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w", encoding="ascii")
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)

    def read(self) -> str:
        """Return what is there; waits for the first byte."""
        return os.read(self._reader, 1 << 20).decode("ascii").lstrip("x")

    def close(self) -> None:
        os.close(self._reader)  # ends a blocked write
        self.stream.close()


@pytest.fixture
def full(stream: io.StringIO) -> Iterator[FullPipe]:
    pipe = FullPipe()
    yield pipe
    pipe.close()


def test_a_reader_that_stops_blocks_no_thread_that_logs(full: FullPipe):
    """It blocked the parent before it killed a blocked worker, and it ignored SIGTERM."""
    log.configure("info", full.stream)
    for number in range(3 * log.WAITING_LINES):
        logging.getLogger("qdo").info("line %d of caf\u00e9", number)
    shown = ""
    while f"line {log.WAITING_LINES}" not in shown:
        shown += full.read()
    logging.getLogger("qdo").info("the end")
    while "the end" not in shown:
        shown += full.read()
    assert "line 0 of caf\\xe9" in shown
    numbers = [int(each) for each in re.findall(r" line (\d+) of", shown)]
    assert numbers == list(range(len(numbers)))
    missing = 3 * log.WAITING_LINES - len(numbers)
    assert f"did not read: {missing} lines are missing here" in shown


class FullDisk:
    """Stands for `os.write` to a file on a disk that has room for some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.written = b""

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        some = data[: self.room]
        self.written += some
        self.room -= len(some)
        return len(some)


@pytest.mark.parametrize("room", [0, 50, 300])
def test_lines_that_a_full_disk_refuses_are_counted(
    room: int, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Once it has room, a line has their number, and one that was cut off gets its end first."""
    disk = FullDisk(room)
    monkeypatch.setattr(log, "os", SimpleNamespace(write=disk.write, getpid=os.getpid))
    with (tmp_path / "log").open("w") as file:
        log.configure("info", file, format="json")
        for number in range(20):
            logging.getLogger("qdo").info("line %d", number)
        logging.getLogger().handlers[0].flush()
        disk.room = 1 << 20
        logging.getLogger("qdo").info("the end")
        logging.getLogger().handlers[0].flush()
        lines = [json.loads(line)["message"] for line in disk.written.decode().splitlines()]
        missing = log.lines_missing()
    assert lines[-1] == "the end"
    assert f": {missing} lines are missing here" in lines[-2]
    assert len(lines) - 2 + missing == 20
    assert lines[:-2] == [f"line {number}" for number in range(20 - missing)]


def test_a_line_is_written_when_the_call_returns(stream: io.StringIO):
    """A process that is killed right after it logged leaves its last line."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        log.configure("info", file)
        logging.getLogger("qdo").info("last words")
        assert b"last words" in os.read(reader, 4096)
        if (pid := os.fork()) == 0:
            logging.getLogger("qdo").info("of a fork")
            os._exit(0)
        os.waitpid(pid, 0)
        assert b"of a fork" in os.read(reader, 4096)
    os.close(reader)
