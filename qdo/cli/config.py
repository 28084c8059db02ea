"""`qdo config`: every setting in force, and where it came from."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from qdo.cli.output import emit
from qdo.cli.shell import output_option, with_settings
from qdo.settings import Settings, declarations


@click.command()
@with_settings(*(each.name for each in declarations()))
@output_option
def config(form: str, settings: Settings) -> None:
    """List every setting: its value, unit, and where the value came from."""
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
    """Return a value as JSON can hold it: tables without what they leave out."""
    if isinstance(value, tuple):
        return [_shown(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        said = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {name: _shown(each) for name, each in said.items() if each is not None}
    return value
