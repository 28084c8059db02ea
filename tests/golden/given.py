"""Types of the settings that code gives: ``python -m tests.golden.given`` writes them anew."""

from __future__ import annotations

from qdo.settings.settings import declarations
from tests.support.paths import ROOT

GOLDEN = ROOT / "qdo" / "settings" / "given.py"
TYPES = {"globs": "Sequence[str]", "tables": "Sequence[QueuePolicy | Mapping[str, object]]"}
"""By kind; a `str` is a sequence of globs, too. Other kinds are the names of types."""
NAMED = frozenset(["app", "job_context", "job_failure"])
"""Parameters of `App`, which have other types there."""
HEAD = '''"""The types of settings in code, as in ``App(NAME, attempts=3)``, for type checkers.

`python -m tests.golden.given` writes this file from the declarations in `qdo.settings.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from qdo.jobs.policy_tables import QueuePolicy


class GivenSettings(TypedDict, total=False):
    """Settings by name; `qdo.Settings` explains them."""

'''


def collect() -> str:
    """Return the module."""
    each = [
        f"    {each.name}: {TYPES.get(each.kind, each.kind)}\n"
        for each in declarations()
        if each.name not in NAMED
    ]
    return HEAD + "".join(each)


if __name__ == "__main__":
    GOLDEN.write_text(collect(), encoding="utf-8")
