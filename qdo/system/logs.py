"""Logging of qdo's processes: lines on stderr, text or JSON, the same for parents and children."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from qdo.errors import SettingsError
from qdo.system.native import inbox, native_lock, native_rlock, sleep, start_thread
from qdo.text import describe, describe_traceback, iso_time, printable_lines

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s[%(process)d] %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
# The handler that `configure` adds, and replaces when it is called again.
_HANDLER_NAME = "qdo.system.logs"
# Before each further line of a record: only a record of its own begins at the left margin.
_INDENT = "    "
# Lines that wait for a reader of the stream; further ones are dropped.
WAITING_LINES = 1000
# How long a thread waits until its line is written. After that no thread waits, until the reader of
# the stream has read again.
PATIENCE_SECONDS = 0.05
FLUSH_SECONDS = 1.0
_PLACEHOLDER = re.compile(r"%%|(?:\b(queue|message|fence) )?%[-+# 0]*[\d.]*[a-zA-Z]")
_FIELDS = {"queue": "queue", "message": "message_id", "fence": "fence"}
_WORKER = re.compile(r"worker-\d{10}")
_log = logging.getLogger(__name__)


class _Process:
    worker = ""


def name_worker(name: str) -> None:
    """Let each later line of qdo in this process name its worker, "" for none."""
    _Process.worker = name


def _is_of_qdo(record: logging.LogRecord) -> bool:
    return record.name.startswith("qdo.")


class LineFormatter(logging.Formatter):
    """Limits the length of tracebacks, and escapes characters that a terminal would interpret.

    A line of qdo begins with the worker of this process, unless it names one itself. Handlers that
    a `log_config` defines can name it as their formatter.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record), _INDENT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        worker = _Process.worker
        if worker and _is_of_qdo(record) and worker not in record.message:
            record.message = f"{worker}, {record.message}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        error = ei[1]
        return super().formatException(ei) if error is None else describe_traceback(error).rstrip()


class RetryLog:
    """Logs a fault that is retried: when it begins or changes, and when it has ended."""

    def __init__(self, logger: logging.Logger, place: str) -> None:
        self._logger = logger
        self._place = place
        self._fault = ""

    def failed(self, fault: object, seconds: float) -> None:
        """Log a fault unless the last attempt had the same; the next follows in `seconds`."""
        text = str(fault)
        if text != self._fault:
            self._fault = text
            self._logger.warning("%s; retrying every %g s", text, seconds)

    def succeeded(self) -> None:
        """Log that the fault has ended, if there was one."""
        if self._fault:
            self._fault = ""
            self._logger.info("%s answers again", self._place)


class LogPlace(str):
    """What a line is about, as its text, and as fields for JSON.

    :ivar fields: such as ``{"worker": "worker-0000000001", "queue": "a"}``.
    """

    fields: Mapping[str, object]

    @classmethod
    def of(cls, text: str, **fields: object) -> LogPlace:
        """Return a text with fields."""
        place = cls(text)
        place.fields = fields
        return place


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return worker, queue, message and fence of a line of qdo, as far as it names them."""
    found: dict[str, object] = {}
    arguments = iter(record.args if isinstance(record.args, tuple) else ())
    for place in _PLACEHOLDER.finditer(record.msg if isinstance(record.msg, str) else ""):
        value = None if place[0] == "%%" else next(arguments, None)
        if isinstance(value, LogPlace):
            found.update(value.fields)
        elif isinstance(value, str) and place[1]:
            found.setdefault(_FIELDS[place[1]], value)
        elif isinstance(value, str) and _WORKER.fullmatch(value):
            found.setdefault("worker", value)
    if _Process.worker:
        found.setdefault("worker", _Process.worker)
    return found


class JsonFormatter(logging.Formatter):
    """Writes each record as one JSON object in one line, of ASCII characters only.

    Handlers that a `log_config` defines can name it as their formatter.
    """

    def format(self, record: logging.LogRecord) -> str:
        second = iso_time(record.created) or ""
        line: dict[str, object] = {
            "time": f"{second.removesuffix('Z')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if _is_of_qdo(record):
            line |= fields_of(record)
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = describe_traceback(record.exc_info[1]).rstrip()
        return json.dumps(line, default=str)


class PatientHandler(logging.StreamHandler):  # type: ignore[type-arg] # generic from 3.11 on
    """Writes lines to a descriptor, on a thread of its own: a reader that stops blocks no other.

    A pipe whose reader has stopped would block the thread that logs: a parent that cannot kill or
    stop its workers, or an event loop. A line is usually written when `emit` returns, so the last
    line before a crash is there. A stream without a descriptor is written as by its base class.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._lines = inbox()
        self._pid = 0
        self._stuck = False
        self._dropped = 0  # lines that found no room among those that wait
        self._refused = 0  # lines that could not be written, as on a full disk
        self._told = 0
        self._reason = ""
        self._rest = b""

    @property
    def missing(self) -> int:
        """How many lines are missing in the log."""
        return self._dropped + self._refused

    def createLock(self) -> None:
        """Lock between native threads: gevent's locks do not work between event loops."""
        super().createLock()
        self.lock = native_rlock()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fd = self.stream.fileno()
        except (AttributeError, OSError, ValueError):
            super().emit(record)
            return
        if self._lines.qsize() >= WAITING_LINES:
            self._dropped += 1
            self._reason = "the reader of the log did not read"
            return
        try:
            line = self.format(record) + self.terminator
        except Exception:  # noqa: BLE001 - an argument may be of any class
            self.handleError(record)
            return
        self._write(fd, line.encode(self.stream.encoding or "utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Wait for the lines that wait, though not forever."""
        if self._pid == os.getpid() and not self._lines.empty():
            self._put(-1, b"", FLUSH_SECONDS)
        elif not self._pid and self.stream is not None:
            super().flush()

    def close(self) -> None:
        """End the thread once it has written all lines; a later line starts another one."""
        if self._pid == os.getpid():
            self._pid = 0
            self._lines.put(None)
        super().close()

    def _write(self, fd: int, data: bytes) -> None:
        if not self._pid:
            try:
                start_thread(self._run)
                self._pid = os.getpid()
            except RuntimeError:  # the system has no more threads
                self._write_line(fd, data, self._dropped)
                return
        if self._pid != os.getpid():  # a fork has no such thread
            self._write_line(fd, data, self._dropped)
        else:
            self._put(fd, data, 0.0 if self._stuck else PATIENCE_SECONDS)

    def _put(self, fd: int, data: bytes, seconds: float) -> None:
        done = native_lock()
        done.acquire()
        self._lines.put((fd, data, self._dropped, done))
        if seconds:
            self._stuck = not done.acquire(timeout=seconds)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            fd, data, dropped, done = line
            self._write_line(fd, data, dropped)
            self._stuck = False
            done.release()

    def _write_line(self, fd: int, data: bytes, dropped: int) -> None:
        """Write a line, after the rest of a truncated line and the count of missing lines."""
        if not data:
            return  # `flush` only waits for the lines before
        self._rest = self._write_all(fd, self._rest)
        missing = dropped + self._refused - self._told
        if missing and not self._rest and self._begin(fd, self._line_of(missing)):
            self._told += missing
            missing = 0
        if missing or self._rest or not self._begin(fd, data):
            self._refused += 1

    def _line_of(self, missing: int) -> bytes:
        text = "%s: %d lines are missing here"
        values = (self._reason, missing)
        record = _log.makeRecord(_log.name, logging.WARNING, __file__, 0, text, values, None)
        return (self.format(record) + self.terminator).encode("utf-8", "backslashreplace")

    def _begin(self, fd: int, data: bytes) -> bool:
        """Write a line; return whether at least its begin is written. Its end then comes later."""
        rest = self._write_all(fd, data)
        self._rest = rest if len(rest) < len(data) else b""
        return len(rest) < len(data)

    def _write_all(self, fd: int, data: bytes) -> bytes:
        """Write to a descriptor, which may block; return what it refuses, as a full disk does."""
        try:
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:  # another process has set it so
                    sleep(PATIENCE_SECONDS)
        except OSError as error:
            self._reason = f"the log cannot be written ({describe(error)})"
        return data


def lines_missing() -> int:
    """Return how many lines are missing in the log of this process."""
    handlers = logging.getLogger().handlers
    return sum(each.missing for each in handlers if isinstance(each, PatientHandler))


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a process logs, see `configure`."""

    level: str = "info"
    config: str = ""
    format: str = "text"


def set_up(options: LogOptions) -> None:
    configure(options.level, config=options.config, format=options.format)


def configure(
    level: str = "info", stream: TextIO | None = None, config: str = "", format: str = "text"
) -> None:
    """Write the log of this process, from `level` up, to `stream` (default: stderr).

    Times are UTC: the lines of several hosts can be sorted.

    :param config: JSON file for `logging.config.dictConfig`, which then applies on top.
    :raises SettingsError: the level does not exist, or the file cannot be used.
    """
    if level.lower() not in LEVELS:
        reason = f"must be one of {', '.join(LEVELS)}, got {level!r}"
        raise SettingsError(name="log_level", reason=reason)
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.name == _HANDLER_NAME]:
        root.removeHandler(old)
        old.close()
    handler = PatientHandler(stream)
    handler.name = _HANDLER_NAME
    formatter: logging.Formatter = JsonFormatter()
    if format == "text":
        formatter = LineFormatter(_FORMAT, _DATE_FORMAT)
        formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root.addHandler(handler)
    set_level(level)
    if config:
        _apply(config)


def set_level(level: str) -> Callable[[], None]:
    """Log from this level up, one of `LEVELS`; return a function that undoes it."""
    # qdo has its own line for each event of kazoo. Below info, botocore logs every request that it
    # signs, with the security token of temporary credentials.
    is_debug = level.lower() == "debug"
    kazoo = logging.NOTSET if is_debug else logging.ERROR
    botocore = logging.INFO if is_debug else logging.WARNING
    loggers = [logging.getLogger(name) for name in (None, "kazoo", "botocore")]
    before = [each.level for each in loggers]
    levels = (logging.getLevelName(level.upper()), kazoo, botocore)

    def apply(wanted: Iterable[int]) -> None:
        for logger, each in zip(loggers, wanted, strict=True):
            logger.setLevel(each)

    apply(levels)
    # At debug it logs every path with its query, where addresses of webhooks have their secrets.
    logging.getLogger("urllib3").setLevel(logging.INFO)
    return partial(apply, before)


def enable_again(where: str) -> None:
    """Let qdo's loggers log after code of an app, `where`, has run; say if it had silenced them."""
    # `logging.config` disables all loggers that exist, unless it is told not to. The handlers of
    # the app stay in force: it may want qdo's lines among its own.
    known = list(logging.root.manager.loggerDict.items())
    silenced = [each for name, each in known if name.partition(".")[0] == "qdo"]
    disabled = [each for each in silenced if isinstance(each, logging.Logger) and each.disabled]
    for each in disabled:
        each.disabled = False
    if disabled:
        _log.warning(
            "%s has disabled the loggers of qdo, which are enabled again; their lines go to the"
            " handlers that it has configured: give logging.config disable_existing_loggers=False",
            where,
        )


def escape_last_resort() -> None:
    """Format the warnings of a process that configures no log, such as a command."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())


def _apply(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            given = json.load(file)
        from logging.config import dictConfig

        dictConfig({"version": 1, "disable_existing_loggers": False, **given})
    except Exception as error:
        # Catch the errors of the constructors of handlers and formatters, too.
        raise SettingsError(
            name="log_config", reason=f"cannot use {path}: {describe(error)}"
        ) from error
