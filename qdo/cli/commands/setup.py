"""`qdo config` and `qdo admin acl`, `broker` and `keys`, which set up an app and its hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import click

from qdo.brokers.registry import BrokerSchema, schema_of
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import from_coordinator, open_coordinator
from qdo.cli.options import (
    COORDINATOR,
    import_app,
    report_overridden,
    with_output,
    with_settings,
)
from qdo.cli.output import emit, print_message
from qdo.coordination.znodes.layout import Layout
from qdo.encryption.key_ring import (
    PURPOSES,
    Key,
    Purpose,
    change_keys,
    new_key,
    read_keys,
    retired,
)
from qdo.errors import PartialFailureError, SettingsError, UsageError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.live_settings import read_settings
from qdo.fleet.settings_machine import SettingsNode
from qdo.ops.acl import AclDifference, acl_differences, apply_acls
from qdo.ops.broker import broker_node, check_reset, reset_broker
from qdo.postgresql.url import split_chroot
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.listing import config_items
from qdo.settings.live import with_version
from qdo.settings.settings import Settings, declarations
from qdo.text import hide_credentials, join_some, pluralize

_COLUMNS = {"path": "NODE", "found": "FOUND", "expected": "EXPECTED"}
KINDS = ("sender", "worker", "onlooker", "viewer")
CURRENT = "the schema is current; nothing to do"
GRANTS = (
    "hint: run the statements of `qdo admin broker grants ROLE --for KIND` again for each role"
    " before you start workers and senders of this version"
)
NAMES = tuple(each.name for each in declarations())
# Exit code of `qdo admin acl check` if the rights on a node differ.
DIFFERENT = 1


@click.group()
def acl() -> None:
    """Check and correct the rights on the znodes of an app; the settings acl* define them."""


@acl.command()
@with_output(*COORDINATOR)
def check(form: str, settings: Settings) -> int:
    """List the nodes whose rights differ from the settings; exit code 1 if there are any.

    Any account may check the nodes that it may read; for others FOUND is -.
    """
    differences = from_coordinator(settings, acl_differences, [])
    emit("qdo.acl/1", map(dataclasses.asdict, differences), form, _COLUMNS)
    if not differences:
        print_message("every node has the rights of the settings")
        return 0
    verb = "differs" if len(differences) == 1 else "differ"
    print_message(
        f"{pluralize(len(differences), 'node')} {verb} from the settings; run `qdo admin acl apply`"
    )
    return DIFFERENT


@acl.command()
@changing(*COORDINATOR)
def apply(consent: Consent, settings: Settings) -> None:
    """Give every node the rights of the settings; list the nodes that differed.

    This needs an account with all rights on these nodes; exit code 4 if some refuse it. With
    `acl = "open"` it opens all nodes again.
    """
    with open_coordinator(settings) as (client, layout):
        differences = acl_differences(client, layout) if client else []
        what = f"correct the rights on {pluralize(len(differences), 'node')}"
        effect = Effect("qdo.acl/1", _COLUMNS, [dataclasses.asdict(each) for each in differences])
        if not consent.given(what, effect.show, asks=len(differences) > 1):
            return
        refused = apply_acls(client, differences) if client else {}
        if client is not None and len(differences) > len(refused):
            trail = AuditTrail(client, layout, "admin acl apply", consent.reason)
            _note_correction(trail, differences, refused)
    items = [{**each, "executed": each["path"] not in refused} for each in effect.items]
    emit("qdo.acl/1", items, consent.form, _COLUMNS)
    if refused:
        raise PartialFailureError(
            done=len(differences) - len(refused),
            total=len(differences),
            what="nodes have the rights of the settings now",
            rest=join_some([f"{path} ({why})" for path, why in refused.items()]),
        )
    print_message(f"corrected {pluralize(len(differences), 'node')}")


@acl.command()
@with_settings("coordinator", import_app=False)
def account(settings: Settings) -> None:
    """Print the account of the settings as acl_workers and its siblings need it."""
    access = coordinator_access(settings, Layout(""))
    if access.account is None:
        raise SettingsError(name="coordinator_auth", reason="set it to digest:NAME or sasl:NAME")
    identity = access.account.identity
    click.echo(f"{identity.scheme}:{identity.id}")


def _note_correction(
    audit: AuditTrail, differences: Sequence[AclDifference], refused: Collection[str]
) -> None:
    # A transaction cannot change rights. Therefore the command writes the entry after the change.
    before = {"differing": len(differences)}
    fault = audit.note(differences[-1].path, before, {"differing": len(refused)})
    if fault is not None:
        print_message(f"hint: this change has no entry in the action log: {fault}")


@click.group()
def broker() -> None:
    """Show the broker file that the workers share; prepare a database."""


@broker.command()
@click.option("--reset", is_flag=True, help="Forget the file: the next worker decides.")
@changing(*COORDINATOR)
def file(reset: bool, consent: Consent, settings: Settings) -> None:
    """Show the broker file that all workers of an app must use, as their first worker opened it.

    A worker with another file does not start: exit code 2. To change the file, stop all workers and
    run this command with --reset: positions stay, and messages in the old file stay there. Other
    brokers have nothing to compare.
    """
    with open_coordinator(settings) as (client, layout):
        node = broker_node(client, layout) if client else None
        if client is None or node is None:
            print_message(
                f"hint: no worker of app {settings.app!r} has registered with a broker file"
            )
            emit("qdo.broker/1", [], consent.form)
            return
        item = {"address": node.address, "host": node.host, "id": node.id}
        if not reset:
            emit("qdo.broker/1", [item], consent.form, item.keys())
            return
        check_reset(client, layout)
        effect = Effect("qdo.broker/1", item.keys(), [item])
        if consent.given(f"forget the broker file of app {settings.app!r}", effect.show):
            reset_broker(client, layout, consent.reason)
            print_message("this file was forgotten; the next worker that registers decides")
            effect.show(consent.form, executed=True)


@broker.command()
@click.option("--print", "printing", is_flag=True, help="Print the SQL statements; change nothing.")
@click.option(
    "--partition-seconds",
    type=click.IntRange(1, 31 * 86400),
    default=3600,
    metavar="SECONDS",
    help="Length of a partition, 3600 by default. Only for a new schema.",
)
@changing("app", "broker", "coordinator", logged=False)
def init(printing: bool, partition_seconds: int, consent: Consent, settings: Settings) -> None:
    """Create or upgrade qdo's schema in PostgreSQL; a schema that is current stays.

    That is the schema of broker and coordinator. If they have two databases, both get it.
    """
    databases = _databases(settings)
    if printing:
        click.echo(databases[0][1].script(databases[0][0], partition_seconds), nl=False)
        return
    changes = {url: schema.change(url) for url, schema in databases}
    planned = _schemas_effect(changes)
    if consent.dry_run and not any(changes.values()):
        planned.show(consent.form)
        print_message(CURRENT)
        return
    verbs = " and ".join(filter(None, dict.fromkeys(changes.values())))
    if not consent.given(f"{verbs} the schema", planned.show, asks=False):
        return
    for url, schema in databases:
        if not schema.create(url, partition_seconds):
            changes[url] = ""
    if consent.form != "table":
        _schemas_effect(changes, executed=True).show(consent.form)
    for url, change in changes.items():
        where = f" in {hide_credentials(url)}" if len(changes) > 1 else ""
        if change:
            print_message(f"{change}d the schema{where}")
            if change == "upgrade":
                print_message(GRANTS)
    if not any(changes.values()):
        print_message(CURRENT)


def _databases(settings: Settings) -> list[tuple[str, BrokerSchema]]:
    """Return the databases of broker and coordinator; raise UnsupportedError if there are none."""
    addresses = (settings.broker, split_chroot(settings.coordinator)[0])
    urls = [url for url in dict.fromkeys(addresses) if url.startswith("postgresql://")]
    return [(url, schema_of(url)) for url in urls or [settings.broker]]


def _schemas_effect(changes: Mapping[str, str], *, executed: bool = False) -> Effect:
    items = [
        {
            "database": hide_credentials(url),
            "schema": change or "current",
            "executed": executed and bool(change),
        }
        for url, change in changes.items()
    ]
    return Effect("qdo.broker-init/1", ("database", "schema"), items)


@broker.command()
@click.argument("role")
@click.option(
    "--for", "kind", type=click.Choice(KINDS), required=True, help="What the role is to do."
)
@with_settings("app", "broker", "coordinator")
def grants(role: str, kind: str, settings: Settings) -> None:
    """Print the SQL statements that give a role of PostgreSQL the rights that it needs.

    Run them as the owner of the schema, for instance with psql.
    """
    databases = _databases(settings)
    for url, schema in databases:
        if len(databases) > 1:
            click.echo(f"-- in {hide_credentials(url)}")
        for statement in schema.grants(url, role, kind):
            click.echo(f"{statement};")


@click.group()
def keys() -> None:
    """Manage the keys that encrypt bodies and mark ids: the file of the setting `keys`.

    \b
    qdo admin keys new --keys /etc/qdo/keys
    qdo admin keys list --keys /etc/qdo/keys
    qdo admin keys retire --keys /etc/qdo/keys 3f2a9c01

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
            f"`qdo admin keys retire {others[0].id}`"
        )


@keys.command("list")
@with_output("keys", import_app=False)
def list_(form: str, settings: Settings) -> None:
    """List the keys in their order, without their bytes."""
    used: set[str] = set()
    items: list[dict[str, Any]] = []
    for key in read_keys(_path(settings)):
        items.append({"id": key.id, "purpose": key.purpose, "in_use": key.purpose not in used})
        used.add(key.purpose)
    emit("qdo.keys/1", items, form, ("id", "purpose", "in_use"))


@keys.command()
@click.argument("id")
@click.option("--delete", is_flag=True, help="Delete the key: messages that need it wait forever.")
@changing("keys", import_app=False, logged=False)
def retire(id: str, delete: bool, consent: Consent, settings: Settings) -> None:
    """Stop using key ID for new messages: the next key of its purpose comes first.

    It continues to decrypt until it is deleted. Key bytes are in the file and nowhere else.
    """
    path = _path(settings)
    change = "delete" if delete else "retire"
    before = read_keys(path)
    retired(before, id, delete)  # checks the change
    purpose = next(key.purpose for key in before if key.id == id)
    item = {"id": id, "purpose": purpose, "change": change}
    effect = Effect("qdo.keys-retire/1", item.keys(), [item])
    if consent.given(f"{change} key {id}", effect.show, asks=delete):
        change_keys(path, lambda keys: retired(keys, id, delete))
        effect.show(consent.form, executed=True)


def _path(settings: Settings) -> str:
    if not settings.keys:
        raise UsageError(reason="a key file must be named; use --keys FILE or QDO_KEYS=FILE")
    return settings.keys


@click.command()
@click.argument("target", metavar="[MODULE:APP]", required=False)
@click.option("--live", is_flag=True, help="Include the live settings; needs the coordinator.")
@with_output(*NAMES, import_app=False)
def config(target: str | None, live: bool, form: str, settings: Settings) -> None:
    """List every setting with its value, unit and origin.

    With MODULE:APP, here or in the setting `app`, these are the settings in force, including those
    in the app's code. A hint on stderr names each value that overrides one in the code, which JSON
    has as `code`. Every setting is an option, so you can try out a command line.
    """
    if target is not None:
        settings = _of_app(settings, target)
    app, settings = import_app(settings)
    if live:
        settings = _with_live(settings, "" if app is None else app.origin)
    items = config_items(settings, {} if app is None else app.given)
    columns = {name: name.upper() for name in ("setting", "value", "unit", "origin")}
    columns["help"] = "MEANING"
    emit("qdo.config/1", items, form, columns, cells=lambda item: {"value": str(item["value"])})
    if app is not None:
        report_overridden(app, settings, NAMES)
    else:
        print_message(
            "hint: settings in the code of an app are not included, and override defaults; use "
            "`qdo config MODULE:APP`"
        )


def _of_app(settings: Settings, target: str) -> Settings:
    if ":" not in target:
        raise UsageError(reason=f"the argument must be MODULE:APP, got {target!r}; use --app NAME")
    origins = {**settings.origins, "app": "the argument MODULE:APP"}
    return dataclasses.replace(settings, app=target, origins=origins)


def _with_live(settings: Settings, code_origin: str) -> Settings:
    """Return the settings in force of a worker with these settings, including the live settings."""
    current = from_coordinator(settings, read_settings, SettingsNode()).current
    return with_version(settings, current, code_origin)
