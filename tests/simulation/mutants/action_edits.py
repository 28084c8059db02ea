"""The mutants of actions: each of the rules of `fleet.action_machine` left out."""

from __future__ import annotations

from tests.simulation.mutants.edits import Edit, Mutant


def _mutant(name: str, breaks: str, *edits: tuple[str, str]) -> Mutant:
    file = "qdo/fleet/action_machine.py"
    changes = tuple(Edit(file, old, new) for old, new in edits)
    # Time that actions take too long to end is time in which the load may get out of balance.
    return Mutant(f"actions: {name}", breaks, changes, ("actions",), passing_over="6")


ACTION_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "a claim is at the version read",
        "A1 A2",
        ("SetOp(self._path(name), claim, version)", "SetOp(self._path(name), claim, -1)"),
    ),
    _mutant(
        "nothing is done before the claim has an answer",
        "A1 A2",
        (
            "            self._claimed[name] = _Underway(action)\n"
            "            self._claim(name, action, node.version)\n",
            "            self._claimed[name] = _Underway(action)\n"
            "            self._begin(name, self._claimed[name], node.version)\n",
        ),
    ),
    _mutant(
        "claims of the other actor are respected",
        "A1 A2",
        (
            "elif running and action.actor == self._actor and mine is not None:",
            "elif running and mine is not None:",
        ),
    ),
    _mutant(
        "the worker leaves what its parent has claimed",
        "A1 A2",
        ("if (running and action.actor == PARENT) or self._closing:", "if self._closing:"),
    ),
    _mutant(
        "the parent leaves what the worker has claimed",
        "A1 A2",
        ("        return running or self._fault(", "        return self._fault("),
        (
            '        if running:\n            return "this',
            '        if 0:\n            return "this',
        ),
    ),
    _mutant(
        "what was begun is not begun again",
        "A1",
        (
            "if mine is not None and mine.begun:",
            "if mine is not None and mine.begun and mine.entry is not None:",
        ),
    ),
    _mutant(
        "claims outlive a lost connection",
        "A1 A2 A4",
        (
            "        self._asked.clear()\n",
            "        self._asked.clear()\n        self._claimed.clear()\n",
        ),
    ),
    _mutant(
        "a claim in doubt is repeated, whatever a read shows",
        "A4",
        (
            "elif mine is not None and not running and action.fault is None:",
            "elif mine is not None and False:",
        ),
    ),
    _mutant(
        "an end without a beginning is decided again after a conflict",
        "A2",
        (
            "        self._end(name, _Underway(action, version, entry=entry))\n",
            "        self._claimed[name] = _Underway(action, version, True, entry)\n"
            "        self._end(name, self._claimed[name])\n",
        ),
    ),
    _mutant(
        "an action that is over is not begun",
        "A3",
        ("if self._is_over(action):  # the answer", "if False:  # the answer"),
    ),
    _mutant(
        "the entry is in the transaction of the end",
        "A2",
        ("        else:\n            ops.append(entry)\n", ""),
    ),
    _mutant(
        "the watch is armed again",
        "A4",
        ("Children(self._folder, watch=True)", "Children(self._folder)"),
    ),
    _mutant(
        "a missing folder is watched",
        "A4",
        ("Stat(self._folder, watch=True)", "Stat(self._folder)"),
    ),
    _mutant(
        "those beyond the limit get their turn",
        "A4",
        ("        if full:\n            self._list()\n", ""),
    ),
    _mutant(
        "an end without an answer is noticed",
        "A4",
        ("            del self._claimed[name]  # it", "            pass  # it"),
    ),
)
