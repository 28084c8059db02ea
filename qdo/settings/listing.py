"""Lists every setting as a JSON item."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from qdo.errors import LiveSettingsUnreadableError, SettingsError
from qdo.fleet.live_settings import WorkerAnswer
from qdo.fleet.settings_machine import SettingsNode
from qdo.settings.live import differences
from qdo.settings.settings import Settings, declarations


def config_items(settings: Settings, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of qdo.config/1."""
    # Settings contain no secrets. qdo refuses addresses with passwords, and keys are in files.
    code = Settings(**given).values() if given else {}
    return [
        {
            "setting": each.name,
            "value": _shown(getattr(settings, each.name)),
            "unit": each.unit,
            "origin": settings.origin(each.name),
            "default": each.default,
            "code": _shown(code[each.name]) if each.name in given else None,
            "help": each.help,
        }
        for each in declarations()
    ]


def pins_of(answers: Sequence[WorkerAnswer]) -> dict[str, dict[str, str]]:
    """Return the origins of pinned settings, by setting and worker."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for each in answers:
        for name, origin in each.pins.items():
            found[name][each.worker] = origin
    return found


def live_items(node: SettingsNode, answers: Sequence[WorkerAnswer]) -> list[dict[str, Any]]:
    """Return the items of qdo.settings/1; raise LiveSettingsUnreadableError for an invalid text."""
    pins = pins_of(answers)
    try:
        found = differences("", node.text)
    except SettingsError as error:
        raise LiveSettingsUnreadableError(reason=error) from error
    return [
        {"setting": name, "value": value, "version": node.number, "pinned": pins.get(name, {})}
        for name, (_, value) in found.items()
    ]


def _shown(value: Any) -> Any:
    """Return a value as JSON, without the omitted options of tables."""
    if isinstance(value, tuple):
        return [_shown(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {name: _shown(each) for name, each in options.items() if each is not None}
    return value
