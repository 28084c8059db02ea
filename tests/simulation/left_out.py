"""The protocol with one thing left out at a time: what `mutants` plays histories with.

A mutant is an exact piece of source and what stands in its place, so that the list cannot rot
silently, or a switch of the world around the machines.
"""

from __future__ import annotations

from dataclasses import dataclass

COORDINATION = "qdo/coordination/"


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of source that stands exactly once in `file`, and its replacement."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the changed text; raise ValueError if the piece does not stand there once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} holds {count} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One thing left out.

    :ivar breaks: the invariants of which one is expected to fail, "" if nothing is: the thing
        is redundant, a second line of defence.
    :ivar switches: what is wrong with the world, see `Switches`.
    :ivar passing_over: invariants whose failure does not count.
    """

    name: str
    breaks: str
    edits: tuple[Edit, ...] = ()
    switches: tuple[str, ...] = ()
    passing_over: str = ""


def _edit(file: str, old: str, new: str) -> Edit:
    return Edit(f"{COORDINATION}{file}.py", old, new)


OWN_VERSION = _edit(
    "ownnode",
    "SetOp(self.path, value, self._version)",
    "SetOp(self.path, value, -1)",
)
STUCK = "liveness 6"
SERIAL = _edit("ownnode", "return not self._closed", "return True")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "claim: queue version",
        "1 2",
        (
            _edit(
                "ownership",
                "ops = self._sets(slots, [slot.node.owned_by(self.name) for slot in slots])",
                "ops = self._sets(slots, [slot.node.owned_by(self.name) for slot in slots])\n"
                "        ops = [SetOp(op.path, op.data, -1) for op in ops]",
            ),
        ),
    ),
    Mutant(
        "claim: own node check and set",
        "1 7",
        (
            _edit(
                "ownership",
                "self._own.commit(ops, value, lambda answer: self._claim_answered(slots, answer))",
                "self._own.commit_without(ops, lambda answer: self._claim_answered(slots, answer))",
            ),
            _edit(
                "ownnode",
                "    def answered(self, answer: Answer) -> bool:",
                "    def commit_without(self, ops, then):\n"
                "        self._closed = self._in_flight = True\n"
                "        def answered(answer):\n"
                "            if isinstance(answer, Committed):\n"
                "                versions = (*answer.versions, self._version)\n"
                "                answer = Committed(answer.zxid, versions)\n"
                "            then(answer)\n"
                "        self._machine.ask(Commit(tuple(ops)), answered)\n\n"
                "    def answered(self, answer: Answer) -> bool:",
            ),
        ),
    ),
    Mutant(
        "release: own node check and set",
        "1 7",
        (
            _edit(
                "ownership",
                "            self._own.value((), [slot.queue for slot in slots]),\n",
                "            None,\n",
            ),
            _edit(
                "ownnode",
                "        self._closed = self._in_flight = True\n"
                "        self._machine.ask(Commit((*ops,",
                "        self._closed = self._in_flight = True\n"
                "        if value is None:\n"
                "            def answered(answer):\n"
                "                if isinstance(answer, Committed):\n"
                "                    versions = (*answer.versions, self._version)\n"
                "                    answer = Committed(answer.zxid, versions)\n"
                "                then(answer)\n"
                "            self._machine.ask(Commit(tuple(ops)), answered)\n"
                "            return\n"
                "        self._machine.ask(Commit((*ops,",
            ),
        ),
    ),
    Mutant("own-node version and serial claims, both", "1", (OWN_VERSION, SERIAL)),
    # Without it a seek's word to the owner is overwritten; nobody gets a second owner.
    Mutant("own-node version", "3 4 liveness", (OWN_VERSION,)),
    Mutant("own-node version: safety", "", (OWN_VERSION,), (), STUCK),
    Mutant(
        "own-node version, and late requests land",
        "1 7",
        (OWN_VERSION,),
        ("late_requests",),
        STUCK,
    ),
    # A late registration leaves a second worker node, which nobody works for.
    Mutant("late requests land: safety", "", (), ("late_requests",), STUCK),
    Mutant("serial claims", "liveness", (SERIAL,)),
    Mutant("serial claims: safety", "", (SERIAL,), (), STUCK),
    Mutant(
        "release: queue version",
        "2 3",
        (
            _edit(
                "ownership",
                "self._sets(slots, [slot.final() for slot in slots]),",
                "[SetOp(op.path, op.data, -1)\n"
                "             for op in self._sets(slots, [slot.final() for slot in slots])],",
            ),
        ),
    ),
    Mutant(
        "checkpoint: queue version",
        "2 3",
        (
            _edit(
                "checkpoints",
                "SetOp(self._layout.queue(slot.queue), node.encode(), slot.version)",
                "SetOp(self._layout.queue(slot.queue), node.encode(), -1)",
            ),
        ),
    ),
    Mutant(
        "checkpoint: own-node check",
        "7",
        (
            _edit(
                "checkpoints",
                "CheckOp(self._owner.path)",
                "CheckOp(self._layout.workers)",
            ),
        ),
    ),
    Mutant(
        "owner-gone test",
        "1",
        (
            _edit(
                "search",
                "elif not node.owner or node.owner == self._name or node.owner in self._gone:",
                "elif True:",
            ),
        ),
    ),
    Mutant(
        "fresh read of the owner's node (cached list instead)",
        "1",
        (
            _edit(
                "search",
                '        """Read an owner\'s node; the same read arms the watch,'
                ' so nothing falls between."""\n',
                "        from qdo.coordination.machine import Children, Listing\n"
                '        cached = self.__dict__.get("cached")\n'
                "        if cached is None:\n"
                "            def listed(answer):\n"
                "                if isinstance(answer, Listing):\n"
                '                    self.__dict__["cached"] = frozenset(answer.names)\n'
                "                    self._look(owner, slots)\n"
                "            self._machine.ask(Children(self._layout.workers), listed)\n"
                "            return\n"
                "        if owner not in cached:\n"
                "            self._looked(owner, slots, NoNode())\n"
                "            return\n",
            ),
        ),
    ),
    Mutant(
        "marks recorded by a release",
        "marks",
        (
            _edit(
                "slots",
                "return node if marks is node.marks else node.marked(marks)",
                "return node",
            ),
        ),
    ),
    Mutant(
        "marks read by a claim",
        "marks",
        (_edit("slots", "fence, done, lease, node.marks, ", "fence, done, lease, None, "),),
    ),
    Mutant(
        "fresh `last` (from memory instead)",
        "4",
        (
            _edit(
                "ownership",
                "slot.claim = Claim.of(slot.queue, fence, node, self._lease, self._positions)\n"
                "        self._own.listed",
                "slot.claim = Claim.of(slot.queue, fence, node, self._lease, self._positions)\n"
                '        memory = self.__dict__.setdefault("memory", {})\n'
                "        slot.claim.done = memory.get(slot.queue, node.last)\n"
                "        self._own.listed",
            ),
            _edit(
                "ownership",
                "        slot.claim = None\n        self._forget(slot)",
                "        if slot.claim is not None:\n"
                '            memory = self.__dict__.setdefault("memory", {})\n'
                "            memory[slot.queue] = slot.claim.done\n"
                "        slot.claim = None\n        self._forget(slot)",
            ),
        ),
    ),
    Mutant(
        "`last` and version in one read",
        "2 1",
        (
            _edit(
                "search",
                "Get(self._layout.queue(slot.queue)), lambda answer: self._read(slot, answer)",
                "Get(self._layout.queue(slot.queue)),\n"
                "            lambda first: self._machine.ask(\n"
                "                Get(self._layout.queue(slot.queue)),\n"
                "                lambda second: self._read(slot, Node(first.data, second.version)\n"
                "                    if isinstance(first, Node) and isinstance(second, Node)\n"
                "                    else second))",
            ),
        ),
    ),
    Mutant(
        "lease test",
        "7 1",
        (
            _edit(
                "lease",
                "        self.until = heard_at + SHARE * timeout_seconds\n",
                '        self.until = float("inf")\n',
            ),
        ),
    ),
    Mutant(
        "lease: proof that the leader heard of it",
        "7 1",
        (
            _edit(
                "lease",
                "        self.contact = max(self.contact, sent_at)\n",
                "        self.contact = max(self.contact, sent_at)\n"
                "        self.heard(sent_at - 0.2 * timeout)\n",
            ),
        ),
    ),
    Mutant(
        "barrier",
        "1 7",
        (
            _edit(
                "ownnode",
                "            self._machine.ask(\n"
                "                Commit((SetOp(self.path, value, answer.version),)),\n"
                "                lambda written: self._barrier_written(node, then, written),\n"
                "            )\n",
                "            read = Committed(0, (answer.version,))\n"
                "            self._barrier_written(node, then, read)\n",
            ),
        ),
    ),
    Mutant(
        "finishing before release",
        "4",
        (
            _edit(
                "ownership",
                "            self._listener.releasing(slot.claim)\n",
                "            self._listener.releasing(slot.claim)\n"
                "            self._finish(slot)\n",
            ),
        ),
    ),
    Mutant("starting nothing after release is sent", "4 1", (), ("keep_starting",)),
    Mutant("a lost claim is dropped", "", (), ("ignore_lost",)),
    Mutant("old lease bound to its own node", "7 1", (), ("ignore_lost", "current_lease")),
    Mutant("numbers never reused", "1 7 8", (), ("reuse_numbers",)),
    Mutant("parent closes only dead children's sessions", "7 1", (), ("close_living",)),
    Mutant(
        "rebalancer's fence",
        "fence",
        (
            _edit(
                "rebalancer",
                "CheckOp(self._layout.rebalancer, self._fence or 0)",
                "CheckOp(self._layout.rebalancer)",
            ),
        ),
    ),
    # Not in the table, and as easily left out.
    Mutant(
        "waiting queues are read again after a reconnection",
        "liveness",
        (
            _edit(
                "search",
                "if slot.state in (State.READING, State.WAITING, State.UNUSABLE):",
                "if slot.state in (State.READING, State.UNUSABLE):",
            ),
        ),
    ),
    Mutant(
        "idle owners notice a seek",
        "3 liveness",
        (
            _edit(
                "ownership",
                "            if slot is not None and slot.claim is not None:\n"
                "                self.reread(slot)",
                "            if slot is not None and slot.claim is not None:\n                pass",
            ),
        ),
    ),
    Mutant(
        "a seek is told from an own late write",
        "2 3 4",
        (
            _edit(
                "ownership",
                "sought = node.seek != slot.node.seek and node.fault is None",
                "sought = False",
            ),
        ),
    ),
    Mutant(
        "an own late write is told from a seek",
        "4",
        (
            _edit(
                "ownership",
                "sought = node.seek != slot.node.seek and node.fault is None",
                "sought = True",
            ),
        ),
    ),
    Mutant(
        "a refused release keeps its position unless a seek refused it",
        "4",
        (
            _edit(
                "ownership",
                "                    # Whether to release with the `last` found there is seen"
                " in `_adopt`.\n",
                "                    slot.as_found = True\n",
            ),
        ),
    ),
    Mutant(
        "an adopted claim may have been marked as deleted",
        "liveness",
        (
            _edit(
                "ownership",
                "if self._wanted(slot.queue) and not node.deleted:",
                "if self._wanted(slot.queue):",
            ),
        ),
    ),
    Mutant(
        "a spoilt `last` is mended by the owner",
        "4 2 3",
        (
            _edit(
                "ownership",
                "slot.node = node = _mended(node, slot.node)",
                "slot.node = node",
            ),
            _edit(
                "ownership",
                "sought = node.seek != slot.node.seek and node.fault is None",
                "sought = node.seek != slot.node.seek or node.fault is not None",
            ),
        ),
    ),
    Mutant(
        "an adopted claim's fence",
        "8",
        (
            _edit(
                "ownership",
                "self._claimed(slot, node, answer.version, answer.mzxid)",
                "self._claimed(slot, node, answer.version, 1)",
            ),
        ),
    ),
    Mutant(
        "a registration without an answer is adopted",
        "liveness 6",
        (
            _edit(
                "membership",
                "answer.ephemeral_owner == self._session",
                "not self._session",
            ),
        ),
    ),
    Mutant(
        "nothing asked before a reconnection is answered after it",
        "liveness",
        (
            _edit(
                "member",
                "            waiting.extend(then for _, then in machine.outbox)\n"
                "            machine.outbox.clear()\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a worker takes only what its filter says, whatever it is granted",
        "filters",
        (_edit("ownership", "filter(self._own.takes.matcher(), granted)", "granted"),),
        ("filters",),
    ),
    Mutant(
        "the rebalancer grants only what a worker takes",
        STUCK,
        (
            _edit(
                "rebalancer",
                "able = {name: node.takes for",
                "able = {name: WorkerNode().takes for",
            ),
        ),
        ("filters",),
    ),
    Mutant(
        "every write of the own node says what the worker takes",
        "liveness 6 filters",
        (
            _edit(
                "ownnode",
                "return WorkerNode(tuple(listed), draining=self.draining, takes=self.takes)",
                "return WorkerNode(tuple(listed), draining=self.draining)",
            ),
        ),
        ("filters",),
    ),
)
