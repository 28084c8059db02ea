"""The live settings of an app, and their use by one process.

The TOML text in the coordinator applies to all processes of an app. Its settings override the app's
code. The TOML file, the environment and flags of a process override the text. This is called
*pinning* a setting.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qdo.errors import QdoError, SettingsError
from qdo.fleet.settings_machine import MAX_WHY_CHARACTERS, SettingsReport, SettingsVersion
from qdo.settings.settings import Settings, check_names, declarations
from qdo.settings.sources import parse_toml
from qdo.settings.values import LIVE, convert
from qdo.system import logs
from qdo.text import describe

_log = logging.getLogger(__name__)


def live_names() -> list[str]:
    """Return the names of the settings that operators may change while processes run."""
    return [each.name for each in declarations() if each.live]


def read_live(text: str) -> dict[str, Any]:
    """Return the converted live settings from a TOML text; raise SettingsError for a fault."""
    table = parse_toml(text, LIVE)
    check_names(table, LIVE)
    known = {each.name: each for each in declarations()}
    for name in table:
        if not known[name].live:
            raise SettingsError(
                name=name,
                reason="it cannot be changed while processes run; set it in the settings file of"
                f" each host. These can: {', '.join(live_names())}",
            )
    return {name: convert(known[name], value, LIVE) for name, value in table.items()}


def pinned(settings: Settings, code_origin: str) -> dict[str, str]:
    """Return the origin of each live setting that this process pins."""
    return {
        name: origin
        for name in live_names()
        if (origin := settings.origins.get(name)) is not None and origin != code_origin
    }


def overlaid(
    settings: Settings, live: Mapping[str, Any], pins: Collection[str], origin: str
) -> Settings:
    """Return a copy of settings in which live settings override unpinned settings."""
    free = {name: value for name, value in live.items() if name not in pins}
    return settings.merged(free, origin)


def differences(before: str, after: str) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two TOML texts, by name; None if missing.

    :param before: text before the change. An invalid text counts as empty, because no process uses
        it.
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
    # TOML has times, but JSON does not.
    found: dict[str, Any] = json.loads(json.dumps(parse_toml(text, LIVE), default=str))
    return found


def with_version(settings: Settings, version: SettingsVersion | None, code_origin: str) -> Settings:
    """Return the settings in force in a worker; raise QdoError if no worker uses this version."""
    if version is None:
        return settings
    pins = pinned(settings, code_origin)
    return overlaid(settings, read_live(version.text), pins, f"live {version.number}")


class SettingsInForce:
    """The settings in force `now`. A change replaces the object, so any thread may read it."""

    def __init__(self, settings: Settings) -> None:
        self.now = settings
        self._listeners: list[Callable[[Settings], object]] = []

    def on_change(self, function: Callable[[Settings], object]) -> None:
        self._listeners.append(function)

    def replace(self, settings: Settings) -> None:
        self.now = settings
        for each in self._listeners:
            each(settings)


class LiveSettings:
    """The live settings of a process, for `SettingsWatch`.

    :param settings: the settings of this process, without live settings.
    :param code_origin: the origin of settings in the app's code.
    :param check: a function that raises a `QdoError` for settings that this process cannot use.
    :param publish: a function to call after the report has changed.
    """

    def __init__(
        self,
        settings: Settings,
        code_origin: str,
        *,
        check: Callable[[Settings], object] = lambda settings: None,
        publish: Callable[[], object] = lambda: None,
    ) -> None:
        self.in_force = SettingsInForce(settings)
        self.in_use: SettingsVersion | None = None
        self.report = SettingsReport()
        self._own = settings
        self._pins = pinned(settings, code_origin)
        self._check = check
        self._publish = publish

    def check(self, version: SettingsVersion) -> str | None:
        try:
            self._check(self._settings_of(version))
        except Exception as error:  # noqa: BLE001 - a bad text must not end a worker
            reason = str(error) if isinstance(error, QdoError) else describe(error)
            return reason[:MAX_WHY_CHARACTERS]
        return None

    def use(self, version: SettingsVersion | None) -> None:
        # Messages in flight end under the former settings. Modules read a setting whenever they
        # need it.
        settings = self._own if version is None else self._settings_of(version)
        self.in_use = version
        changed = self._differences(settings)
        if changed:
            number = 0 if version is None else version.number
            _log.info("live settings %d apply: %s", number, ", ".join(changed))
        self.in_force.replace(settings)

    def answer(self, report: SettingsReport) -> None:
        self.report = report
        self._publish()

    def dump(self) -> dict[str, Any]:
        return self.report.dump() | ({"pins": self._pins} if self._pins else {})

    def _settings_of(self, version: SettingsVersion) -> Settings:
        live = read_live(version.text)
        return overlaid(self._own, live, self._pins, f"live {version.number}")

    def _differences(self, settings: Settings) -> list[str]:
        before = self.in_force.now.values()
        after = settings.values()
        return [
            name if name == "policies" else f"{name} = {value}"
            for name, value in after.items()
            if value != before[name]
        ]


class LogLevelFollower:
    """Sets the log level only when the setting changes."""

    # A change of another setting must not reset a level that an operator requested.

    def __init__(self, settings: Settings) -> None:
        self._level = settings.log_level

    def changed(self, settings: Settings) -> None:
        """Set the log level of the settings, unless a `log_config` defines levels."""
        if settings.log_level != self._level and not settings.log_config:
            self._level = settings.log_level
            logs.set_level(self._level)
