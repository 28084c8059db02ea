"""`qdo keys`: make, list and retire the keys of the key ring."""

from __future__ import annotations

from functools import partial
from typing import Any, TextIO, cast

import click

from qdo.cli.changing import Consent, changing_unlogged
from qdo.cli.framework import output_option, with_settings
from qdo.cli.output import emit, print_message
from qdo.encryption.key_ring import (
    PURPOSES,
    Key,
    Purpose,
    change_keys,
    new_key,
    read_keys,
    retired,
)
from qdo.errors import UsageError
from qdo.settings.settings import Settings


@click.group()
def keys() -> None:
    """Manage the keys that encrypt bodies and mark ids: the file of the setting `keys`.

    \b
    qdo keys new --keys /etc/qdo/keys
    qdo keys list --keys /etc/qdo/keys
    qdo keys retire --keys /etc/qdo/keys 3f2a9c01

    The first key of a purpose is in use, and all are accepted. To rotate: make a new key, copy the
    file to all hosts, retire the old key, copy the file again. Delete the old key when no message
    needs it. Processes read the file again when it changes.
    """


@keys.command()
@click.argument("purpose", default="encrypt", type=click.Choice(PURPOSES))
@with_settings("keys", import_app=False)
def new(purpose: str, settings: Settings) -> None:
    """Add a key, and print its id. Without a file, make it, with mode 0600.

    The new key comes last: it is used once the keys before it are retired.
    """
    key = new_key(cast("Purpose", purpose))
    others: list[Key] = []

    def add(before: tuple[Key, ...]) -> list[Key]:
        others.extend(each for each in before if each.purpose == key.purpose)
        return [*before, key]

    change_keys(_path(settings), add)
    click.echo(key.id)
    if others:
        print_message(
            f"key {others[0].id} remains in use; copy the file to all hosts, then run "
            f"`qdo keys retire {others[0].id}`"
        )


@keys.command("list")
@with_settings("keys", import_app=False)
@output_option
def list_(form: str, settings: Settings) -> None:
    """List the keys in their order, without their bytes."""
    used: set[str] = set()
    items: list[dict[str, Any]] = []
    for key in read_keys(_path(settings)):
        items.append({"id": key.id, "purpose": key.purpose, "in_use": key.purpose not in used})
        used.add(key.purpose)
    if form == "table":
        for item in items:
            item["in_use"] = "yes" if item["in_use"] else "no"
    emit("qdo.keys/1", items, form, {"id": "ID", "purpose": "PURPOSE", "in_use": "IN USE"})


@keys.command()
@click.argument("id")
@click.option("--delete", is_flag=True, help="Delete the key: messages that need it wait forever.")
@changing_unlogged
@with_settings("keys", import_app=False)
@output_option
def retire(id: str, delete: bool, consent: Consent, form: str, settings: Settings) -> None:
    """Stop using key ID for new messages: the next key of its purpose comes first.

    It continues to decrypt until it is deleted.
    """
    path, change = _path(settings), "delete" if delete else "retire"
    before = read_keys(path)
    retired(before, id, delete)  # checks it
    purpose = next(key.purpose for key in before if key.id == id)
    item = {"id": id, "purpose": purpose, "change": change}
    if consent.given(f"{change} key {id}", partial(_show_retired, item, False), form, asks=delete):
        change_keys(path, lambda before: retired(before, id, delete))
        _show_retired(item, True, form)


def _show_retired(
    item: dict[str, str], executed: bool, form: str, out: TextIO | None = None
) -> None:
    columns = {name: name.upper() for name in item}
    emit("qdo.keys-retire/1", [{**item, "executed": executed}], form, columns, out)


def _path(settings: Settings) -> str:
    if not settings.keys:
        raise UsageError(reason="a key file must be named; use --keys FILE or QDO_KEYS=FILE")
    return settings.keys
