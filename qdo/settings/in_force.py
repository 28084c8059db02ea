"""The settings of a process, whose live ones may change while it runs."""

from __future__ import annotations

from collections.abc import Callable

from qdo.settings.settings import Settings


class SettingsInForce:
    """Holds the settings that are in force now.

    Parts that read a setting again and again read it from `now`.

    :ivar now: replaced as a whole; any thread may read it.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = settings
        self._listeners: list[Callable[[Settings], object]] = []

    def on_change(self, function: Callable[[Settings], object]) -> None:
        """Call a function with the new settings after each change."""
        self._listeners.append(function)

    def replace(self, settings: Settings) -> None:
        """Put other settings into force."""
        self.now = settings
        for each in self._listeners:
            each(settings)
