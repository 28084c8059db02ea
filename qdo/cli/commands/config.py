"""`qdo config`: every setting with its value and origin."""

from __future__ import annotations

import dataclasses

import click

from qdo.cli.connections import open_coordinator
from qdo.cli.framework import import_app, output_option, report_overridden, with_settings
from qdo.cli.output import emit, print_message
from qdo.errors import UsageError
from qdo.fleet.live_settings import read_settings
from qdo.settings.listing import config_items
from qdo.settings.live import overlaid, pinned, read_live
from qdo.settings.settings import Settings, declarations

NAMES = tuple(each.name for each in declarations())


@click.command()
@click.argument("target", metavar="[MODULE:APP]", required=False)
@with_settings(*NAMES, import_app=False)
@click.option("--live", is_flag=True, help="Include the live settings; needs the coordinator.")
@output_option
def config(target: str | None, live: bool, form: str, settings: Settings) -> None:
    """List every setting with its value, unit and origin.

    With MODULE:APP, here or in the setting `app`, these are the settings in force, including those
    in the app's code.
    """
    if target is not None:
        settings = _of_app(settings, target)
    app, settings = import_app(settings)
    if live:
        settings = _with_live(settings, "" if app is None else app.origin)
    items = config_items(settings, {} if app is None else app.given)
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
    if app is not None:
        report_overridden(app, settings, NAMES)
    else:
        print_message(
            "hint: settings in the code of an app are not included, and override defaults; use "
            "`qdo config MODULE:APP`"
        )


def _of_app(settings: Settings, target: str) -> Settings:
    """Return the settings with the app that the argument names."""
    if ":" not in target:
        raise UsageError(reason=f"the argument must be MODULE:APP, got {target!r}; use --app NAME")
    origins = {**settings.origins, "app": "the argument MODULE:APP"}
    return dataclasses.replace(settings, app=target, origins=origins)


def _with_live(settings: Settings, code_origin: str) -> Settings:
    """Return the settings in force in a worker that has these settings."""
    with open_coordinator(settings) as (client, layout):
        current = read_settings(client, layout).current if client else None
    if current is None:
        return settings
    pins = pinned(settings, code_origin)
    return overlaid(settings, read_live(current.text), pins, f"live {current.number}")
