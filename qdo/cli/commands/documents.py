"""`qdo documents`: list, get, put and delete documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import click

from qdo.cli.changing import changing
from qdo.cli.connections import open_coordinator
from qdo.cli.options import COORDINATOR, output_option, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.coordination.bulk_reads import read_children
from qdo.coordination.protocol.machine import NodeMissing, NodeRead
from qdo.coordination.transactions import read
from qdo.encoding import decode_strictly
from qdo.errors import NotFoundError, UsageError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.documents import ANY, MAX_DOCUMENT_BYTES, CoordinatorDocuments, Documents
from qdo.fleet.names import checked_name
from qdo.settings.hosts import writer_shown

if TYPE_CHECKING:
    from qdo.cli.changing import Consent
    from qdo.coordination.client import Client
    from qdo.coordination.protocol.machine import CreateOp
    from qdo.coordination.transactions import Node
    from qdo.coordination.znodes.layout import Layout
    from qdo.fleet.audit import Entry
    from qdo.fleet.folder_view import CopiedNode
    from qdo.settings.settings import Settings

_MOST_INPUT_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Longest JSON text: white space and escapes can make it longer than the stored value."""


@click.group()
def documents() -> None:
    """Manage documents: JSON values that every process of an app reads from its memory.

    \b
    qdo documents list --app shop:app
    qdo documents list --app shop:app plans
    qdo documents get --app shop:app plans acme
    qdo documents put --app shop:app plans acme '{"quota": 100}'
    qdo documents delete --app shop:app plans acme

    SET is the name that the app gave to `app.documents`.
    """


def _if_version(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--if-version",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only if the document has this version, as `list` shows it; else exit code 5.",
    )(function)


@documents.command("list")
@click.argument("set_name", metavar="[SET]", required=False)
@with_settings(*COORDINATOR)
@output_option
def list_(set_name: str | None, form: str, settings: Settings) -> None:
    """List the documents of a set; without SET, list the sets."""
    with open_coordinator(settings) as (client, layout):
        if set_name is None:
            _list_sets(client, layout, form)
            return
        found = _documents(client, layout, set_name, settings).entries() if client else {}
    if not found:
        print_message(f"hint: set {set_name!r} has no documents")
    items = [_item(name, entry, form) for name, entry in sorted(found.items())]
    columns = ("document", "version", "written", "by", "value")
    emit("qdo.documents/1", items, form, columns)


def _list_sets(client: Client | None, layout: Layout, form: str) -> None:
    names = read_children(client, [layout.fleet.documents]) if client else {}
    folders = [layout.fleet.document_set(name) for name in names.get(layout.fleet.documents, [])]
    found = read_children(client, folders) if client else {}
    if not found:
        print_message("hint: the app has no documents yet; see `qdo documents put --help`")
    items = [
        {"set": path.rpartition("/")[2], "documents": len(below)} for path, below in found.items()
    ]
    emit("qdo.document-sets/1", items, form, ("set", "documents"))


def _item(name: str, entry: CopiedNode, form: str) -> dict[str, Any]:
    readable = entry.fault is None
    value = entry.value.value if readable else None
    return {
        "document": name,
        "version": entry.version,
        "bytes": entry.size,
        "written": iso_time(entry.value.at or None) if readable else None,
        "by": entry.value.by if readable else None,
        "value": entry.fault or _json(value) if form == "table" else value,
        "fault": entry.fault,
    }


@documents.command()
@click.argument("set_name", metavar="SET")
@click.argument("name")
@with_settings(*COORDINATOR)
def get(set_name: str, name: str, settings: Settings) -> None:
    """Write the value of a document to stdout, as JSON."""
    checked_name("document", name)
    with open_coordinator(settings) as (client, layout):
        found = _documents(client, layout, set_name, settings) if client else {}
        if name not in found:
            raise NotFoundError(what="document", name=name)
        sys.stdout.write(_json(found[name], indent=1) + "\n")


@documents.command()
@click.argument("set_name", metavar="SET")
@click.argument("name")
@click.argument("value")
@_if_version
@click.option("--create", is_flag=True, help="Only if there is no such document.")
@changing
@with_settings(*COORDINATOR)
@output_option
def put(
    set_name: str,
    name: str,
    value: str,
    if_version: int | None,
    create: bool,
    **options: Any,
) -> None:
    """Write a document: VALUE is JSON, or - to read it from stdin."""
    if create and if_version is not None:
        raise UsageError(reason="give --create or --if-version, not both")
    parsed = _parsed(value)
    version = None if create else ANY if if_version is None else if_version

    def change(found: Documents) -> None:
        found.put(name, parsed, if_version=version)

    _change("put", set_name, name, change, **options)


@documents.command()
@click.argument("set_name", metavar="SET")
@click.argument("name")
@_if_version
@changing
@with_settings(*COORDINATOR)
@output_option
def delete(set_name: str, name: str, if_version: int | None, **options: Any) -> None:
    """Delete a document."""
    version = ANY if if_version is None else if_version
    _change(
        "delete", set_name, name, lambda found: found.delete(name, if_version=version), **options
    )


def _change(
    verb: str,
    set_name: str,
    name: str,
    change: Callable[[Documents], object],
    *,
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    create = verb == "put" and not consent.dry_run
    with open_coordinator(settings, create=create) as (client, layout):
        node: Node = NodeMissing()
        if client is not None:
            change(_documents(client, layout, set_name, settings, dry_run=True))  # checks it
            node = read(client, f"{layout.fleet.document_set(set_name)}/{name}")
        elif verb == "delete":
            raise NotFoundError(what="document", name=name)
        version = node.version if isinstance(node, NodeRead) else None
        item = {"set": set_name, "document": name, "change": verb, "version": version}
        what = f"{verb} document {name!r}"
        asks = verb == "delete"
        if consent.given(what, partial(_show_change, item, False), form, asks=asks) and client:
            trail = AuditTrail(client, layout, f"documents {verb}", consent.reason)
            with trail.change(f"{set_name}/{name}") as entry:
                change(_documents(client, layout, set_name, settings, entry))
            _show_change(item, True, form)


def _show_change(
    item: dict[str, Any], executed: bool, form: str, out: TextIO | None = None
) -> None:
    columns = {"set": "SET", "document": "DOCUMENT", "change": "CHANGE", "version": "OLD VERSION"}
    emit("qdo.documents-change/1", [{**item, "executed": executed}], form, columns, out)


def _documents(
    client: Client,
    layout: Layout,
    name: str,
    settings: Settings,
    entry: Entry | None = None,
    *,
    dry_run: bool = False,
) -> Documents:
    """Return a set; `entry` makes the entry of a change in the action log."""

    def record(node: Node) -> CreateOp:
        # Log no values: documents may be large, and not every reader of the log may read them.
        version = node.version if isinstance(node, NodeRead) and node.version >= 0 else None
        return entry({"version": version}, {})  # type: ignore[misc]

    store = CoordinatorDocuments(
        client,
        layout,
        settings.connect_seconds,
        writer_shown(settings),
        None if entry is None else record,
        dry_run,
    )
    return Documents(name, lambda: store)


def _parsed(text: str) -> Any:
    try:
        text = _standard_input() if text == "-" else text
        return decode_strictly(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
        raise UsageError(
            reason=f"the value of a document must be JSON, got {text[:60]!r}: {reason}; write text"
            " in double quotes, as in '\"text\"'"
        ) from error


def _standard_input() -> str:
    data = sys.stdin.buffer.read(_MOST_INPUT_BYTES + 1)
    if len(data) > _MOST_INPUT_BYTES:
        raise UsageError(
            reason=f"the value of a document must have at most {MAX_DOCUMENT_BYTES} bytes, got more"
            f" than {_MOST_INPUT_BYTES}; store a reference to a larger value, or split it"
        )
    return data.decode()


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=True, indent=indent)
