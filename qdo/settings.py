"""All settings: one frozen object, from TOML file < QDO_* environment < flags.

Each setting is declared once, below, with its type, default, unit, limits and explanation; the
command line, `qdo config`, the sample file and the documentation are made from or tested
against these declarations. Whatever is wrong is said once, at the start, with the place it came
from.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdo import checks
from qdo.checks import Check
from qdo.errors import SettingsError, UnknownSettingError
from qdo.policies import QueuePolicy, read_tables

CONFIG_VARIABLE = "QDO_CONFIG"
"""Names the TOML file when no flag does."""
ENVIRONMENT_PREFIX = "QDO_"
SPECIAL_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        "QDO_CHILD",  # how a parent hands its settings to a worker process
        "QDO_EXECUTOR",  # how a worker process hands them to a job's process
        "QDO_CHURN_DB",  # where workers.churn keeps its totals
        "QDO_REQUIRE_ZOOKEEPER",  # tests fail, not skip, where there is no ZooKeeper
    }
)
"""Variables with our prefix that are no settings."""
SPECIAL_PREFIXES = (
    "QDO_TEST_",  # left to tests
    "QDO_MESSAGE_",  # what workers.shell tells its commands
    "QDO_ARCHIVE_",  # options of workers.archive, which refuses unknown ones itself; as the next
    "QDO_SHELL_",
    "QDO_WEBHOOK_",
)
"""So are all variables that begin with one of these."""

DEFAULT = "default"
"""Origin of a value that nobody set."""

LOG_LEVELS = ("debug", "info", "warning", "error")


def _setting(default: Any, help: str, check: Check | None = None, unit: str = "") -> Any:
    return field(default=default, metadata={"help": help, "check": check, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of qdo; making one checks it.

    Durations are seconds as float. `origins` tells where each value that somebody set came from;
    it takes no part in comparisons. `dataclasses.asdict` gives a form that survives JSON and makes
    the same settings again: so a parent hands them to its children.

    :raises SettingsError: a value is of the wrong type or out of its limits.
    """

    app: str = _setting(
        "", "name of the app: everything of it lives under one znode", checks.app_name
    )
    job: str = _setting(
        "", "the callback for each message, MODULE:FUNCTION; needs `app`", checks.reference
    )
    job_context: str = _setting(
        "",
        "context manager that yields what jobs get as context, MODULE:FUNCTION",
        checks.reference,
    )
    job_failure: str = _setting(
        "", "function told of every failed attempt, MODULE:FUNCTION", checks.reference
    )
    queues: tuple[str, ...] = _setting(
        ("*",),
        "take only queues that match one of these globs: * any text, ? one character, [ab] either",
        checks.some_globs,
    )
    exclude: tuple[str, ...] = _setting(
        (), "leave queues that match one of these globs to other workers", checks.globs
    )
    broker: str = _setting(
        "sqlite:qdo-data/messages.db",
        "where messages live: sqlite:PATH, sqs://REGION/PREFIX?OPTION=VALUE&... or "
        "kinesis://REGION/STREAM?OPTION=VALUE&...",
        checks.broker_url,
    )
    coordinator: str = _setting(
        "sqlite:qdo-data/coordination.db",
        "where shared state lives: sqlite:PATH for one machine, or "
        "zookeeper://HOST:PORT,HOST:PORT/CHROOT",
        checks.coordinator_url,
    )
    namespace: str = _setting(
        "/mozilla/services/qdo", "znode below which every app has its own", checks.namespace
    )
    processes: int = _setting(
        1, "worker processes that qdo-worker runs", checks.between(1, 1024), "processes"
    )
    concurrency: int = _setting(
        100, "jobs that run at once in one process", checks.between(1, 100_000), "jobs"
    )
    executor: str = _setting(
        "greenlet",
        "where jobs run that do not say it themselves: greenlet, thread or process",
        checks.one_of("greenlet", "thread", "process"),
    )
    executor_processes: int = _setting(
        16,
        "child processes that each job with executor 'process' may have in one worker process: "
        "as many of its messages run at once",
        checks.between(1, 1024),
        "processes",
    )
    burst: bool = _setting(False, "end once every queue is empty, instead of waiting for messages")
    reload: bool = _setting(
        False, "for development: restart workers when the app's Python files change"
    )
    max_messages: int = _setting(
        0,
        "end after having started jobs for so many messages, in each process; 0 is no limit",
        checks.between(0, 1_000_000_000),
        "messages",
    )
    max_seconds: float = _setting(
        0.0,
        "end after having run for so long; 0 is no limit",
        checks.between(0, 31_536_000),
        "seconds",
    )
    session_timeout_seconds: float = _setting(
        10.0,
        "after this long without contact the coordinator gives a worker's queues to others; "
        "ZooKeeper may negotiate another value",
        checks.between(0.1, 3600),
        "seconds",
    )
    connect_seconds: float = _setting(
        10.0,
        "how long to try to reach the coordinator at the start; later a worker tries for ever",
        checks.between(0.1, 3600),
        "seconds",
    )
    checkpoint_seconds: float = _setting(
        0.2,
        "how often progress is recorded: after kill -9 at most this much is repeated",
        checks.between(0.001, 3600),
        "seconds",
    )
    drain_seconds: float = _setting(
        30.0,
        "how long running jobs may take to end once a worker is told to stop",
        checks.between(0, 86_400),
        "seconds",
    )
    fetch: int = _setting(
        1000,
        "messages of a queue read from the broker at once",
        checks.between(1, 100_000),
        "messages",
    )
    turn_seconds: float = _setting(
        0.02,
        "how long a queue may keep its place before others get their turn",
        checks.between(0.0001, 60),
        "seconds",
    )
    attempts: int = _setting(
        10,
        "how often a failing message is tried before its policy ends it, by default as a dead "
        "letter",
        checks.between(1, 1_000_000),
        "attempts",
    )
    backoff_seconds: float = _setting(
        0.5,
        "pause before the second attempt; it doubles with each further one",
        checks.between(0, 86_400),
        "seconds",
    )
    backoff_max_seconds: float = _setting(
        60.0, "longest pause between attempts", checks.between(0, 86_400), "seconds"
    )
    policies: tuple[QueuePolicy, ...] = _setting(
        (),
        "what holds for failing messages of some queues: [[policies]] tables with queues (a glob), "
        "attempts, backoff_seconds, backoff_max_seconds, then and [[policies.rules]]",
    )
    retention_seconds: float = _setting(
        604_800.0,
        "how long the broker keeps messages that are done, for replay",
        checks.between(0, 3_153_600_000),
        "seconds",
    )
    doorbell: bool = _setting(
        False,
        "with a broker that must be asked for messages, SQS: senders touch a znode of the queue, "
        "and its worker asks at once",
    )
    log_level: str = _setting("info", "least level that is logged", checks.one_of(*LOG_LEVELS))
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for each in declarations():
            value = _converted(each, getattr(self, each.name), self.origin(each.name))
            object.__setattr__(self, each.name, value)
        if self.backoff_max_seconds < self.backoff_seconds:
            raise SettingsError(
                name="backoff_max_seconds",
                reason=f"{self.backoff_max_seconds:g} is less than backoff_seconds, "
                f"{self.backoff_seconds:g}{_told(self.origin('backoff_max_seconds'))}",
            )

        if "*" in self.exclude or set(self.queues) <= set(self.exclude):
            raise SettingsError(
                name="exclude",
                reason=f"{', '.join(self.exclude)}{_told(self.origin('exclude'))} leaves nothing "
                f"of queues, {', '.join(self.queues)}{_told(self.origin('queues'))}: this worker "
                "would take no queue",
            )

    def origin(self, name: str) -> str:
        """Return where the value of a setting came from, such as "QDO_APP" or "default"."""
        return self.origins.get(name, DEFAULT)

    def values(self) -> dict[str, Any]:
        """Return every setting by name, in the order of declaration."""
        return {each.name: getattr(self, each.name) for each in declarations()}

    def merged(self, values: Mapping[str, Any], origin: str) -> Settings:
        """Return a copy in which `values`, set at `origin`, win over what is here.

        :raises UnknownSettingError: a name is no setting.
        """
        check_names(values, origin)
        origins = {**self.origins, **dict.fromkeys(values, origin)}
        return Settings(**{**self.values(), **values}, origins=origins)

    def underlaid(self, values: Mapping[str, Any], origin: str) -> Settings:
        """Return a copy in which `values` hold wherever nobody set anything.

        :raises UnknownSettingError: a name is no setting.
        """
        check_names(values, origin)
        free = {name: value for name, value in values.items() if name not in self.origins}
        return self.merged(free, origin)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is known about one setting.

    :ivar kind: "str", "int", "float", "bool", "globs" for a tuple of text, or "tables" for what
        only a file can express.
    """

    name: str
    kind: str
    default: Any
    help: str
    unit: str
    check: Check | None

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return "--" + self.name.replace("_", "-")


_KINDS = {"tuple[QueuePolicy, ...]": "tables", "tuple[str, ...]": "globs"}
_declared: dict[str, Declaration] = {}


def declarations() -> Iterable[Declaration]:
    """Return every setting, in the order of declaration."""
    if not _declared:
        for each in dataclasses.fields(Settings):
            if each.metadata:
                kind = _KINDS.get(str(each.type), str(each.type))
                _declared[each.name] = Declaration(
                    each.name, kind, each.default, **_described(each.metadata)
                )
    return _declared.values()


def _described(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: metadata[key] for key in ("help", "unit", "check")}


def check_names(names: Iterable[str], origin: str) -> None:
    """Raise UnknownSettingError for the first name that is no setting."""
    known = [each.name for each in declarations()]
    for name in names:
        if name not in known:
            raise UnknownSettingError(name=name, origin=origin, hint=hint(name, known))


def hint(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest known name, "" when none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# --- loading ----------------------------------------------------------------------


def load(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    defaults_origin: str = DEFAULT,
) -> Settings:
    """Return the settings of this process: TOML file < QDO_* environment < flags.

    :param flags: values from the command line by setting name; None is "not given".
    :param environ: `os.environ` when None.
    :param config: path of a TOML file; else the variable QDO_CONFIG may name one.
    :param defaults: what holds where none of the three says anything.
    :raises UnknownSettingError: with the nearest known name.
    :raises SettingsError: a value is wrong, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = config or environ.get(CONFIG_VARIABLE)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    check_names(given, "flags")
    for name, value, origin in (
        *(_file_values(path) if path else ()),
        *_environment_values(environ),
        *((name, value, "--" + name.replace("_", "-")) for name, value in given.items()),
    ):
        values[name] = value
        origins[name] = origin
    return Settings(**values, origins=origins).underlaid(defaults or {}, defaults_origin)


def _file_values(path: str) -> list[tuple[str, Any, str]]:
    table = _read_toml(path)
    check_names(table, path)
    return [(name, value, path) for name, value in table.items()]


def _read_toml(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(name="config", reason=f"{path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise SettingsError(name="config", reason=f"{path} is no TOML file: {error}") from error


def _environment_values(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    known = {each.variable: each.name for each in declarations()}
    found = []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or _is_special(variable):
            continue
        if variable not in known:
            raise UnknownSettingError(
                name=variable,
                origin="the environment",
                hint=_variable_hint(variable, [*known, *SPECIAL_VARIABLES]),
            )
        found.append((known[variable], environ[variable], variable))
    return found


def _is_special(variable: str) -> bool:
    return variable in SPECIAL_VARIABLES or variable.startswith(SPECIAL_PREFIXES)


def _variable_hint(variable: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(variable.upper(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# --- one value --------------------------------------------------------------------


def _converted(declaration: Declaration, value: Any, origin: str) -> Any:
    """Return `value` in the setting's type; text is parsed, as the environment has only text."""
    if declaration.kind == "tables":
        return _read_tables(declaration.name, value, origin)
    try:
        result = _READERS[declaration.kind](value)
    except (TypeError, ValueError):
        result = None
    if result is None:
        raise SettingsError(
            name=declaration.name,
            reason=f"{value!r} is no {_KIND_NAMES[declaration.kind]}{_told(origin)}",
        )
    fault = declaration.check(result) if declaration.check else None
    if fault:
        unit = f" {declaration.unit}" if declaration.unit else ""
        raise SettingsError(name=declaration.name, reason=f"{fault}{unit}{_told(origin)}")
    return result


def _told(origin: str) -> str:
    return "" if origin == DEFAULT else f" (from {origin})"


def _read_tables(name: str, value: Any, origin: str) -> tuple[QueuePolicy, ...]:
    if isinstance(value, (list, tuple)):
        return read_tables(value, _told(origin))
    raise SettingsError(
        name=name,
        reason=f"tables cannot be written as {value!r}{_told(origin)}, nor in any other way in the "
        f"environment: write [[{name}]] tables into the TOML file ({CONFIG_VARIABLE} names it)",
    )


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_globs(value: Any) -> tuple[str, ...] | None:
    """Read a list of text, or one text with commas, as the environment has it."""
    if isinstance(value, str):
        return tuple(each.strip() for each in value.split(",")) if value else ()
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return None


def _read_int(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return float(value)
    return value if isinstance(value, float) else None


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
    return value if isinstance(value, bool) else None


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _read_str,
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "globs": _read_globs,
}
_KIND_NAMES = {
    "str": "text",
    "int": "whole number",
    "float": "number of seconds",
    "bool": "true or false",
    "globs": "list of globs",
}
