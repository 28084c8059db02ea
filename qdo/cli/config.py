"""`qdo config`: every setting in force, and where it came from."""

from __future__ import annotations

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
            "value": getattr(settings, each.name),
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
