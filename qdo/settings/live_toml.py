"""Live settings: a TOML text in the coordinator that applies to all processes of an app.

They override the settings in code, and are overridden by the TOML file, the environment and flags
of a process: these *pin* a setting there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from qdo.errors import SettingsError
from qdo.settings.settings import Settings, check_names, declarations
from qdo.settings.sources import parse_toml
from qdo.settings.values import convert

ORIGIN = "live settings"


def live_names() -> list[str]:
    """Return the names of the settings that may be changed while processes run."""
    return [each.name for each in declarations() if each.live]


def read_live(text: str) -> dict[str, Any]:
    """Return the live settings in a TOML text, converted and checked.

    :raises UnknownSettingError: a name is not a setting.
    :raises SettingsError: the text is not TOML, a value is invalid, or a setting cannot be changed
        while processes run.
    """
    table = parse_toml(text, ORIGIN)
    check_names(table, ORIGIN)
    known = {each.name: each for each in declarations()}
    for name in table:
        if not known[name].live:
            raise SettingsError(
                name=name,
                reason="it cannot be changed while processes run; set it in the settings file of"
                f" each host. These can: {', '.join(live_names())}",
            )
    return {name: convert(known[name], value, ORIGIN) for name, value in table.items()}


def pinned(settings: Settings, code_origin: str) -> dict[str, str]:
    """Return the origin of each live setting that this process sets itself.

    :param code_origin: the origin of settings that the app gives in code: they pin nothing.
    """
    return {
        name: origin
        for name in live_names()
        if (origin := settings.origins.get(name)) is not None and origin != code_origin
    }


def overlaid(
    settings: Settings, live: Mapping[str, Any], pins: Collection[str], origin: str
) -> Settings:
    """Return settings in which live settings apply, unless this process pins them.

    :param settings: without any live setting.
    :param pins: names that `pinned` returned.
    :param origin: their origin, such as "live 13".
    :raises SettingsError: they contradict other settings.
    """
    free = {name: value for name, value in live.items() if name not in pins}
    return settings.merged(free, origin)


def differences(before: str, after: str) -> dict[str, tuple[Any, Any]]:
    """Return what changes between two TOML texts: by name, the values; None for a missing one.

    :param before: counts as empty if it is not TOML: no process uses it.
    :raises SettingsError: `after` is not TOML.
    """
    try:
        old = _as_json(before)
    except SettingsError:
        old = {}
    new = _as_json(after)
    names = sorted({*old, *new})
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _as_json(text: str) -> dict[str, Any]:
    # TOML has times, and JSON does not.
    found: dict[str, Any] = json.loads(json.dumps(parse_toml(text, ORIGIN), default=str))
    return found
