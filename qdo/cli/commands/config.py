"""`qdo config`: every setting in force, with its origin."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from qdo.cli.framework import output_option, with_settings
from qdo.cli.output import emit
from qdo.settings.settings import Settings, declarations


@click.command()
@with_settings(*(each.name for each in declarations()))
@output_option
def config(form: str, settings: Settings) -> None:
    """List every setting with its value, unit and origin."""
    items = [
        {
            "setting": each.name,
            "value": _shown(getattr(settings, each.name)),
            "unit": each.unit,
            "origin": settings.origin(each.name),
            "default": each.default,
            "help": each.help,
        }
        for each in declarations()
    ]
    if form == "table":
        for item in items:
            item["value"] = str(item["value"])
    emit(
        "qdo.config/1",
        items,
        form,
        {
            "setting": "SETTING",
            "value": "VALUE",
            "unit": "UNIT",
            "origin": "ORIGIN",
            "help": "MEANING",
        },
    )


def _shown(value: Any) -> Any:
    """Return a value as JSON; tables without their omitted options."""
    if isinstance(value, tuple):
        return [_shown(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {name: _shown(each) for name, each in options.items() if each is not None}
    return value
