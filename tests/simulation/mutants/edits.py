"""The mutants: the protocol with one thing left out at a time.

A mutant is an exact piece of source and its replacement, or a switch of the world around the
machines. An edit that no longer fits the source fails a test, so the list cannot rot silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from tests.support.paths import ROOT

COORDINATION = "qdo/coordination/"


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of source that occurs exactly once in `file`, and its replacement."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the changed text; raise ValueError unless the piece occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} must contain this once, not {count} times: {self.old!r}")
        return text.replace(self.old, self.new)


def mutated(file: str, *changes: tuple[str, str]) -> ModuleType:
    """Return a module that is not imported, with pieces of its source replaced."""
    text, module = (ROOT / file).read_text(), ModuleType(file.removesuffix(".py").replace("/", "."))
    for change in changes:
        text = Edit(file, *change).apply(text)
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))
    return module


@dataclass(frozen=True, slots=True)
class Mutant:
    """One thing left out.

    :ivar breaks: the invariants of which one is expected to fail; "" if none is, because the
        thing left out is redundant, a second line of defense.
    :ivar switches: the faults of the world, see `Switches`.
    :ivar passing_over: invariants whose failure does not count.
    """

    name: str
    breaks: str
    edits: tuple[Edit, ...] = ()
    switches: tuple[str, ...] = ()
    passing_over: str = ""


def _edit(file: str, old: str, new: str) -> Edit:
    folder = "" if file == "machine_loop" else "protocol/"
    return Edit(f"{COORDINATION}{folder}{file}.py", old, new)


def _mutant(
    name: str, breaks: str, *edits: Edit, switches: tuple[str, ...] = (), passing_over: str = ""
) -> Mutant:
    return Mutant(name, breaks, edits, switches, passing_over)


OWN_VERSION = _edit(
    "worker_node_writer",
    "SetOp(self.path, value, self._version)",
    "SetOp(self.path, value, -1)",
)
STUCK = "liveness 6"
SERIAL = _edit("worker_node_writer", "return not self._closed", "return True")
# Without serial claims the place is that of another write, which must not end the process.
PLACE = _edit(
    "worker_node_writer",
    "answer.versions[self._written_at]",
    "answer.versions[min(self._written_at, len(answer.versions) - 1)]",
)

MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "claim: queue version",
        "1 2",
        _edit(
            "ownership",
            "ops = self._sets(slots, [slot.node.claimed_by(self.name) for slot in slots])",
            "ops = self._sets(slots, [slot.node.claimed_by(self.name) for slot in slots])\n"
            "        ops = [SetOp(op.path, op.data, -1) for op in ops]",
        ),
    ),
    _mutant(
        "claim: attempts of a gone owner",
        "marks",
        _edit(
            "ownership",
            "ops = self._sets(slots, [slot.node.claimed_by(self.name) for slot in slots])",
            "ops = self._sets(slots, [slot.node.owned_by(self.name) for slot in slots])",
        ),
    ),
    _mutant(
        "claim: own node check and set",
        "1 7",
        _edit(
            "ownership",
            "self._own_node.commit(\n            ops,\n            value,\n",
            "self._own_node.commit_without(\n            ops,\n",
        ),
        _edit(
            "worker_node_writer",
            "    def answered(self, answer: m.Response) -> bool:",
            "    def commit_without(self, ops, then, checks):\n"
            "        self._closed = self._in_flight = True\n"
            "        self._written_at = len(ops)\n"
            "        def answered(answer):\n"
            "            if isinstance(answer, m.Committed):\n"
            "                versions = list(answer.versions)\n"
            "                versions.insert(len(ops), self._version)\n"
            "                answer = m.Committed(answer.zxid, tuple(versions))\n"
            "            then(answer)\n"
            "        self._machine.ask(m.Commit((*ops, *checks)), answered)\n\n"
            "    def answered(self, answer: m.Response) -> bool:",
        ),
    ),
    _mutant(
        "release: own node check and set",
        "1 7",
        _edit(
            "ownership",
            "            self._own_node.value((), [slot.queue for slot in slots]),\n",
            "            None,\n",
        ),
        _edit(
            "worker_node_writer",
            "        self._written_at = len(ops)\n",
            "        self._written_at = len(ops)\n"
            "        if value is None:\n"
            "            def answered(answer):\n"
            "                if isinstance(answer, m.Committed):\n"
            "                    versions = (*answer.versions, self._version)\n"
            "                    answer = m.Committed(answer.zxid, versions)\n"
            "                then(answer)\n"
            "            self._machine.ask(m.Commit(tuple(ops)), answered)\n"
            "            return\n",
        ),
    ),
    # Deleted nodes are created again, and versions start at 0 again.
    _mutant(
        "claim: no node was deleted",
        "2 3 4 6",
        _edit("rebalancer", "return () if self._unchecked else", "return () if self._folder else"),
    ),
    _mutant("own-node version and serial claims, both", "1", OWN_VERSION, SERIAL, PLACE),
    # Without it a seek's request to the owner is overwritten; no queue gets a second owner.
    _mutant("own-node version", "3 4 liveness", OWN_VERSION),
    _mutant("own-node version: safety", "", OWN_VERSION, passing_over=STUCK),
    _mutant(
        "own-node version, and late requests land",
        "1 7",
        OWN_VERSION,
        switches=("late_requests",),
        passing_over=STUCK,
    ),
    # A late registration leaves a second worker node, without a worker.
    _mutant("late requests land: safety", "", switches=("late_requests",), passing_over=STUCK),
    _mutant("serial claims", "liveness", SERIAL, PLACE),
    # A list made before the other transaction was answered names a queue that it has released.
    _mutant("serial claims: safety", "1", SERIAL, PLACE, passing_over=STUCK),
    _mutant(
        "release: queue version",
        "2 3",
        _edit(
            "ownership",
            "self._sets(slots, [slot.final() for slot in slots]),",
            "[SetOp(op.path, op.data, -1)\n"
            "             for op in self._sets(slots, [slot.final() for slot in slots])],",
        ),
    ),
    _mutant(
        "checkpoint: queue version",
        "2 3",
        _edit(
            "checkpoints",
            "SetOp(self._layout.queue(slot.queue), node.encode(), slot.version)",
            "SetOp(self._layout.queue(slot.queue), node.encode(), -1)",
        ),
    ),
    _mutant(
        "checkpoint: own-node check",
        "7",
        _edit("checkpoints", "CheckOp(self._owner.path)", "CheckOp(self._layout.workers)"),
    ),
    _mutant(
        "owner-gone test",
        "1",
        _edit(
            "acquisition",
            "elif not node.owner or node.owner == self._name or node.owner in self._gone:",
            "elif True:",
        ),
    ),
    _mutant(
        "fresh read of the owner's node (cached list instead)",
        "1",
        _edit(
            "acquisition",
            '        """Read an owner\'s node; the same read arms the watch,'
            ' so no change is missed."""\n',
            "        from qdo.coordination.protocol.machine import Children, ChildrenRead\n"
            '        cached = self.__dict__.get("cached")\n'
            "        if cached is None:\n"
            "            def listed(answer):\n"
            "                if isinstance(answer, ChildrenRead):\n"
            '                    self.__dict__["cached"] = frozenset(answer.names)\n'
            "                    self._look(owner, slots)\n"
            "            self._machine.ask(Children(self._layout.workers), listed)\n"
            "            return\n"
            "        if owner not in cached:\n"
            "            self._looked(owner, slots, m.NodeMissing())\n"
            "            return\n",
        ),
    ),
    _mutant(
        "failure records written by a release",
        "marks",
        _edit(
            "claims",
            "return node if failure is node.failure else node.with_failure(failure)",
            "return node",
        ),
    ),
    _mutant(
        "failure records read by a claim",
        "marks",
        _edit("claims", "fence, done, lease, node.failure, ", "fence, done, lease, None, "),
    ),
    _mutant(
        "fresh `last` (from memory instead)",
        "4",
        _edit(
            "owned_queues",
            "slot.claim = Claim.of(slot.queue, fence, node, self._lease, self._positions)\n"
            "        self._own_node.listed",
            "slot.claim = Claim.of(slot.queue, fence, node, self._lease, self._positions)\n"
            '        memory = self.__dict__.setdefault("memory", {})\n'
            "        slot.claim.done = memory.get(slot.queue, node.last)\n"
            "        self._own_node.listed",
        ),
        _edit(
            "owned_queues",
            "        slot.claim = None\n        self._forget(slot)",
            "        if slot.claim is not None:\n"
            '            memory = self.__dict__.setdefault("memory", {})\n'
            "            memory[slot.queue] = slot.claim.done\n"
            "        slot.claim = None\n        self._forget(slot)",
        ),
    ),
    _mutant(
        "`last` and version in one read",
        "2 1",
        _edit(
            "acquisition",
            "m.Get(self._layout.queue(slot.queue)), lambda answer: self._read(slot, answer)",
            "m.Get(self._layout.queue(slot.queue)),\n"
            "            lambda first: self._machine.ask(\n"
            "                m.Get(self._layout.queue(slot.queue)),\n"
            "                lambda second: self._read(\n"
            "                    slot,\n"
            "                    m.NodeRead(first.data, second.version)\n"
            "                    if isinstance(first, m.NodeRead)\n"
            "                    and isinstance(second, m.NodeRead)\n"
            "                    else second))",
        ),
    ),
    _mutant(
        "lease test",
        "7 1",
        _edit(
            "lease",
            "        self.until = heard_at + SHARE * timeout_seconds\n",
            '        self.until = float("inf")\n',
        ),
    ),
    _mutant(
        "lease: proof that the leader heard of it",
        "7 1",
        _edit(
            "lease",
            "        self.contact = max(self.contact, sent_at)\n",
            "        self.contact = max(self.contact, sent_at)\n"
            "        self.heard(sent_at - 0.2 * timeout)\n",
        ),
    ),
    _mutant(
        "barrier",
        "1 7",
        _edit(
            "worker_node_writer",
            "            self._machine.ask(\n"
            "                m.Commit((m.SetOp(self.path, value, answer.version),)),\n"
            "                lambda written: self._barrier_written(node, then, written),\n"
            "            )\n",
            "            read = m.Committed(0, (answer.version,))\n"
            "            self._barrier_written(node, then, read)\n",
        ),
    ),
    _mutant(
        "finishing before release",
        "4",
        _edit(
            "owned_queues",
            "            self._listener.releasing(slot.claim)\n",
            "            self._listener.releasing(slot.claim)\n            self.finish(slot)\n",
        ),
    ),
    _mutant("starting nothing after release is sent", "4 1", switches=("keep_starting",)),
    _mutant("a lost claim is dropped", "", switches=("ignore_lost",)),
    _mutant("old lease bound to its own node", "7 1", switches=("ignore_lost", "current_lease")),
    _mutant("numbers never reused", "1 7 8", switches=("reuse_numbers",)),
    _mutant("threads start messages under the lease", "7 1", switches=("careless_threads",)),
    _mutant(
        "a job that has waited asks for the lease again",
        "7 1",
        Edit("qdo/worker/executors/base.py", "if not message._leased():", "if False:"),
        switches=("waits",),
    ),
    _mutant(
        "a job that has waited asks for the lease of its claim",
        "7 1",
        Edit("qdo/message.py", "self._registration == registration and ", ""),
        switches=("waits",),
    ),
    _mutant("parent closes only dead children's sessions", "7 1", switches=("close_living",)),
    _mutant(
        "rebalancer's fence",
        "fence",
        _edit(
            "rebalancer",
            "CheckOp(self._layout.rebalancer, self._fence or 0)",
            "CheckOp(self._layout.rebalancer)",
        ),
    ),
    # Not in the table of the documentation, and as easily left out.
    _mutant(
        "waiting queues are read again after a reconnection",
        "liveness",
        _edit(
            "acquisition",
            "self._read_all(QueueState.READING, QueueState.WAITING, QueueState.UNUSABLE)",
            "self._read_all(QueueState.READING, QueueState.UNUSABLE)",
        ),
    ),
    _mutant(
        "idle owners notice a seek",
        "3 liveness",
        _edit(
            "ownership",
            "            if slot is not None and slot.claim is not None:\n"
            "                self._recovery.reread(slot)",
            "            if slot is not None and slot.claim is not None:\n                pass",
        ),
    ),
    _mutant(
        "a seek differs from an own late write",
        "2 3 4",
        _edit(
            "owned_queues",
            "sought = node.seek != slot.node.seek and node.fault is None",
            "sought = False",
        ),
    ),
    _mutant(
        "an own late write differs from a seek",
        "4",
        _edit(
            "owned_queues",
            "sought = node.seek != slot.node.seek and node.fault is None",
            "sought = True",
        ),
    ),
    _mutant(
        "a rejected release keeps its position except after a seek",
        "4",
        _edit(
            "ownership",
            "                    # `Recovery` decides whether to release with the `last`"
            " found there.\n",
            "                    slot.as_found = True\n",
        ),
    ),
    _mutant(
        "an adopted claim may have been marked as deleted",
        "liveness",
        _edit(
            "owned_queues",
            "if self._wanted(slot.queue) and not node.deleted:",
            "if self._wanted(slot.queue):",
        ),
    ),
    _mutant(
        "a corrupt `last` is repaired by the owner",
        "4 2 3",
        _edit("owned_queues", "slot.node = node = _repaired(node, slot.node)", "slot.node = node"),
        _edit(
            "owned_queues",
            "sought = node.seek != slot.node.seek and node.fault is None",
            "sought = node.seek != slot.node.seek or node.fault is not None",
        ),
    ),
    _mutant(
        "an adopted claim's fence",
        "8",
        _edit(
            "owned_queues",
            "self._queues.claimed(slot, node, answer.version, answer.mzxid)",
            "self._queues.claimed(slot, node, answer.version, 1)",
        ),
    ),
    _mutant(
        "a registration without an answer is adopted",
        "liveness 6",
        _edit("registration", "answer.ephemeral_owner == self._session", "not self._session"),
    ),
    _mutant(
        "no request from before a reconnection is answered after it",
        "liveness",
        _edit(
            "machine_loop",
            "            waiting.extend(then for _, then in machine.outbox)\n"
            "            machine.outbox.clear()\n",
            "            pass\n",
        ),
    ),
    _mutant(
        "a worker claims only assigned queues that match its filter",
        "filters",
        _edit("ownership", "filter(self._own_node.filter.matcher(), assigned)", "assigned"),
        switches=("filters",),
    ),
    _mutant(
        "the rebalancer assigns only queues that match the filter",
        STUCK,
        _edit("worker_roll", "name: node.filter\n", "name: WorkerNode().filter\n"),
        switches=("filters",),
    ),
    _mutant(
        "every write of the own node records the filter",
        "liveness 6 filters",
        _edit(
            "worker_node_writer",
            "return self._own(WorkerNode(tuple(listed))).encode()",
            "return replace(self._own(WorkerNode(tuple(listed))), filter=EVERYTHING).encode()",
        ),
        switches=("filters",),
    ),
    _mutant(
        "the rebalancer plans with the moves of operators",
        "moves",
        _edit("rebalancer", "able, current, self._moves)", "able, current)"),
        switches=("moves",),
    ),
    _mutant(
        "the rebalancer watches the moves of operators",
        "moves",
        _edit(
            "rebalancer",
            "Get(self._layout.assignments, watch=True)",
            "Get(self._layout.assignments)",
        ),
        switches=("moves",),
    ),
    _mutant(
        "a plan puts a moved queue on its worker only",
        "moves",
        _edit("planner", "if queue in moves:", "if False:"),
        switches=("moves",),
    ),
)
