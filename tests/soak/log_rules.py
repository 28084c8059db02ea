"""The rules of settings and limits, checked in ZooKeeper's own record of all transactions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.limit_node import LimitNode, ShareHolders
from qdo.fleet.permit_counts import targets
from qdo.fleet.settings_machine import SettingsNode, SettingsReport, SettingsVersion
from tests.support.zookeeper_txn_log import Txn


class FlipRules:
    """Replays the log: a version comes into force only if every worker of its time accepts it.

    :ivar flips: number of versions that came into force.
    :ivar violations: in the order of the log.
    :param root: path of the app's node, with the chroot.
    """

    def __init__(self, root: str) -> None:
        self.flips = 0
        self.violations: list[str] = []
        self._root = root
        self._workers: set[str] = set()
        self._reports: dict[str, dict[str, SettingsReport | None]] = {}
        self._asked: dict[str, set[str]] = {}
        self._node = SettingsNode()

    def replay(self, log: Iterator[Txn]) -> None:
        for txn in log:
            for change in txn.changes:
                self._apply(change.path.removeprefix(self._root), change.data)

    def _apply(self, path: str, data: bytes | None) -> None:
        folder, _, name = path.rpartition("/")
        if folder == "/workers":
            (self._workers.discard if data is None else self._workers.add)(name)
        elif folder == "/components/worker":
            value = json.loads(data) if data else {}
            report = SettingsReport.parse(value.get("live"))
            self._reports[path] = {value["worker"]: report} if "worker" in value else {}
        elif path == "/settings" and data is not None:
            self._changed(SettingsNode.parse(data))

    def _changed(self, node: SettingsNode) -> None:
        if node.fault is not None:
            self.violations.append(f"settings: {node.fault}")
        if node.proposal is not None:
            self._asked.setdefault(node.proposal.id, set(self._workers))
        if node.current is not None and node.current != self._node.current:
            self._came_into_force(node.current)
        self._node = node

    def _came_into_force(self, version: SettingsVersion) -> None:
        self.flips += 1
        what = f"settings: version {version.number} came into force"
        if version != self._node.proposal:
            self.violations.append(f"{what} without its proposal")
        if version.number != self._node.number + 1:
            self.violations.append(f"{what} after version {self._node.number}")
        reports = dict(pair for found in self._reports.values() for pair in found.items())
        for worker in sorted(self._asked.get(version.id, set()) & self._workers):
            report = reports.get(worker)
            if report is None or report.accepts != version.id:
                self.violations.append(f"{what} although {worker} said {report}")


class LimitRules:
    """Replays the log: shares never add up to more than a limit allows, and everybody has turns.

    A turn of a process begins when the node says that it holds something again.

    :ivar violations: in the order of the log.
    :ivar versions: number of the versions of all limits.
    :ivar turns: number of turns of each process.
    :ivar most_overtaken: how many turns one process had before it was another one's turn.
    :param root: path of the app's node, with the chroot.
    """

    def __init__(self, root: str) -> None:
        self.violations: list[str] = []
        self.versions = 0
        self.turns: Counter[str] = Counter()
        self.most_overtaken = 0
        self._folder = f"{root}/limits/"
        self._nodes: dict[str, LimitNode] = {}
        self._overtaken: dict[str, Counter[str]] = {}

    def replay(self, log: Iterable[Txn]) -> None:
        for txn in log:
            for change in txn.changes:
                if change.path.startswith(self._folder):
                    self._changed(change.path, LimitNode.parse(change.data))

    def _changed(self, path: str, node: LimitNode) -> None:
        self.versions += 1
        before = self._nodes.get(path, LimitNode())
        self._nodes[path] = node
        name = path.removeprefix(self._folder)
        if node.max is not None:
            self._check_sum(f"permits of {name}", before.permits, node.permits, node.max)
            self._count_turns(before.permits, node.permits, node.max)
        if node.rate is not None:
            self._check_sum(f"starts of {name}", before.starts, node.starts, node.burst)

    def _check_sum(self, what: str, before: ShareHolders, after: ShareHolders, most: int) -> None:
        held, was = (sum(each.held for each in holders) for holders in (after, before))
        if held > most and held > was:  # else the limit was lowered since
            self.violations.append(f"limits: {held} {what}, {was} before, at most {most}: {after}")

    def _count_turns(self, before: ShareHolders, after: ShareHolders, most: int) -> None:
        held = {each.worker for each in before if each.held}
        began = [each.worker for each in after if each.held and each.worker not in held]
        self.turns.update(began)
        # One whose turn it is may take a permit: how long it takes to do so is its own affair.
        dealt = zip(after, targets(most, after), strict=True)
        waiting = {
            each.worker for each, share in dealt if each.wants and not each.held and not share
        }
        for worker in list(self._overtaken):
            if worker not in waiting:
                del self._overtaken[worker]
        for worker in waiting:
            overtaken = self._overtaken.setdefault(worker, Counter())
            overtaken.update(began)
            self.most_overtaken = max(self.most_overtaken, *overtaken.values(), 0)


def unlogged(log: Iterable[Txn], root: str) -> Iterator[str]:
    """Return the changes of queues by operators that have no entry in the action log."""
    queues, entries = f"{root}/queues/", f"{root}/actionlog/"
    sought: dict[str, int] = {}
    for txn in log:
        logged = any(
            each.path.startswith(entries) and each.data is not None for each in txn.changes
        )
        for change in txn.changes:
            if change.path.startswith(queues):
                seek = QueueNode.parse(change.data).seek if change.data is not None else 0
                if seek > sought.get(change.path, 0) and not logged:
                    yield f"audit: {change} at zxid {txn.zxid} without an entry"
                sought[change.path] = seek
