"""Collects what other programs rely on: JSON, options, columns of tables, SQL.

``python -m tests.golden.published`` writes ``tests/golden/published.txt``, from commands and pages
that run in this process on the app of `tests.golden.filled`, from declared options, and from the
tables that were made. A change is then one diff that a person can read.

A key has the types that its values have in this app: one that is only null may have others, and the
items of a list that was always empty have "nothing".
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import pkgutil
import re
import shlex
import sqlite3
import string
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import click

import qdo.cli.commands
import qdo.programs
from qdo.brokers.registry import BrokerSchema
from qdo.cli import changing, output
from qdo.cli.framework import run
from qdo.cli.main import qdo as qdo_command
from qdo.cli.worker import worker as worker_command
from qdo.postgresql.schema import FORMAT, script
from qdo.settings.settings import declarations
from qdo.worker.metrics.monitor import Monitor
from tests.golden.filled import filled
from tests.support.cli import clean_environment
from tests.support.commands import every_command
from tests.support.dashboard.shop import Visitor
from tests.support.paths import ROOT
from tests.support.postgresql.schema import frozen
from tests.support.processes import wait_until

GOLDEN = ROOT / "tests" / "golden" / "published.txt"
RELEASED = 0  # the newest format that a release has; its text stays as it is
COMMANDS = {"qdo-worker": worker_command} | {
    f"qdo {path}": each for path, each in every_command() if not isinstance(each, click.Group)
}
SETTINGS = {each.flag: each for each in declarations()}
MADE = """
settings set attempts 5 --force --dry-run -o table
settings set attempts 5 --force
settings set fetch 5 --force
documents put plans acme 1
limits set mail --max 10 --rate 50/s
pause fine orders-* --no-wait --allow-none --for 2h
move owned $worker --timeout 0s
action $worker ping --timeout 60s
streams split user.-80
admin checkpoints export owned -f saved
timers run nightly --app tests.golden.filled:app
"""
"""Commands that add what the next ones show."""
SHOWN = """
status
queues
queues owned runs fine failing stuck user.-40 --app tests.golden.filled:app
queues --by prefix
workers
workers --all
workers $worker
ps --timeout 60s
peek fine --body
peek failing --body
peek stuck --body
peek secret --body
peek binary --body
events -o jsonl
history queues
history failures
history durations fine
history owners owned
history actions
dead-letters list
dead-letters list --by error
dead-letters show letters 135471512647131002
dead-letters export
pause --list
move --plan
settings show
settings history
limits list
requests list
requests list invoice
requests list --state over
requests show runs --body
requests show late --body
requests show binary --body
requests show secret --body
requests show done --body
requests show done-binary --body
requests show done-secret --body
streams list --all
streams locate user ada
timers list
locks
documents list
documents list plans
audit
config --app tests.golden.filled:app
doctor
admin broker file
admin keys list --keys keys
admin outbox list --app tests.golden.filled:app
admin outbox drop --all --dry-run --app tests.golden.filled:app
admin acl check
admin tree
admin checkpoints export
"""
"""Commands that change nothing."""
CHANGED = """
retry-now blocked
skip stuck $stuck
dead-letters add failing $failing
cancel fine $delayed
dead-letters retry dead --all
dead-letters discard letters --all
purge fine --delayed
seek fine earliest
delete fine --with-messages
resume --all
settings unset fetch --force
settings edit --force
settings apply live.toml --force
settings rollback 1 --force
limits delete mail
requests cancel late
requests resume rests
requests retry fails
streams merge user.-40 user.40-80
documents delete plans acme
admin broker file --app other --reset
admin broker init --broker postgresql://host/shop
admin keys retire ab --keys keys
admin outbox retry --all --app tests.golden.filled:app
admin acl apply
admin checkpoints import saved
"""
ADDRESSES = {"/api/queue": "/api/queue?name=stuck"}
"""Those of the dashboard that need a parameter."""
BY_NAME = frozenset(
    [
        *("behind", "faults", "waits", "unusable", "rests", "paused_jobs", "refused_rows"),
        *("states", "holders", "starts", "pins", "pinned", "changes", "from", "to", "headers"),
        *("body", "tag"),
    ]
)
"""Keys whose objects have names of the app as their keys."""
KINDS: dict[type, str] = {str: "text", bool: "flag", int: "number", float: "number"}
KINDS |= {type(None): "null", dict: "object", list: "list"}
LINES = {"qdo events": "qdo.events/1", "qdo admin checkpoints export": "qdo.checkpoints/1"}
"""Commands that print lines of JSON by themselves."""
FIND_FAULTS = ("qdo doctor", "qdo admin acl check")
"""Commands that end with 1."""

Keys = dict[str, set[str]]
"""By path, the types of the values."""


class Seen:
    """What was printed.

    :ivar keys: by schema, and by the command or address that prints it.
    :ivar columns: by schema, the headings of tables.
    """

    def __init__(self) -> None:
        self.keys: dict[str, dict[str, Keys]] = defaultdict(lambda: defaultdict(dict))
        self.columns: dict[str, dict[str, None]] = defaultdict(dict)

    def add(self, schema: str, source: str, items: Iterable[Any]) -> None:
        keys = self.keys[schema][source]
        for item in items:
            _add(keys, "", item)

    def lines(self) -> Iterator[str]:
        """Yield each schema with its keys in their order, nested ones after their parents."""
        for schema, sources in sorted(self.keys.items()):
            yield f"# {schema}: {', '.join(sources)}"
            tops = [*dict.fromkeys(_top(key) for keys in sources.values() for key in keys)]
            found = {key for keys in sources.values() for key in keys}
            for key in sorted(found, key=lambda key: (tops.index(_top(key)), key)):
                kinds = {kind for keys in sources.values() for kind in keys.get(key, ())}
                text = "|".join(sorted(kinds)) or "nothing"
                yield f"{key}: {text}{_note(key, sources)}"
            yield from (f"table: {each}" for each in self.columns[schema])
            yield ""


def _add(keys: Keys, path: str, value: Any) -> None:
    """Add the keys of a value; those of an object are named by their path."""
    if path:
        keys.setdefault(path, set()).add(KINDS[type(value)])
    if isinstance(value, dict):
        is_open = path.rpartition(".")[2] in BY_NAME
        if is_open:
            keys.setdefault(f"{path}.*", set())
        for name, each in value.items():
            _add(keys, f"{path}.{'*' if is_open else name}".lstrip("."), each)
    elif isinstance(value, list):
        keys.setdefault(f"{path}[]", set())
        for each in value:
            _add(keys, f"{path}[]", each)


def _note(key: str, sources: Mapping[str, Keys]) -> str:
    """Return whether only commands or only the dashboard have a key that both could have."""
    views = {name for name in sources if name.startswith("/api/")}
    where = {name for name, keys in sources.items() if key in keys}
    if where <= views < set(sources):
        return " (dashboard only)"
    return "" if where & views or not views else " (commands only)"


def _top(key: str) -> str:
    return re.split(r"[.\[]", key, maxsplit=1)[0]


# --- running ------------------------------------------------------------------------


class CommandRunner:
    """Runs commands in this process, and adds to `seen` what they print."""

    def __init__(self, seen: Seen, names: Mapping[str, str]) -> None:
        self._seen = seen
        self._names = names
        self._emit = output.emit
        self._path = ""

    def emit(
        self,
        schema: str,
        items: Iterable[Any],
        form: str,
        columns: Iterable[str] | Mapping[str, str] = (),
        out: TextIO | None = None,
        **options: Any,
    ) -> None:
        """Take the place of `qdo.cli.output.emit`."""
        items = list(items)
        if form != "table":
            self._seen.add(schema, self._path, json.loads(json.dumps(items)))
        if columns:
            columns = columns if isinstance(columns, Mapping) else list(columns)
            table = io.StringIO()
            self._emit(schema, [dict.fromkeys(columns, "x")], "table", columns, table)
            self._seen.columns[schema][table.getvalue().splitlines()[0]] = None
        self._emit(schema, items, form, columns, out, **options)

    def run(self, lines: str) -> None:
        """Run a command in each line, as JSON and confirmed unless the line says otherwise."""
        for line in string.Template(lines.strip()).substitute(self._names).splitlines():
            path = next(each for each in COMMANDS if f"qdo {line} ".startswith(f"{each} "))
            known = {name for each in COMMANDS[path].params for name in each.opts}
            argv = shlex.split(line)
            argv += ["-o", "json"] if "--output" in known and "-o" not in argv else []
            argv += ["--yes"] if "--yes" in known and "--dry-run" not in argv else []
            argv += ["--reason", "x"] if "--reason" in known else []
            self._path = path
            text = io.StringIO()
            errors = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
                code = run(qdo_command, "qdo", argv)
            if code != int(path in FIND_FAULTS):
                raise RuntimeError(f"{line}: exit code {code}: {errors.getvalue()}")
            if path in LINES:
                self._seen.add(LINES[path], path, map(json.loads, text.getvalue().splitlines()))


@contextlib.contextmanager
def _printing(runner: CommandRunner) -> Iterator[None]:
    """Let commands print through the runner; they need no editor, no server, and no hurry."""
    names = [each.name for each in pkgutil.iter_modules(qdo.cli.commands.__path__)]
    modules = [importlib.import_module(f"qdo.cli.commands.{each}") for each in names]
    no_server = BrokerSchema(
        script=lambda url, seconds: "",
        change=lambda url: "create",
        create=lambda url, seconds: True,
        grants=lambda url, role, kind: [],
    )
    with contextlib.ExitStack() as stack:
        for each in (output, changing, *modules):
            if hasattr(each, "emit"):
                stack.enter_context(mock.patch.object(each, "emit", runner.emit))
        stack.enter_context(mock.patch("qdo.cli.commands.show.ASK_SECONDS", 60.0))
        stack.enter_context(mock.patch("click.edit", return_value="turn_seconds = 0.3"))
        stack.enter_context(mock.patch("qdo.cli.commands.setup.schema_of", return_value=no_server))
        yield


def _add_views(seen: Seen, visitor: Visitor) -> None:
    """Add what the dashboard and the health page of a parent process answer."""
    wait_until(lambda: visitor.items("/api/events") != [], "the dashboard sees changes")
    for each in sorted(rule.rule for rule in visitor.flask.url_map.iter_rules()):
        if each.startswith("/api/"):
            answer = visitor.get(ADDRESSES.get(each, each)).get_json()
            seen.add(answer["schema"], each, answer["items"])
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/readyz"}
    (body,) = Monitor(1.0)(request, lambda *_: None)
    seen.add(json.loads(body)["schema"], "/healthz, /readyz", [json.loads(body)])


# --- what is declared ----------------------------------------------------------------


def _declared(seen: Seen) -> Iterator[str]:
    """Yield the settings, and the parameters of each command with the schemas that it prints."""
    yield "# settings"
    for each in SETTINGS.values():
        live = ", live" if each.live else ""
        yield f"{each.flag} {each.variable}: {each.kind}, default {each.default!r}{live}"
    for path, command in COMMANDS.items():
        yield f"\n# {path}"
        flags = [each.opts[-1] for each in command.params]
        yield from (_parameter(each) for each in command.params if each.opts[-1] not in SETTINGS)
        if used := [each for each in flags if each in SETTINGS]:
            yield f"settings: {' '.join(used)}"
        if "--output" in flags:
            schemas = [each for each, sources in seen.keys.items() if path in sources]
            yield f"prints: {' '.join(schemas) or 'nothing'}"
    for found in pkgutil.iter_modules(qdo.programs.__path__):
        for kind in vars(importlib.import_module(f"qdo.programs.{found.name}")).values():
            if dataclasses.is_dataclass(kind) and hasattr(kind, "PREFIX"):
                yield f"\n# qdo.programs.{found.name}"
                for each in dataclasses.fields(kind):
                    required = each.default is dataclasses.MISSING
                    default = "required" if required else f"default {each.default!r}"
                    yield f"{kind.PREFIX}{each.name.upper()}: {default}"
    yield ""


def _parameter(each: click.Parameter) -> str:
    """Return names, values, and default of an option or an argument."""
    about = each.to_info_dict()
    is_option = isinstance(each, click.Option)
    values = "|".join(about["type"].get("choices", ())) or each.metavar or each.type.name
    text = ", ".join(each.opts) if is_option else f"{each.name}"
    text += "" if about.get("is_flag") else f" {values}"
    text += ", required" if each.required else ""
    text += ", repeated" if about["multiple"] or about["nargs"] == -1 else ""
    least, most = about["type"].get("min"), about["type"].get("max")
    text += "" if least is most is None else f", from {least} to {most}"
    return text + ("" if about["default"] in (None, False, "") else f", default {about['default']}")


def _sqlite(path: Path) -> Iterator[str]:
    """Yield the columns of each table of a file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute("PRAGMA user_version").fetchone()
        yield f"# SQLite: {path.name}, format {number}"
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        for (table,) in sorted(connection.execute(query).fetchall()):
            for row in connection.execute(f"PRAGMA table_info({table})"):
                _, name, kind, is_required, default, key = row
                notes = " NOT NULL" if is_required else ""
                notes += "" if default is None else f" DEFAULT {default}"
                yield f"{table}.{name} {kind}{notes}{' KEY' if key else ''}"
        yield ""


def _postgresql() -> Iterator[str]:
    """Yield the columns of each table, and the functions, of the script that creates them."""
    yield f"# PostgreSQL, format {FORMAT}"
    text = re.sub(r"\$\$.*?\$\$|--[^\n]*", "", script("qdo", 3600), flags=re.DOTALL)
    for statement in (" ".join(each.split()) for each in text.split(";")):
        table = re.match(
            r"CREATE TABLE qdo\.(\w+) \((.*?)\)(?: WITH .*| PARTITION .*)?$", statement
        )
        column = re.match(r"ALTER TABLE qdo\.(\w+) ADD (.*)", statement)
        function = re.match(r"CREATE OR REPLACE FUNCTION qdo\.(.*?) LANGUAGE", statement)
        view = re.match(r"CREATE OR REPLACE VIEW qdo\.(qdo_\w+) AS", statement)
        if table:
            parts = re.split(r", (?![^(]*\))", table[2].strip())
            yield from (f"{table[1]}.{each}" for each in parts if each)
        elif column:
            yield f"{column[1]}.{column[2]}"
        elif function:
            yield f"function {function[1]}"
        elif view:
            yield f"view {view[1]}, see docs/sql.rst"


def collect() -> str:
    """Return the whole list."""
    seen = Seen()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="qdo-published-"))
        stack.enter_context(contextlib.chdir(name))
        shop, names = stack.enter_context(filled(Path(name)))
        places = {f"QDO_{each.upper()}": url for each, url in shop.places.items()}
        environment = clean_environment({"QDO_APP": "shop", **places})
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        visitor = shop.visitor(show_bodies=True)
        visitor.page("/")
        runner = CommandRunner(seen, names)
        stack.enter_context(_printing(runner))
        Path("live.toml").write_text("fetch = 7")
        runner.run(MADE)
        runner.run(SHOWN)
        _add_views(seen, visitor)
        runner.run(CHANGED)
        files = [line for each in sorted(Path(name).glob("*.db")) for line in _sqlite(each)]
    return "\n".join([*seen.lines(), *_declared(seen), *files, *_postgresql()]) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(collect(), encoding="utf-8")
    if FORMAT > RELEASED:
        statements = re.sub(r"--[^\n]*", "", script("qdo", 3600)).split("\n")
        lines = [f"{each.rstrip()}\n" for each in statements if each.strip()]
        frozen(FORMAT).write_text("".join(lines), encoding="utf-8")
