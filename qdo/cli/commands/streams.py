"""The commands of `qdo streams`, which list, split and merge the shards of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from qdo.brokers import streams as ranges
from qdo.brokers.base import Broker
from qdo.brokers.streams import StreamShard
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import note_in_action_log, open_connections
from qdo.cli.options import require_app, with_output
from qdo.cli.output import emit, print_message
from qdo.cli.readings import SHARED
from qdo.connections.opened import Connections
from qdo.errors import NotFoundError
from qdo.fleet.owners import find_owner
from qdo.ops.streams import reshard, shard_items
from qdo.sending.streams import check_stream_key
from qdo.settings.settings import Settings

_COLUMNS = ("shard", "state", "owner", "backlog", "from")


@click.group()
def streams() -> None:
    """List the shards of streams, and divide one that is too hot.

    \b
    qdo streams list --app site:app user
    qdo streams locate --app site:app user ada@example.org
    qdo streams split --app site:app user.40-80 --reason "hot"
    qdo streams merge --app site:app user.40-60 user.60-80

    A shard is the queue of a range of keys. The messages that are sent after a split go to its
    children. They begin when their parent is done, so the messages of a key keep their order.
    """


@contextmanager
def _opened(
    settings: Settings, name: str, what: str = "stream"
) -> Iterator[tuple[Connections, Broker, list[StreamShard]]]:
    """Yield the connections and all shards of a stream. `what` is "shard" if `name` is a shard."""
    require_app(settings)
    with open_connections(settings) as connections:
        broker = connections.known_broker()
        shards = []
        if broker is not None:
            stream = name if what == "stream" else broker.streams.stream_of(name)
            shards = broker.streams.shards(stream)
        if broker is None or not shards:
            raise NotFoundError(what=what, name=name)
        ranges.check_ranges(shards)
        yield connections, broker, shards


@streams.command("list")
@click.argument("stream", required=False)
@click.option("--all", "with_done", is_flag=True, help="Also list shards that are done.")
@with_output(*SHARED)
def list_(stream: str | None, with_done: bool, form: str, settings: Settings) -> None:
    """List the shards of all streams, or of one.

    \b
    open     its messages are processed, and more come
    sealed   no more messages come, and its last one is not done
    hidden   it gets messages, and begins when the shards in FROM are done
    done     its last message is done; `qdo delete` may delete it
    """
    require_app(settings)
    with open_connections(settings) as connections:
        fleet = connections.known_fleet()
        shards = [] if fleet is None else fleet.broker.streams.shards(stream)
        if not shards and stream is not None:
            raise NotFoundError(what="stream", name=stream)
        items = shard_items(fleet, shards) if fleet is not None and shards else []
    if not shards:
        print_message("hint: the app has no streams yet: the first message creates one")
    listed = [each for each in items if with_done or each["state"] != "done"]
    emit(
        "qdo.streams/1",
        listed,
        form,
        _COLUMNS,
        cells=lambda item: {"from": " ".join(item["parents"])},
    )


@streams.command()
@click.argument("stream")
@click.argument("key")
@with_output(*SHARED)
def locate(stream: str, key: str, form: str, settings: Settings) -> None:
    """Show which shard has a key, and which worker serves it.

    ADDRESS is the setting `address` of that worker.
    """
    check_stream_key(key)
    with _opened(settings, stream) as (connections, _, shards):
        hashed = ranges.key_hash(key)
        (shard,) = (each for each in shards if each.end is None and each.has(hashed))
        client = connections.client
        owner = None if client is None else find_owner(client, connections.layout, shard.queue)
    item = {"key": key, "hash": hashed, "shard": shard.queue, "state": shard.state}
    for name in ("worker", "process", "zone", "address"):
        item[name] = getattr(owner, name, "") or None  # type: ignore[assignment]
    columns = ("shard", "state", "worker", "process", "zone", "address")
    emit("qdo.streams-locate/1", [item], form, columns)


@streams.command()
@click.argument("shard")
@click.option("--at", metavar="BOUND", help="The first hash of the second child, such as 60.")
@changing(*SHARED)
def split(shard: str, at: str | None, consent: Consent, settings: Settings) -> None:
    """Divide a shard into two children, by default in the middle of its range."""
    _change("split", [shard], lambda shards: ranges.split(shards, shard, at), consent, settings)


@streams.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD SHARD...")
@changing(*SHARED)
def merge(shards: tuple[str, ...], consent: Consent, settings: Settings) -> None:
    """Let shards whose ranges are neighbors become one."""
    _change("merge", shards, lambda siblings: ranges.merge(siblings, *shards), consent, settings)


def _change(
    verb: str,
    parents: Sequence[str],
    plan: Callable[[list[StreamShard]], list[StreamShard]],
    consent: Consent,
    settings: Settings,
) -> None:
    """Replace shards by other shards, and then write an entry to the action log."""
    with _opened(settings, parents[0], "shard") as (_, broker, shards):
        children = plan(shards)
        items = [
            {"shard": each.queue, "low": each.low, "high": each.high, "parents": list(parents)}
            for each in children
        ]
        target = " ".join(parents)
        columns = {"shard": "SHARD", "low": "LOW", "high": "HIGH", "parents": "FROM"}
        effect = Effect(f"qdo.streams-{verb}/1", columns, items, lambda item: {"parents": target})
        if not consent.given(f"{verb} {target}", effect.show, asks=False):
            return
        reshard(broker, children)
    names = " ".join(each.queue for each in children)
    note_in_action_log(
        settings,
        f"streams {verb}",
        target,
        {"state": "open"},
        {"state": "sealed", "children": names},
        consent.reason,
    )
    effect.show(consent.form, executed=True)
    print_message(f"hint: workers begin with {names} once they are done with {target}")
