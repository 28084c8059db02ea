"""Reads and changes the live settings of an app (see `settings_machine`).

Functions raise NodeRefusedError if the account may not read or write the live settings. They raise
CoordinatorUnreachableError after a timeout, and LiveSettingsUnreadableError for a damaged node.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qdo.coordination.bulk_reads import names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp, NodeRead, Op, SetOp
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout, is_version_name
from qdo.coordination.znodes.values import load
from qdo.errors import (
    LiveSettingsReplacedError,
    LiveSettingsUnreadableError,
    NotFoundError,
    SettingsRefusedError,
    SettingsUnansweredError,
)
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import AuditTrail
from qdo.fleet.names import writer
from qdo.fleet.settings_machine import SettingsNode, SettingsReport, SettingsVersion, check_size
from qdo.system.clock import clock, polls
from qdo.text import join_some

NAMES_SHOWN = 5

# A function that takes the present node and returns the proposed text.
Edit = Callable[[SettingsNode], str]


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A worker's answer about live settings."""

    worker: str
    # None if the worker's version of qdo has no live settings, or if the worker has not published a
    # report yet.
    report: SettingsReport | None
    # The settings that the worker's own configuration sets, each with its source.
    pins: Mapping[str, str]

    def judges(self, version: SettingsVersion) -> bool:
        """Return whether the worker has accepted or refused a version."""
        return self.report is not None and version.id in (self.report.accepts, self.report.refuses)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """A version in force. After `seconds`, all workers except `late` used this version."""

    version: SettingsVersion
    before: SettingsVersion | None
    workers: Sequence[WorkerAnswer]
    late: Sequence[str]
    seconds: float


def version_path(layout: Layout, number: int) -> str:
    return f"{layout.fleet.settings}/{number:010d}"


def read_settings(client: Client, layout: Layout, *, damaged: bool = False) -> SettingsNode:
    """Return the live settings. With `damaged`, return even a damaged node, with its `fault`."""
    return _parsed(read(client, layout.fleet.settings), damaged)


def read_version(client: Client, layout: Layout, number: int) -> SettingsVersion:
    """Return a present or former version; raise NotFoundError if the version does not exist."""
    node = read(client, version_path(layout, number))
    if not isinstance(node, NodeRead):
        raise NotFoundError(what="version of the live settings", name=str(number))
    return _version(node.data)


def read_history(client: Client, layout: Layout, limit: int) -> list[SettingsVersion]:
    """Return the newest versions in force, newest first. Include damaged versions."""
    folder = layout.fleet.settings
    names = filter(is_version_name, names_below(client, folder))
    paths = [f"{folder}/{name}" for name in sorted(names, reverse=True)[:limit]]
    found = []
    for node in read_nodes(client, paths):
        try:
            found.append(_version(node.data))
        except LiveSettingsUnreadableError as error:
            number = int(node.path.rpartition("/")[2])
            found.append(SettingsVersion("", number, "", why=f"damaged: {error.details['reason']}"))
    return found


def read_answers(client: Client, layout: Layout) -> list[WorkerAnswer]:
    workers = list_workers(client, layout)
    folder = f"{layout.components}/worker"
    paths = [f"{folder}/{name}" for name in names_below(client, folder)]
    found: dict[str, WorkerAnswer] = {}
    for node in read_nodes(client, paths):
        value, _ = load(node.data)
        name = value.get("worker")
        live = value.get("live")
        if isinstance(name, str):
            found[name] = WorkerAnswer(name, SettingsReport.parse(live), _pins(live))
    return [found.get(name, WorkerAnswer(name, None, {})) for name in sorted(workers)]


def change_settings(
    client: Client,
    layout: Layout,
    edit: Edit,
    trail: AuditTrail,
    *,
    timeout_seconds: float = 10.0,
    force: bool = False,
    damaged: bool = False,
    why: str = "",
) -> SettingsChange | None:
    """Propose live settings, and put them into force once every worker accepts them.

    Return None if the settings would not change. Raise the errors of `propose`, `wait_accepted` and
    `put_into_force`. For `edit` and `damaged`, see `propose`.

    :param timeout_seconds: maximum time for workers to answer, and again for workers to use the
        settings.
    :param force: put the settings into force even if workers refuse them or do not answer. Workers
        that refuse the settings keep their present settings.
    """
    began = clock()
    proposal = propose(client, layout, edit, why, damaged=damaged)
    if proposal is None:
        return None
    try:
        workers: Sequence[WorkerAnswer] = ()
        try:
            workers = wait_accepted(client, layout, proposal, 0.0 if force else timeout_seconds)
        except (SettingsRefusedError, SettingsUnansweredError):
            if not force:
                raise
            workers = read_answers(client, layout)
        before = put_into_force(client, layout, proposal, trail)
    except BaseException:
        withdraw(client, layout, proposal)
        raise
    names = [each.worker for each in workers]
    late = wait_in_use(client, layout, proposal.number, names, 0.0 if force else timeout_seconds)
    return SettingsChange(proposal, before, workers, late, clock() - began)


def propose(
    client: Client, layout: Layout, edit: Edit, why: str = "", *, damaged: bool = False
) -> SettingsVersion | None:
    """Propose live settings to all workers; return None if the text is already in force.

    The proposal replaces any earlier proposal. Raise LiveSettingsSizeError if the text is too long.

    :param edit: a function that returns the text, or raises an error. `propose` calls the function
        again if another operator changes the node at the same time.
    :param damaged: whether to replace an unreadable node.
    """
    path = layout.fleet.settings
    id = uuid.uuid4().hex
    proposal: SettingsVersion | None = None

    def decide(node: Node) -> Sequence[Op] | None:
        nonlocal proposal
        before = _parsed(node, damaged)
        text = edit(before)
        if text == before.text and before.fault is None:
            proposal = None
            return None
        check_size(text)
        if not isinstance(node, NodeRead):  # no worker has ever started
            make_folder(client, path)
        number = next_number(client, layout, before)
        proposal = SettingsVersion(id, number, text, writer(), round(time.time(), 3), why)
        return [SetOp(path, SettingsNode(before.current, proposal).encode(), _version_of(node))]

    change(client, path, decide, root=layout.root, is_mine=lambda node: id.encode() in node.data)
    return proposal


def wait_accepted(
    client: Client, layout: Layout, proposal: SettingsVersion, timeout_seconds: float
) -> list[WorkerAnswer]:
    """Wait until every worker that is registered now has accepted a proposal or has departed.

    Raise SettingsRefusedError if a worker refuses the proposal, SettingsUnansweredError if a worker
    does not answer before the timeout, and LiveSettingsReplacedError if another proposal replaced
    this proposal.
    """
    asked: list[WorkerAnswer] = []
    late: list[WorkerAnswer] = []
    listed: set[str] | None = None
    for _ in polls(timeout_seconds):
        answers = read_answers(client, layout)
        # List workers after writing the proposal. Workers that register later read the proposal
        # themselves.
        listed = {each.worker for each in answers} if listed is None else listed
        asked = [each for each in answers if each.worker in listed]
        for each in asked:
            if each.report is not None and each.report.refuses == proposal.id:
                raise SettingsRefusedError(worker=each.worker, reason=each.report.why)
        late = [each for each in asked if not each.judges(proposal)]
        if not late:
            return asked
        _check_proposed(_parsed(read(client, layout.fleet.settings)), proposal)
    raise SettingsUnansweredError(
        seconds=timeout_seconds,
        count=len(asked),
        found=len(late),
        names=join_some([each.worker for each in late], NAMES_SHOWN),
    )


def put_into_force(
    client: Client, layout: Layout, proposal: SettingsVersion, trail: AuditTrail
) -> SettingsVersion | None:
    """Put a proposal into force, with an entry in the action log; return the former version.

    Raise LiveSettingsReplacedError if another proposal replaced this proposal.
    """
    path = layout.fleet.settings
    before: SettingsVersion | None = None
    with trail.change("live settings") as entry:

        def decide(node: Node) -> Sequence[Op]:
            nonlocal before
            found = _parsed(node)
            _check_proposed(found, proposal)
            before = found.current
            version = version_path(layout, proposal.number)
            return [
                SetOp(path, SettingsNode(proposal).encode(), _version_of(node)),
                CreateOp(version, proposal.encode()),
                entry({"version": found.number}, {"version": proposal.number}),
            ]

        change(
            client,
            path,
            decide,
            root=layout.root,
            is_mine=lambda node: SettingsNode.parse(node.data).current == proposal,
        )
    return before


def withdraw(client: Client, layout: Layout, proposal: SettingsVersion) -> None:
    """Withdraw a proposal, unless another proposal has replaced it."""
    path = layout.fleet.settings

    def decide(node: Node) -> Sequence[Op] | None:
        found = _parsed(node)
        if found.proposal is None or found.proposal.id != proposal.id:
            return None
        return [SetOp(path, replace(found, proposal=None).encode(), _version_of(node))]

    change(client, path, decide, root=layout.root)


def wait_in_use(
    client: Client, layout: Layout, number: int, workers: Iterable[str], timeout_seconds: float
) -> list[str]:
    """Wait until workers use a version or a later version; return the late workers."""
    wanted = set(workers)
    late: list[str] = []
    for _ in polls(timeout_seconds):
        late = [
            each.worker
            for each in read_answers(client, layout)
            if each.worker in wanted and (each.report is None or each.report.uses < number)
        ]
        if not late:
            break
    return late


def _parsed(node: Node, damaged: bool = False) -> SettingsNode:
    found = SettingsNode.parse(node.data) if isinstance(node, NodeRead) else SettingsNode()
    if found.fault is not None and not damaged:
        raise LiveSettingsUnreadableError(reason=found.fault)
    return found


def next_number(client: Client, layout: Layout, node: SettingsNode) -> int:
    """Return the number of the next version, which is larger than all kept numbers."""
    # If an operator wrote the node by hand, its number may be lower than the number of a kept
    # version. The next change could then never create its version.
    names = names_below(client, layout.fleet.settings)
    kept = max((int(name) for name in names if is_version_name(name)), default=0)
    return 1 + max(node.number, kept)


def _check_proposed(node: SettingsNode, proposal: SettingsVersion) -> None:
    if node.proposal is None or node.proposal.id != proposal.id:
        other = node.proposal or node.current
        raise LiveSettingsReplacedError(who="another operator" if other is None else other.who)


def _version(data: bytes) -> SettingsVersion:
    value, fault = load(data)
    try:
        if fault is not None:
            raise ValueError(fault)
        return SettingsVersion.parse(value)
    except ValueError as error:
        raise LiveSettingsUnreadableError(reason=str(error)) from error


def _version_of(node: Node) -> int:
    return node.version if isinstance(node, NodeRead) else 0


def _pins(live: Any) -> dict[str, str]:
    pins = live.get("pins") if isinstance(live, dict) else None
    if not isinstance(pins, dict):
        return {}
    return {name: origin for name, origin in pins.items() if isinstance(origin, str)}
