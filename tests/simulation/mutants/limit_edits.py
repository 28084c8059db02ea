"""The mutants of limits: each of the rules of `fleet.shares` left out."""

from __future__ import annotations

from tests.simulation.mutants.edits import Edit, Mutant


def _mutant(name: str, breaks: str, *edits: tuple[str, str]) -> Mutant:
    changes = tuple(Edit("qdo/fleet/shares.py", old, new) for old, new in edits)
    return Mutant(f"limits: {name}", breaks, changes, ("limits",))


LIMIT_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "a share is within what is free",
        "L1 L2",
        ("held = min(held, written + max(0, free))", "held = max(target, pool.occupied)"),
    ),
    _mutant(
        "writes are at the version read",
        "L1 L2",
        ("SetOp(self._path, data, self._version)))", "SetOp(self._path, data, -1)))"),
    ),
    _mutant(
        "the cap is lowered at once",
        "L2 L4",
        ("        if target < pool.cap:\n            pool.limit(target, now)\n", ""),
    ),
    _mutant(
        "permits in use are not given up",
        "L2",
        ("held = max(target, pool.occupied)", "held = target"),
    ),
    _mutant(
        "a larger share is used after its answer only",
        "L2",
        (
            "        self._write_at = now + WRITE_SECONDS\n",
            "        self._write_at = now + WRITE_SECONDS\n"
            "        for each in permits.holders:\n"
            "            if each.worker == self._worker:\n"
            "                self.permits.limit(min(permits.cap, each.held), now)\n",
        ),
    ),
    _mutant(
        "after a lost answer the node is written again",
        "L2 L4",
        (
            "        self._told = next(",
            "        own = sum(each.held for each in node.permits if each.worker == self._worker)\n"
            "        if self._in_doubt and not self.permits.unlimited:\n"
            "            self.permits.acknowledge(own, own, now)\n"
            "            self._in_doubt = False\n"
            "        self._told = next(",
        ),
    ),
    _mutant(
        "what is dealt is within what is free",
        "L1 L2",
        ("max(0, min(free, target - each.held))", "max(0, target - each.held)"),
    ),
    _mutant(
        "workers are listed after the limit was read",
        "L1 L2 L4",
        (
            '        elif self._has_strangers(node):\n            self._list("")\n',
            "        elif self._has_strangers(node):\n"
            "            if self._names is None:\n"
            '                self._list("")\n'
            "            else:\n"
            '                self._listed("", m.ChildrenRead(tuple(self._names)))\n',
        ),
        ("Children(self._folders[prefix], watch=True)", "Children(self._folders[prefix])"),
    ),
    _mutant(
        "dead holders are taken out",
        "L4",
        ("self._gone |= listed - found", "self._gone = frozenset()"),
    ),
    _mutant(
        "a holder lets others go first", "L4", ("self._turn_is_over(pool, rest, total)", "False")
    ),
    _mutant(
        "only a holder moves to the end",
        "L4",
        ("not starved or not rest[index].held or", "not starved or"),
    ),
    _mutant(
        "nothing is used once the lease is over",
        "L3",
        ("now >= self._lease.until or self.fault", "self.fault"),
    ),
    _mutant(
        "a share is given up when others lack it",
        "L4 spin",
        ("if now >= pool.peak_since", "if not before and now >= pool.peak_since"),
    ),
    _mutant("whoever is listed reads each change", "L4", ("            or self._is_listed\n", "")),
    _mutant(
        "clients are not sought among the workers",
        "L1 L2",
        ('self._node.workers if ("/" in each) == bool(prefix)}', "self._node.workers}"),
    ),
    _mutant(
        "clients that are gone are taken out",
        "L4",
        (
            '            self._list("client/")',
            '            self._names |= {each for each in self._node.workers if "/" in each}',
        ),
    ),
)
