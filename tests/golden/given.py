"""Types of the settings that code gives: ``python -m tests.golden.given`` writes them anew."""

from __future__ import annotations

from qdo.settings.settings import declarations
from tests.support.paths import ROOT

GOLDEN = ROOT / "qdo" / "settings" / "given.py"
TYPES = {"globs": "Sequence[str]", "tables": "Sequence[QueuePolicy | Mapping[str, object]]"}
"""By kind; a `str` is a sequence of globs, too. Other kinds are the names of types."""
NAMED = frozenset(["app", "job_context", "job_failure"])
"""Parameters of `App`, which have other types there."""


def collect() -> str:
    """Return the module, with its own beginning."""
    head, end, _ = GOLDEN.read_text(encoding="utf-8").partition('explains them."""\n\n')
    each = [
        f"    {each.name}: {TYPES.get(each.kind, each.kind)}\n"
        for each in declarations()
        if each.name not in NAMED
    ]
    return head + end + "".join(each)


if __name__ == "__main__":
    GOLDEN.write_text(collect(), encoding="utf-8")
