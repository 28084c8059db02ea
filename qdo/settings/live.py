"""The live settings of an app as one process uses them; see `qdo.fleet.protocol.live_settings`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from qdo.errors import QdoError
from qdo.fleet.protocol.live_settings import SettingsReport
from qdo.fleet.settings_node import MAX_WHY_CHARACTERS, SettingsVersion
from qdo.settings.in_force import SettingsInForce
from qdo.settings.live_toml import overlaid, pinned, read_live
from qdo.settings.settings import Settings
from qdo.system import logs

_log = logging.getLogger(__name__)


class LiveSettings:
    """A process as `SettingsWatch` sees it.

    :ivar in_force: the settings of this process, with the live ones.
    :ivar in_use: the version that this process uses, None for none.
    :ivar report: what this process says of live settings.
    :param settings: those of this process, without live ones.
    :param code_origin: the origin of those that the app gives in code.
    :param check: raises a `QdoError` for settings that this process cannot use.
    :param publish: called when the report has changed.
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
        """Return why this process refuses a version, None if it accepts it."""
        try:
            self._check(self._settings_of(version))
        except QdoError as error:
            return str(error)[:MAX_WHY_CHARACTERS]
        return None

    def use(self, version: SettingsVersion | None) -> None:
        """Use a version that `check` has accepted.

        Messages in flight end under the former settings: parts read a setting when they need it.
        """
        settings = self._own if version is None else self._settings_of(version)
        self.in_use = version
        changed = self._differences(settings)
        if changed:
            number = 0 if version is None else version.number
            _log.info("live settings %d apply: %s", number, ", ".join(changed))
        self.in_force.replace(settings)

    def answer(self, report: SettingsReport) -> None:
        """Tell other processes what this one uses, accepts and refuses."""
        self.report = report
        self._publish()

    def dump(self) -> dict[str, Any]:
        """Return the part of the component node."""
        return self.report.dump() | ({"pins": self._pins} if self._pins else {})

    def _settings_of(self, version: SettingsVersion) -> Settings:
        live = read_live(version.text)
        return overlaid(self._own, live, self._pins, f"live {version.number}")

    def _differences(self, settings: Settings) -> list[str]:
        """Return the settings that change, as NAME = VALUE."""
        before, after = self.in_force.now.values(), settings.values()
        return [
            name if name == "policies" else f"{name} = {value}"
            for name, value in after.items()
            if value != before[name]
        ]


class LogLevelFollower:
    """Sets the level of the log when the setting changes, and only then.

    A change of another setting must not end a level that an operator has asked for.
    """

    def __init__(self, settings: Settings) -> None:
        self._level = settings.log_level

    def changed(self, settings: Settings) -> None:
        """Follow the setting, unless a `log_config` has levels of its own."""
        if settings.log_level != self._level and not settings.log_config:
            self._level = settings.log_level
            logs.set_level(self._level)
