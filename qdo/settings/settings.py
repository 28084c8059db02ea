"""All settings, as one frozen object. Sources: code < TOML file < QDO_* environment < flags.

This module declares each setting once, with its type, default, unit, limits and explanation. The
command line and `qdo config` use these declarations. Tests compare the sample file and the
documentation with the declarations. qdo reports an invalid value once, at startup, with its origin.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdo.brokers.registry import kind_of
from qdo.coordination.znodes.layout import DEFAULT_NAMESPACE
from qdo.encoding import DEFAULT_BODY_BYTES, MAX_STORED_BODY_BYTES
from qdo.errors import SettingsError, UnknownSettingError
from qdo.history.address import history_error
from qdo.jobs.job import Job
from qdo.jobs.policy_tables import QueuePolicy, policy_for
from qdo.jobs.retry import PolicyInForce
from qdo.settings import values as checks
from qdo.settings.values import DEFAULT, Check, Declaration, convert, from_origin
from qdo.system.files import absolute
from qdo.system.logs import FORMATS, LEVELS, LogOptions
from qdo.text import did_you_mean, hide_credentials

_FILE_COORDINATOR = "sqlite:qdo-data/coordination.db"
# Settings that contain file paths.
_FILES = (
    *("coordinator_ca", "coordinator_cert", "coordinator_key", "coordinator_password_file"),
    *("keys", "log_config"),
)
_KINDS = {"tuple[QueuePolicy, ...]": "tables", "tuple[str, ...]": "globs"}
_declared: dict[str, Declaration] = {}


def setting(
    default: Any, help: str, check: Check | None = None, unit: str = "", *, live: bool = False
) -> Any:
    if isinstance(default, float):
        unit = "seconds"
    about = {"help": help, "check": check, "unit": unit, "live": live}
    return field(default=default, metadata=about)


# Declares a setting that may change while processes run (see `qdo.settings.live`).
live_setting = functools.partial(setting, live=True)


def default_coordinator(broker: str) -> str:
    """Return the default coordinator for a broker: the broker's PostgreSQL database, or a file."""
    return broker if broker.startswith("postgresql://") else _FILE_COORDINATOR


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """The first part of `Settings`, which commands and senders also need."""

    app: str = setting(
        "",
        "the app: MODULE:APP, whose settings in code then apply, or only the name of its znode",
        checks.app,
    )
    job: str = setting(
        "",
        "the function to call for each message, MODULE:FUNCTION; needs `app`",
        checks.import_reference,
    )
    job_context: str = setting(
        "",
        "context manager, MODULE:FUNCTION, entered once per worker process; jobs get its value as "
        "context",
        checks.import_reference,
    )
    job_failure: str = setting(
        "",
        "function, MODULE:FUNCTION, called as f(message, context, error) after each failed attempt",
        checks.import_reference,
    )
    queues: tuple[str, ...] = setting(
        ("*",),
        "take only queues that match one of these globs: * any text, ? one character, [ab] either",
        checks.non_empty_globs,
    )
    exclude: tuple[str, ...] = setting(
        (),
        "leave queues that match one of these globs to other workers, even if they match `queues`",
        checks.globs,
    )
    broker: str = setting(
        "sqlite:qdo-data/messages.db",
        "where messages are stored: sqlite:PATH, postgresql://USER@HOST/DATABASE, "
        "sqs://REGION/PREFIX?OPTION=VALUE&... or kinesis://REGION/STREAM?OPTION=VALUE&...",
        checks.broker_url,
    )
    coordinator: str = setting(
        _FILE_COORDINATOR,
        "where shared state is stored: sqlite:PATH for one machine, "
        "postgresql://USER@HOST/DATABASE, or zookeeper://HOST:PORT,HOST:PORT/CHROOT; without, the "
        "broker's database if it is PostgreSQL",
        checks.coordinator_url,
    )
    coordinator_ca: str = setting(
        "", "PEM file with the certificate authorities of ZooKeeper's servers; turns TLS on"
    )
    coordinator_cert: str = setting(
        "", "PEM file with this client's certificate; needs `coordinator_key`"
    )
    coordinator_key: str = setting(
        "", "PEM file with the private key of `coordinator_cert`, without a password"
    )
    coordinator_verify: str = setting(
        "host",
        "what a server's certificate must fit: host, the host in the address and `coordinator_ca`, "
        "or ca, only `coordinator_ca`",
        checks.one_of("host", "ca"),
    )
    coordinator_auth: str = setting(
        "", "account at the coordinator: digest:NAME or sasl:NAME; needs a password", checks.account
    )
    coordinator_password_file: str = setting(
        "",
        "file with the password of this account, in one line; the variable "
        "QDO_COORDINATOR_PASSWORD overrides it",
    )
    acl: str = setting(
        "open",
        "rights on new nodes: open, all for every account; account, by role; required, by role, "
        "and workers refuse nodes that others can change",
        checks.one_of("open", "account", "required"),
    )
    acl_workers: tuple[str, ...] = setting(
        (),
        "accounts with all rights: sasl:NAME, digest:NAME:HASH or x509:SUBJECT; without, this "
        "client's own account",
        checks.accounts,
    )
    acl_operators: tuple[str, ...] = setting(
        (), "accounts that may read all nodes, seek, pause and delete queues", checks.accounts
    )
    acl_monitors: tuple[str, ...] = setting((), "accounts that may read all nodes", checks.accounts)
    acl_senders: tuple[str, ...] = setting(
        (), "accounts that may notify the owners of queues (`doorbell`)", checks.accounts
    )
    group: str = setting(
        "", "group of users that share new files of broker and coordinator; without, only this user"
    )
    namespace: str = setting(
        DEFAULT_NAMESPACE, "znode below which every app has its own znode", checks.namespace
    )
    keys: str = setting(
        "",
        "file with keys, made with `qdo admin keys`; senders, workers and `qdo dead-letters` need "
        "it for encrypted bodies, and read it again when it changes",
    )
    encrypt: tuple[str, ...] = setting(
        (), "what senders encrypt with the first key of `keys`: bodies", checks.some_of("bodies")
    )
    require_encryption: bool = setting(
        False, "workers treat a body in clear as one that cannot be decoded; needs `keys`"
    )
    hide: tuple[str, ...] = setting(
        (),
        "what workers keep out of znodes: errors (the text after the kind of an error), hosts",
        checks.some_of("errors", "hosts"),
    )


@dataclass(frozen=True, kw_only=True)
class Settings(AppSettings):
    """Every setting of qdo. The constructor checks the values.

    Durations are seconds as float. `origins` records the origin of each explicitly set value.
    Comparisons ignore `origins`. A parent passes its settings to its children as
    `dataclasses.asdict`. The result survives JSON and makes equal settings.

    :raises SettingsError: a value has the wrong type or is out of range.
    """

    zone: str = setting(
        "",
        "where this process runs, such as a data center: at most 100 letters, digits, ., - and _; "
        "`qdo workers --all` and `App.owner` show it",
        checks.zone,
    )
    address: str = setting(
        "",
        "where this process answers questions about its queues, such as host:port; qdo does not"
        " use it, `App.owner` shows it",
        checks.address,
    )
    processes: int = setting(
        1,
        "number of worker processes that qdo-worker runs; each uses at most one core",
        checks.between(1, 1024),
        "processes",
    )
    concurrency: int = setting(
        100,
        "maximum number of jobs that run at the same time in one process, each for another queue",
        checks.between(1, 100_000),
        "jobs",
    )
    executor: str = setting(
        "greenlet",
        "where jobs run that do not specify it themselves: greenlet, thread or process",
        checks.one_of("greenlet", "thread", "process"),
    )
    executor_processes: int = setting(
        16,
        "child processes that each job with executor 'process' may have in one worker process; "
        "at most this many of its messages run at the same time",
        checks.between(1, 1024),
        "processes",
    )
    burst: bool = setting(
        False, "exit when every queue is empty; delayed, blocked and jobless messages do not count"
    )
    reload: bool = setting(
        False, "for development: restart workers when the app's Python files change"
    )
    max_messages: int = setting(
        0,
        "stop after starting jobs for this many messages, in each process; every attempt counts, "
        "and the last batch is not split; 0 means no limit",
        checks.between(0, 1_000_000_000),
        "messages",
    )
    max_seconds: float = setting(
        0.0,
        "drain after running for this long, in each process; 0 means no limit",
        checks.between(0, 31_536_000),
    )
    session_timeout_seconds: float = setting(
        10.0,
        "after this long without contact, the coordinator gives a worker's queues to others; "
        "ZooKeeper may grant another value",
        checks.between(0.1, 3600),
    )
    connect_seconds: float = setting(
        10.0,
        "how long to try to reach the broker and the coordinator at startup, before exit code 3; "
        "after registering once, a worker retries forever",
        checks.between(0.1, 3600),
    )
    checkpoint_seconds: float = setting(
        0.2,
        "how often progress is recorded, less often while the coordinator is slow; after a crash, "
        "about this much is repeated",
        checks.between(0.001, 3600),
    )
    drain_seconds: float = setting(
        30.0,
        "how long running jobs may take to finish after a worker receives a stop signal",
        checks.between(0, 86_400),
    )
    fetch: int = live_setting(
        1000,
        "maximum number of messages of a queue read from the broker at once",
        checks.between(1, 100_000),
        "messages",
    )
    turn_seconds: float = live_setting(
        0.02,
        "how long a queue may run before waiting queues get their turn; no running job is "
        "interrupted",
        checks.between(0.0001, 60),
    )
    attempts: int = live_setting(
        20,
        "number of attempts for a failing message before its policy ends it, by default as a dead "
        "letter",
        checks.between(1, 1_000_000),
        "attempts",
    )
    backoff_seconds: float = live_setting(
        0.5,
        "pause before the second attempt; it doubles with each further attempt",
        checks.between(0, 86_400),
    )
    backoff_max_seconds: float = live_setting(
        600.0,
        "longest pause between attempts; at least `backoff_seconds`",
        checks.between(0, 86_400),
    )
    policies: tuple[QueuePolicy, ...] = live_setting(
        (),
        "rules for failing messages of some queues: [[policies]] tables with queues (a glob), "
        "attempts, backoff_seconds, backoff_max_seconds, then and [[policies.rules]], which may "
        "have counts = false; only in the TOML file and in code",
    )
    retention_seconds: float = live_setting(
        604_800.0,
        "how long the broker keeps completed messages, for replay, counted from when they were "
        "sent; others are never deleted",
        checks.between(0, 3_153_600_000),
    )
    dead_letter_limit: int = live_setting(
        0,
        "the most dead letters that a queue keeps; its owner deletes older ones; 0 means no limit; "
        "not with SQS and Kinesis",
        checks.between(0, 1_000_000_000),
        "dead letters",
    )
    dead_letter_retention_seconds: float = live_setting(
        0.0,
        "how long dead letters are kept; the queue's owner deletes older ones; 0 means forever; "
        "not with SQS and Kinesis",
        checks.between(0, 3_153_600_000),
    )
    max_queues: int = setting(
        100_000,
        "the most queues that the app may have; a message for another one is refused; for senders "
        "and workers",
        checks.between(1, 10_000_000),
        "queues",
    )
    max_body_bytes: int = setting(
        DEFAULT_BODY_BYTES,
        "largest body that senders accept and workers decode, at most 64 MiB; 256 KiB with SQS and "
        "1 MiB with Kinesis, unless their addresses allow more",
        checks.between(1, MAX_STORED_BODY_BYTES),
        "bytes",
    )
    history: str = setting(
        "",
        "where workers record what they did, for `qdo history`: sqlite:PATH or "
        "postgresql://USER@HOST/DATABASE; without, nowhere; needs pip install 'qdo-queues[sql]'",
        history_error,
    )
    http: str = setting(
        "",
        "address at which qdo-worker serves /metrics, /healthz and /readyz: HOST:PORT or "
        "[IPV6]:PORT; without, nowhere; it has no password; "
        "needs pip install 'qdo-queues[metrics]'",
        checks.listen_address,
    )
    doorbell: bool = setting(
        False,
        "for polled brokers (SQS): senders notify the queue's owner through a znode, and it polls "
        "at once; for senders, which must reach the coordinator, and workers",
    )
    log_level: str = live_setting(
        "info", "lowest level that is logged: debug, info, warning or error", checks.one_of(*LEVELS)
    )
    log_format: str = setting(
        "text",
        "how lines of the log are written: text, or json, one object for each record; for the "
        "parent process, workers and the processes of jobs",
        checks.one_of(*FORMATS),
    )
    log_config: str = setting(
        "",
        "JSON file with a configuration for Python's logging (dictConfig), for the parent process "
        "and all workers",
    )
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for each in declarations():
            value = convert(each, getattr(self, each.name), self.origin(each.name))
            object.__setattr__(self, each.name, value)
        if "coordinator" not in self.origins and self.coordinator == _FILE_COORDINATOR:
            object.__setattr__(self, "coordinator", default_coordinator(self.broker))
        if self.backoff_max_seconds < self.backoff_seconds:
            raise SettingsError(
                name="backoff_max_seconds",
                reason=f"it must be at least backoff_seconds, {self.backoff_seconds:g}, got "
                f"{self.backoff_max_seconds:g}{from_origin(self.origin('backoff_max_seconds'))}",
            )
        for name in ("encrypt", "require_encryption"):
            if getattr(self, name) and not self.keys:
                raise SettingsError(
                    name=name,
                    reason=f"it needs the setting keys{from_origin(self.origin(name))}; make a "
                    "key file with `qdo admin keys new`",
                )
        for name in ("dead_letter_limit", "dead_letter_retention_seconds"):
            if getattr(self, name) and (remedy := kind_of(self.broker).dead_letter_remedy):
                raise SettingsError(name=name, reason=f"{remedy}{from_origin(self.origin(name))}")
        if "*" in self.exclude or set(self.queues) <= set(self.exclude):
            raise SettingsError(
                name="exclude",
                reason=f"{', '.join(self.exclude)}{from_origin(self.origin('exclude'))} excludes "
                f"every queue of {', '.join(self.queues)}{from_origin(self.origin('queues'))}; "
                "this worker would take no queue",
            )

    def origin(self, name: str) -> str:
        """Return the origin of a setting's value, such as "QDO_APP" or "default"."""
        return self.origins.get(name, DEFAULT)

    @property
    def target(self) -> str:
        """The app as MODULE:APP, or "" if the setting `app` is only a name."""
        return self.app if ":" in self.app else ""

    @property
    def logging(self) -> LogOptions:
        return LogOptions(self.log_level, self.log_config, self.log_format)

    @property
    def default_policy(self) -> PolicyInForce:
        """The policy of queues for which neither the job nor the settings have a policy."""
        return PolicyInForce(self.attempts, self.backoff_seconds, self.backoff_max_seconds)

    def scope(self, app: str) -> str:
        """Return the key of an app in a shared table, with any namespace other than the default."""
        space = self.namespace.rstrip("/")
        return app if space == DEFAULT_NAMESPACE else f"{space}/{app}"

    def policy_of(self, queue: str, job: Job | None) -> PolicyInForce:
        own = None if job is None else job.policy
        return policy_for(queue, own, self.policies, self.default_policy)

    def values(self) -> dict[str, Any]:
        """Return every setting by name, in the order of declaration."""
        return {each.name: getattr(self, each.name) for each in declarations()}

    def digest(self) -> str:
        """Return a short text that identifies equal settings."""
        # Exclude passwords in addresses, because a reader who knows the other settings could guess
        # them.
        values = {
            name: hide_credentials(value) if isinstance(value, str) else value
            for name, value in dataclasses.asdict(self).items()
            if name != "origins"
        }
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def merged(self, values: Mapping[str, Any], origin: str) -> Settings:
        """Return a copy in which `values`, set at `origin`, override the present values."""
        check_names(values, origin)
        if not values:
            return self  # saves a check that takes 0.1 ms, of 4 ms for a test with a kit
        origins = {**self.origins, **dict.fromkeys(values, origin)}
        merged = {**self.values(), **values}
        if "coordinator" not in origins and self.coordinator == default_coordinator(self.broker):
            merged["coordinator"] = _FILE_COORDINATOR  # the default depends on the broker
        return Settings(**merged, origins=origins)

    def anchored(self) -> Settings:
        """Return a copy with absolute paths, because a job may change the current folder."""
        addresses = ("broker", "coordinator", "history")
        found: dict[str, Any] = {name: absolute(getattr(self, name)) for name in addresses}
        found |= {name: os.path.abspath(path) for name in _FILES if (path := getattr(self, name))}
        return dataclasses.replace(self, **found)

    def underlaid(self, values: Mapping[str, Any], origin: str) -> Settings:
        """Return a copy in which `values` replace default values."""
        check_names(values, origin)
        free = {name: value for name, value in values.items() if name not in self.origins}
        return self.merged(free, origin)

    def overridden(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `values` that differ from the current values."""
        other = Settings(**values).values()
        return {name: other[name] for name in values if other[name] != getattr(self, name)}


def code_origin(app: str) -> str:
    return f"App({app!r})"


def declarations() -> Iterable[Declaration]:
    if not _declared:
        for each in dataclasses.fields(Settings):
            if each.metadata:
                kind = _KINDS.get(str(each.type), str(each.type))
                _declared[each.name] = Declaration(each.name, kind, each.default, **each.metadata)
    return _declared.values()


def check_names(names: Iterable[str], origin: str) -> None:
    """Raise UnknownSettingError for the first name that is not the name of a setting."""
    known = [each.name for each in declarations()]
    for name in names:
        if name not in known:
            hint = did_you_mean(name.lower(), known)
            raise UnknownSettingError(name=name, origin=origin, hint=hint)
