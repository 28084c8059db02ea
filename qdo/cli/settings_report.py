"""How `qdo settings` shows changes, and the workers that they do not reach."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from qdo.cli.output import emit, iso_time, print_message
from qdo.errors import SettingsError
from qdo.fleet.live_settings import SettingsChange
from qdo.fleet.settings_node import SettingsVersion
from qdo.settings.listing import pins_of
from qdo.settings.live_toml import differences
from qdo.text import join_some, pluralize

_SCHEMA = "qdo.settings-change/1"


def show_change(
    version: int,
    changed: Mapping[str, tuple[Any, Any]],
    workers: int,
    form: str,
    out: TextIO | None = None,
    *,
    seconds: float | None = None,
) -> None:
    """Show a change of live settings.

    :param workers: the number of registered workers.
    :param seconds: how long it took until they used it; None if it is not made.
    """
    if form == "table" and seconds is None:
        rows = [
            {"setting": name, "before": _value(old), "after": _value(new)}
            for name, (old, new) in changed.items()
        ]
        emit(
            _SCHEMA,
            rows,
            form,
            {name: name.upper() for name in ("setting", "before", "after")},
            out,
        )
        return
    item = {
        "version": version,
        "changes": changes_text(changed) if form == "table" else _changes_of(changed),
        "workers": workers,
        "seconds": None if seconds is None else round(seconds, 3),
        "executed": seconds is not None,
    }
    columns = {name: name.upper() for name in ("version", "changes", "workers", "seconds")}
    emit(_SCHEMA, [item], form, columns, out)


def report_workers(outcome: SettingsChange, changed: Mapping[str, Any]) -> None:
    """Tell which workers do not use the version, or not all of it."""
    count = len(outcome.workers)
    for name, origins in pins_of(outcome.workers).items():
        if name in changed:
            print_message(f"hint: {name} does not change in {pins_text(origins, count)}")
    if outcome.late:
        print_message(
            f"hint: version {outcome.version.number} is not in use yet in {len(outcome.late)} of"
            f" {pluralize(count, 'worker')}: {join_some(list(outcome.late))}; see `qdo components`"
        )


def pins_text(origins: Mapping[str, str], count: int) -> str:
    """Return how many of the workers set a setting themselves, and where."""
    if not origins:
        return "no"
    where = join_some(sorted(set(origins.values())))
    return f"{len(origins)} of {pluralize(count, 'worker')} ({where})"


def _changes_of(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
    """Return changes as JSON."""
    return {name: {"before": old, "after": new} for name, (old, new) in changed.items()}


def changes_text(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changes in one line."""
    texts = (f"{name}: {_value(old)} -> {_value(new)}" for name, (old, new) in changed.items())
    return ", ".join(texts)


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:39]}…"


def history_items(versions: Sequence[SettingsVersion]) -> list[dict[str, Any]]:
    """Return what changed with each version; null where that is not known."""
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
    """Return the changes of a version; None if it, or the version before, cannot be read."""
    try:
        return None if before is None else changes_text(differences(before, text))
    except SettingsError:
        return None
