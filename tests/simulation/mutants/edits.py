"""The mutants: the protocol with one thing left out at a time.

Those of the simulation are in files beside this one. A mutant has a name behind ``==``, the
invariants of which it ``breaks`` one, ``switches`` of the world around the machines, and invariants
whose failure it is ``passing``. Then come its edits as in a patch: a file behind ``---``, a piece
of its source behind ``-``, which occurs exactly once, and the replacement behind ``+``. An edit
that no longer fits the source fails a test, so the files cannot rot silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.support.paths import ROOT


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
    :ivar passing: invariants whose failure does not count.
    """

    name: str
    breaks: str
    edits: tuple[Edit, ...] = ()
    switches: tuple[str, ...] = ()
    passing: str = ""

    @classmethod
    def parse(cls, text: str) -> Mutant:
        """Return the mutant that stands behind ``==`` in a file."""
        head, *edits = text.split("\n--- ")
        name, *lines = head.splitlines()
        facts = {word: rest for word, _, rest in (line.partition(" ") for line in lines)}
        switches, passing = tuple(facts.get("switches", "").split()), facts.get("passing", "")
        return cls(name, facts["breaks"], tuple(map(_edit, edits)), switches, passing)


def _edit(text: str) -> Edit:
    file, *lines = text.splitlines()
    parts = {sign: [line[1:] for line in lines if line[:1] == sign] for sign in "-+"}
    return Edit(file, "\n".join(parts["-"]), "\n".join(parts["+"]))


def _read() -> Iterator[Mutant]:
    for name in ("protocol", "limits", "actions"):
        text = Path(__file__).with_name(f"{name}.diff").read_text()
        for block in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
            yield Mutant.parse(block)


MUTANTS: tuple[Mutant, ...] = tuple(_read())
