"""The commands of `qdo documents`: list, get, put and delete."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import open_coordinator
from qdo.cli.options import COORDINATOR, with_output, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.coordination.bulk_reads import names_below, read_children
from qdo.coordination.protocol.machine import CreateOp, NodeMissing, NodeRead
from qdo.coordination.transactions import Node, read
from qdo.encoding import decode_strictly
from qdo.errors import NotFoundError, UsageError
from qdo.fleet.audit import AuditTrail, Entry
from qdo.fleet.documents import ANY, MAX_DOCUMENT_BYTES, CoordinatorDocuments, Documents
from qdo.fleet.names import checked_name
from qdo.settings.hosts import writer_shown

if TYPE_CHECKING:
    from qdo.coordination.client import Client
    from qdo.coordination.znodes.layout import Layout
    from qdo.fleet.folder_view import CopiedNode
    from qdo.settings.settings import Settings

# Maximum length of the JSON text. With white space and escapes, the text can be longer than the
# stored value.
_MOST_INPUT_BYTES = 4 * MAX_DOCUMENT_BYTES


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
@with_output(*COORDINATOR)
def list_(set_name: str | None, form: str, settings: Settings) -> None:
    """List the documents of a set; without SET, list the sets."""
    with open_coordinator(settings) as (client, layout):
        if set_name is None:
            _list_sets(client, layout, form)
            return
        entries = _documents(client, layout, set_name, settings).entries() if client else {}
    if not entries:
        print_message(f"hint: set {set_name!r} has no documents")
    items = [_item(name, entry) for name, entry in sorted(entries.items())]
    columns = ("document", "version", "written", "by", "value")
    emit("qdo.documents/1", items, form, columns, cells=_value_cell)


def _list_sets(client: Client | None, layout: Layout, form: str) -> None:
    names = names_below(client, layout.fleet.documents) if client else []
    folders = [layout.fleet.document_set(name) for name in names]
    sets = read_children(client, folders) if client else {}
    if not sets:
        print_message("hint: the app has no documents yet; see `qdo documents put --help`")
    items = [
        {"set": path.rpartition("/")[2], "documents": len(below)} for path, below in sets.items()
    ]
    emit("qdo.document-sets/1", items, form, ("set", "documents"))


def _item(name: str, entry: CopiedNode) -> dict[str, Any]:
    readable = entry.fault is None
    return {
        "document": name,
        "version": entry.version,
        "bytes": entry.size,
        "written": iso_time(entry.value.at or None) if readable else None,
        "by": entry.value.by if readable else None,
        "value": entry.value.value if readable else None,
        "fault": entry.fault,
    }


def _value_cell(item: Mapping[str, Any]) -> dict[str, str]:
    return {"value": item["fault"] or json.dumps(item["value"])}


@documents.command()
@click.argument("set_name", metavar="SET")
@click.argument("name")
@with_settings(*COORDINATOR)
def get(set_name: str, name: str, settings: Settings) -> None:
    """Write the value of a document to stdout, as JSON."""
    checked_name("document", name)
    with open_coordinator(settings) as (client, layout):
        values = _documents(client, layout, set_name, settings) if client else {}
        if name not in values:
            raise NotFoundError(what="document", name=name)
        sys.stdout.write(json.dumps(values[name], indent=1) + "\n")


@documents.command()
@click.argument("set_name", metavar="SET")
@click.argument("name")
@click.argument("value")
@_if_version
@click.option("--create", is_flag=True, help="Only if there is no such document.")
@changing(*COORDINATOR)
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

    def change(document_set: Documents) -> None:
        document_set.put(name, parsed, if_version=version)

    _change("put", set_name, name, change, **options)


@documents.command()
@click.argument("set_name", metavar="SET")
@click.argument("name")
@_if_version
@changing(*COORDINATOR)
def delete(set_name: str, name: str, if_version: int | None, **options: Any) -> None:
    """Delete a document."""
    version = ANY if if_version is None else if_version

    def change(document_set: Documents) -> None:
        document_set.delete(name, if_version=version)

    _change("delete", set_name, name, change, **options)


def _change(
    verb: str,
    set_name: str,
    name: str,
    change: Callable[[Documents], object],
    *,
    consent: Consent,
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
        effect = Effect(
            "qdo.documents-change/1",
            ("set", "document", "change", "old_version"),
            [item],
            lambda item: {"old_version": item["version"]},
        )
        if (
            consent.given(f"{verb} document {name!r}", effect.show, asks=verb == "delete")
            and client
        ):
            trail = AuditTrail(client, layout, f"documents {verb}", consent.reason)
            with trail.change(f"{set_name}/{name}") as entry:
                change(_documents(client, layout, set_name, settings, entry))
            effect.show(consent.form, executed=True)


def _documents(
    client: Client,
    layout: Layout,
    name: str,
    settings: Settings,
    entry: Entry | None = None,
    *,
    dry_run: bool = False,
) -> Documents:
    """Return a set of documents. `entry` makes the entry in the action log for a change."""

    def record(node: Node) -> CreateOp:
        # Do not log values. Documents may be large, and some readers of the log may not read
        # documents.
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
