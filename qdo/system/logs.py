"""Logging of qdo's processes: lines of text or JSON on stderr."""

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
# The handler of `configure`. A second call replaces it.
_HANDLER_NAME = "qdo.system.logs"
# Indentation of all lines of a record except the first line.
_INDENT = "    "
# Maximum number of lines that wait for a reader of the stream. The handler drops further lines.
WAITING_LINES = 1000
# Maximum time for which a thread waits until its line is written. After a timeout, no thread waits
# before the stream's reader reads again.
PATIENCE_SECONDS = 0.05
FLUSH_SECONDS = 1.0
_PLACEHOLDER = re.compile(r"%%|(?:\b(queue|message|fence) )?%[-+# 0]*[\d.]*[a-zA-Z]")
_FIELDS = {"queue": "queue", "message": "message_id", "fence": "fence"}
_WORKER = re.compile(r"worker-\d{10}")
_log = logging.getLogger(__name__)


class _Process:
    worker = ""


def name_worker(name: str) -> None:
    """Name the worker in each later line of qdo in this process; "" means no worker."""
    _Process.worker = name


def _is_of_qdo(record: logging.LogRecord) -> bool:
    return record.name.startswith("qdo.")


class LineFormatter(logging.Formatter):
    """Limits the length of tracebacks, and escapes control characters of terminals.

    A line of qdo begins with the worker of this process, unless the line names a worker. Handlers
    that a `log_config` defines can use this formatter.
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
    """Logs the beginning, each change and the end of a fault that the caller retries."""

    def __init__(self, logger: logging.Logger, place: str) -> None:
        self._logger = logger
        self._place = place
        self._fault = ""

    def failed(self, fault: object, seconds: float) -> None:
        """Log a new or changed fault. The caller tries again in `seconds`."""
        text = str(fault)
        if text != self._fault:
            self._fault = text
            self._logger.warning("%s; retrying every %g s", text, seconds)

    def succeeded(self) -> None:
        """Log the end of the fault, if there was a fault."""
        if self._fault:
            self._fault = ""
            self._logger.info("%s answers again", self._place)


class LogSubject(str):
    """The subject of a log line, as text and as fields for JSON.

    :ivar fields: fields such as ``{"worker": "worker-0000000001", "queue": "a"}``.
    """

    fields: Mapping[str, object]

    @classmethod
    def of(cls, text: str, **fields: object) -> LogSubject:
        """Return a text with fields."""
        subject = cls(text)
        subject.fields = fields
        return subject


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the worker, queue, message and fence that a line of qdo names."""
    found: dict[str, object] = {}
    arguments = iter(record.args if isinstance(record.args, tuple) else ())
    for placeholder in _PLACEHOLDER.finditer(record.msg if isinstance(record.msg, str) else ""):
        value = None if placeholder[0] == "%%" else next(arguments, None)
        if isinstance(value, LogSubject):
            found.update(value.fields)
        elif isinstance(value, str) and placeholder[1]:
            found.setdefault(_FIELDS[placeholder[1]], value)
        elif isinstance(value, str) and _WORKER.fullmatch(value):
            found.setdefault("worker", value)
    if _Process.worker:
        found.setdefault("worker", _Process.worker)
    return found


class JsonFormatter(logging.Formatter):
    """Writes each record as a JSON object on one line, in ASCII.

    Handlers that a `log_config` defines can use this formatter.
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
    """Writes lines to a descriptor on a separate thread. A stopped reader blocks no other thread.

    If a thread wrote to a pipe whose reader has stopped, the thread would block. With it would
    block an event loop, or a parent that must stop its workers. Usually the line has been written
    when `emit` returns, so the last line before a crash is not lost. The base class writes to a
    stream without a descriptor.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._lines = inbox()
        self._pid = 0
        self._stuck = False
        self._dropped = 0  # number of dropped lines, because too many lines waited
        self._refused = 0  # number of lines that could not be written, for example to a full disk
        self._told = 0
        self._reason = ""
        self._rest = b""

    @property
    def missing(self) -> int:
        """Number of lines that are missing in the log."""
        return self._dropped + self._refused

    def createLock(self) -> None:
        """Create a lock between native threads. gevent's locks do not work between event loops."""
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
        """Wait for a limited time until the waiting lines are written."""
        if self._pid == os.getpid() and not self._lines.empty():
            self._put(-1, b"", FLUSH_SECONDS)
        elif not self._pid and self.stream is not None:
            super().flush()

    def close(self) -> None:
        """End the thread after it has written all lines. A later line starts another thread."""
        if self._pid == os.getpid():
            self._pid = 0
            self._lines.put(None)
        super().close()

    def _write(self, fd: int, data: bytes) -> None:
        if not self._pid:
            try:
                start_thread(self._run)
                self._pid = os.getpid()
            except RuntimeError:  # the system cannot start more threads
                self._write_line(fd, data, self._dropped)
                return
        if self._pid != os.getpid():  # a forked child does not have the thread
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
        """Write the rest of a truncated line, the number of missing lines, and then this line."""
        if not data:
            return  # `flush` only waits for earlier lines
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
        """Write a line and keep an unwritten rest; return False if nothing was written."""
        rest = self._write_all(fd, data)
        self._rest = rest if len(rest) < len(data) else b""
        return len(rest) < len(data)

    def _write_all(self, fd: int, data: bytes) -> bytes:
        """Write to a descriptor, which may block. After an error, return the unwritten rest."""
        try:
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:  # another process made the stream nonblocking
                    sleep(PATIENCE_SECONDS)
        except OSError as error:
            self._reason = f"the log cannot be written ({describe(error)})"
        return data


def lines_missing() -> int:
    """Return the number of lines that are missing in the log of this process."""
    handlers = logging.getLogger().handlers
    return sum(each.missing for each in handlers if isinstance(each, PatientHandler))


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a process logs (see `configure`)."""

    level: str = "info"
    config: str = ""
    format: str = "text"


def set_up(options: LogOptions) -> None:
    configure(options.level, config=options.config, format=options.format)


def configure(
    level: str = "info", stream: TextIO | None = None, config: str = "", format: str = "text"
) -> None:
    """Write the log of this process to `stream` (default: stderr), at `level` or above.

    Times are in UTC, so operators can sort lines of several hosts.

    :param config: JSON file for `logging.config.dictConfig`, applied after the other parameters.
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
    """Log at this level of `LEVELS` or above; return a function that undoes the change."""
    # qdo logs each event of kazoo itself. At debug, botocore logs every request that it signs, with
    # the security token of temporary credentials.
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
    # At debug, urllib3 logs every path with its query. Queries of webhook addresses may contain
    # secrets.
    logging.getLogger("urllib3").setLevel(logging.INFO)
    return partial(apply, before)


def enable_again(where: str) -> None:
    """Enable qdo's loggers again if an app's code (`where`) disabled them, and log a warning."""
    # By default, `logging.config` disables all existing loggers. Keep the app's handlers, because
    # the app may need qdo's lines in its own log.
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
    """Use `LineFormatter` in a process without a logging configuration, such as a command."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())


def _apply(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            given = json.load(file)
        from logging.config import dictConfig

        dictConfig({"version": 1, "disable_existing_loggers": False, **given})
    except Exception as error:
        # Also catch errors from the constructors of handlers and formatters.
        raise SettingsError(
            name="log_config", reason=f"cannot use {path}: {describe(error)}"
        ) from error
