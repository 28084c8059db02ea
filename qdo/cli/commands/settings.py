"""The commands of `qdo settings`, which change the settings of running processes."""

from __future__ import annotations

import difflib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import click
import tomlkit

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import from_coordinator, open_coordinator
from qdo.cli.options import COORDINATOR, duration_option, limit_option, with_output, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import (
    LiveSettingsReplacedError,
    LiveSettingsSizeError,
    LiveSettingsUnreadableError,
    NotFoundError,
    SettingsError,
    UsageError,
)
from qdo.fleet import live_settings
from qdo.fleet.audit import AuditTrail
from qdo.fleet.settings_machine import MAX_TEXT_BYTES, SettingsNode, SettingsVersion, check_size
from qdo.settings.listing import live_items, pins_of
from qdo.settings.live import differences, live_names, read_live
from qdo.settings.settings import Settings, check_names, declarations
from qdo.settings.sources import parse_toml
from qdo.settings.values import LIVE, convert
from qdo.text import join_some, pluralize, printable, printable_lines

_SCHEMA = "qdo.settings-change/1"


def _show_change(
    version: int,
    changed: Mapping[str, tuple[Any, Any]],
    workers: int,
    form: str,
    out: TextIO | None = None,
    *,
    seconds: float | None = None,
) -> None:
    """Show a change. `seconds` is the time that the workers took, or None for a plan."""
    if form == "table" and seconds is None:
        rows = [
            {"setting": name, "before": _value(old), "after": _value(new)}
            for name, (old, new) in changed.items()
        ]
        emit(_SCHEMA, rows, form, ("setting", "before", "after"), out)
        return
    item = {
        "version": version,
        "changes": {name: {"before": old, "after": new} for name, (old, new) in changed.items()},
        "workers": workers,
        "seconds": None if seconds is None else round(seconds, 3),
        "executed": seconds is not None,
    }
    columns = ("version", "changes", "workers", "seconds")
    emit(_SCHEMA, [item], form, columns, out, cells=lambda _: {"changes": _changes_text(changed)})


def _report_workers(outcome: live_settings.SettingsChange, changed: Mapping[str, Any]) -> None:
    """Report the workers that do not use the new version, or that override some of its settings."""
    count = len(outcome.workers)
    for name, origins in pins_of(outcome.workers).items():
        if name in changed:
            print_message(f"hint: {name} does not change in {_pins_text(origins, count)}")
    if outcome.late:
        print_message(
            f"hint: version {outcome.version.number} is not in use yet in {len(outcome.late)} of"
            f" {pluralize(count, 'worker')}: {join_some(list(outcome.late))}; see `qdo workers"
            " --all`"
        )


def _pins_text(origins: Mapping[str, str], count: int) -> str:
    """Return the number of workers that override a setting, and the sources of their values."""
    if not origins:
        return "no"
    where = join_some(sorted(set(origins.values())))
    return f"{len(origins)} of {pluralize(count, 'worker')} ({where})"


def _changes_text(changed: Mapping[str, tuple[Any, Any]]) -> str:
    texts = (f"{name}: {_value(old)} -> {_value(new)}" for name, (old, new) in changed.items())
    return ", ".join(texts)


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _history_items(versions: Sequence[SettingsVersion]) -> list[dict[str, Any]]:
    """Return the changes of each version; None if the changes are unknown."""
    texts = {each.number: each.text for each in versions} | {0: ""}
    return [
        {
            "version": each.number,
            "at": iso_time(each.at or None),
            "who": each.who,
            "changes": _changes_since(texts.get(each.number - 1), each.text),
            "why": each.why,
        }
        for each in versions
    ]


def _changes_since(before: str | None, text: str) -> str | None:
    """Return the changes of a version; None if it or the previous version cannot be read."""
    try:
        return None if before is None else _changes_text(differences(before, text))
    except SettingsError:
        return None


@contextmanager
def _kept_on_failure(text: str, command: str) -> Iterator[None]:
    """Save a text in a new file for a later `command` if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        # Only this user may read the file. Nothing deletes the file.
        with tempfile.NamedTemporaryFile(
            "w", prefix="qdo-settings-", suffix=".toml", encoding="utf-8", delete=False
        ) as file:
            file.write(text)
        print_message(f"hint: your text is in {file.name}; correct it, then: {command} {file.name}")
        raise


@dataclass(frozen=True, slots=True)
class _SettingsPlan:
    """A planned change of live settings. `version` is the future number of the new version."""

    version: int
    before: str
    after: str
    workers: int
    same: bool


def _plan_settings(
    client: Client | None, layout: Layout, edit: live_settings.Edit, *, damaged: bool = False
) -> _SettingsPlan:
    node = SettingsNode()
    version = 1
    workers = 0
    if client is not None:
        node = live_settings.read_settings(client, layout, damaged=damaged)
        version = live_settings.next_number(client, layout, node)
        workers = len(live_settings.read_answers(client, layout))
    text = edit(node)
    check_size(text)
    same = text == node.text and node.fault is None
    return _SettingsPlan(version, node.text, text, workers, same)


@click.group()
def settings() -> None:
    """Change settings of all processes while they run: the live settings.

    \b
    qdo settings show --app shop:app
    qdo settings set --app shop:app attempts 5 --reason "CRM is slow"
    qdo settings edit --app shop:app
    qdo settings history --app shop:app
    qdo settings rollback --app shop:app 12

    Every worker checks them with its own code first. They override settings in code; the settings
    file, the environment and flags of a process override them. They apply between two messages.
    Exit code 4: a worker did not answer in time; 5: a worker refuses the change, or another
    operator changed the settings meanwhile. Nothing has changed then. --dry-run asks no worker.
    """


def _changing(function: Any) -> Any:
    """Add the options of commands that change live settings."""

    call = changing(*COORDINATOR)(function)
    click.option(
        "--force",
        is_flag=True,
        help="Do not wait for workers; those that refuse keep the settings that they have.",
    )(call)
    return duration_option("--timeout", "10s", "How long workers may take to check them.")(call)


# --- reading ------------------------------------------------------------------------------


@settings.command()
@with_output(*COORDINATOR)
def show(form: str, settings: Settings) -> None:
    """List the live settings.

    PINNED tells how many workers set one themselves, and where.
    """
    with open_coordinator(settings) as (client, layout):
        node = live_settings.read_settings(client, layout) if client else SettingsNode()
        answers = live_settings.read_answers(client, layout) if client else []
    items = live_items(node, answers)
    columns = [*items[0]] if items else ()

    def cells(item: Mapping[str, Any]) -> dict[str, str]:
        pinned = _pins_text(item["pinned"], len(answers))
        return {"value": json.dumps(item["value"]), "pinned": pinned}

    emit("qdo.settings/1", items, form, columns, cells=cells)
    if not items:
        print_message("hint: the app has no live settings; see `qdo settings set --help`")
    late = [
        each.worker
        for each in answers
        if (each.report is None and node.number) or (each.report and each.report.uses < node.number)
    ]
    if late:
        print_message(
            f"hint: version {node.number} is not in use in {len(late)} of"
            f" {pluralize(len(answers), 'worker')}: {join_some(late)}"
        )


@settings.command()
@click.option("--version", "number", type=click.IntRange(1), metavar="N", help="Of this version.")
@with_settings(*COORDINATOR)
def get(number: int | None, settings: Settings) -> None:
    """Write the live settings to stdout, as TOML."""
    with open_coordinator(settings) as (client, layout):
        if client is None and number is not None:
            raise NotFoundError(what="version of the live settings", name=str(number))
        text = "" if client is None else _text(client, layout, number)
    if sys.stdout.isatty():  # a file gets the exact text for `qdo settings apply`
        text = printable_lines(text)
    sys.stdout.write(text if not text or text.endswith("\n") else f"{text}\n")


@settings.command()
@limit_option(20, "Most versions to list.", 1000)
@with_output(*COORDINATOR)
def history(limit: int, form: str, settings: Settings) -> None:
    """List the versions that were in force, newest first."""
    versions = from_coordinator(settings, partial(live_settings.read_history, limit=limit + 1), [])
    if not versions:
        print_message("hint: the app has no live settings; see `qdo settings set --help`")
    items = _history_items(versions)[:limit]
    emit("qdo.settings-history/1", items, form, [*(items or [{}])[0]])


@settings.command()
@click.argument("first", type=click.IntRange(1), metavar="[VERSION", required=False)
@click.argument("second", type=click.IntRange(1), metavar="[VERSION]]", required=False)
@with_settings(*COORDINATOR)
def diff(first: int | None, second: int | None, settings: Settings) -> None:
    """Show the lines that differ between two versions.

    Without a second VERSION it is the one in force; without any, the last two.
    """
    with open_coordinator(settings) as (client, layout):
        if client is None:
            raise NotFoundError(what="version of the live settings", name=str(first or 1))
        number = live_settings.read_settings(client, layout).number
        old = max(1, number - 1) if first is None else first
        new = number if second is None else second
        before, after = (_text(client, layout, each).splitlines() for each in (old, new))
    for line in difflib.unified_diff(
        before, after, f"version {old}", f"version {new}", lineterm=""
    ):
        click.echo(printable(line))


# --- changing -----------------------------------------------------------------------------


@settings.command("set")
@click.argument("name")
@click.argument("value")
@_changing
def set_(name: str, value: str, **options: Any) -> int:
    """Set one live setting.

    Comments and the other settings stay as they are.
    """
    check_names([name], "the argument NAME")
    declaration = next(each for each in declarations() if each.name == name)
    if declaration.kind == "tables":
        raise UsageError(reason=f"{name} are tables; change them with `qdo settings edit`")
    converted = convert(declaration, value, "the argument VALUE")

    def edit(node: SettingsNode) -> str:
        document = _document(node.text)
        document[name] = list(converted) if isinstance(converted, tuple) else converted
        return tomlkit.dumps(document)

    return _change("settings set", edit, **options)


@settings.command()
@click.argument("name")
@_changing
def unset(name: str, **options: Any) -> int:
    """Remove one live setting.

    Processes use their own value of it again.
    """
    check_names([name], "the argument NAME")

    def edit(node: SettingsNode) -> str:
        document = _document(node.text)
        if name not in document:
            raise NotFoundError(what="live setting", name=name)
        del document[name]
        return tomlkit.dumps(document)

    return _change("settings unset", edit, **options)


@settings.command()
@_changing
def edit(settings: Settings, **options: Any) -> int:
    """Edit the live settings in $EDITOR, as TOML."""
    node = from_coordinator(settings, live_settings.read_settings, SettingsNode())
    names = ", ".join(live_names())
    before = node.text or f"# Settings of all processes, as in a settings file:\n# {names}\n"
    try:
        text = click.edit(before, extension=".toml")
    except click.ClickException as error:  # the editor is missing or has failed
        reason = f"nothing was changed: {error.format_message()}; set EDITOR to a working editor"
        raise UsageError(reason=reason) from error
    if text is None:
        print_message("hint: the text was not changed")
        return 0
    with _kept_on_failure(text, "qdo settings apply"):
        return _change("settings edit", _based_on(node, text), settings=settings, **options)


@settings.command()
@click.argument("file", metavar="FILE")
@_changing
def apply(file: str, **options: Any) -> int:
    """Replace the live settings by a TOML file; - reads stdin."""
    try:
        with click.open_file(file, "rb") as opened:
            data = opened.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise LiveSettingsSizeError(limit=MAX_TEXT_BYTES, found="more")
        text = data.decode()
    except OSError as error:
        raise UsageError(reason=f"FILE must be readable, got {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(reason=f"FILE must be UTF-8, got {file}: {error}") from error
    return _change("settings apply", lambda node: text, damaged=True, **options)


@settings.command()
@click.argument("version", type=click.IntRange(1))
@_changing
def rollback(version: int, settings: Settings, **options: Any) -> int:
    """Put an earlier version into force again, under a new number."""
    with open_coordinator(settings) as (client, layout):
        if client is None:
            raise NotFoundError(what="version of the live settings", name=str(version))
        text = live_settings.read_version(client, layout, version).text
    return _change(
        "settings rollback", lambda node: text, damaged=True, settings=settings, **options
    )


def _change(
    command: str,
    edit: live_settings.Edit,
    *,
    settings: Settings,
    consent: Consent,
    timeout: float,
    force: bool,
    damaged: bool = False,
) -> int:
    def checked(node: SettingsNode) -> str:
        text = edit(node)
        read_live(text)
        return text

    with open_coordinator(settings, create=not consent.dry_run) as (client, layout):
        plan = _plan_settings(client, layout, checked, damaged=damaged)
        if plan.same:
            print_message("hint: nothing changes: these live settings are in force already")
            return 0
        changed = differences(plan.before, plan.after)
        show = partial(_show_change, plan.version, changed, plan.workers)
        what = f"put version {plan.version} into force"
        if not consent.given(what, show, asks=False) or client is None:
            return 0
        outcome = live_settings.change_settings(
            client,
            layout,
            checked,
            AuditTrail(client, layout, command, consent.reason),
            timeout_seconds=timeout,
            force=force,
            damaged=damaged,
            why=consent.reason,
        )
    if outcome is None:
        print_message("hint: nothing changes: these live settings are in force already")
        return 0
    before = "" if outcome.before is None else outcome.before.text
    changed = differences(before, outcome.version.text)
    _show_change(
        outcome.version.number,
        changed,
        len(outcome.workers),
        consent.form,
        seconds=outcome.seconds,
    )
    _report_workers(outcome, changed)
    return 0


def _based_on(node: SettingsNode, text: str) -> live_settings.Edit:
    """Return an edit that writes a text only if the version of `node` is still in force."""

    def edit(after: SettingsNode) -> str:
        if after.number != node.number:
            who = "another operator" if after.current is None else after.current.who
            raise LiveSettingsReplacedError(who=who)
        return text

    return edit


def _text(client: Any, layout: Any, number: int | None) -> str:
    if number is None:
        return live_settings.read_settings(client, layout).text
    return live_settings.read_version(client, layout, number).text


def _document(text: str) -> tomlkit.TOMLDocument:
    try:
        parse_toml(text, LIVE)  # checks the bounds, unlike tomlkit
        return tomlkit.parse(text)
    except (ValueError, SettingsError) as error:
        raise LiveSettingsUnreadableError(reason=error) from error
