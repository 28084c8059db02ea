"""How many connections a process may open."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from qdo.system.processes import RESERVE, ensure_open_files
from tests.support.paths import ROOT

TRY = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from qdo.system.processes import ensure_open_files
print(ensure_open_files({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room", "afterwards"),
    [
        (1024, 4096, 1000, 1000, 1000 + RESERVE),
        (1024, 1024, 1000, 1024 - RESERVE, 1024),
        (1024, 1100, 1000, 1100 - RESERVE, 1100),
        (256, 256, 1000, 128, 256),
        (2048, 4096, 1000, 1000, 2048),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_needed(
    soft: int, hard: int, wanted: int, room: int, afterwards: int
) -> None:
    """Connections beyond the limit are not opened; the rest is reserved for everything else."""
    code = TRY.format(soft=soft, hard=hard, wanted=wanted)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(room), str(afterwards)]


def test_a_limit_that_is_enough_is_left_alone() -> None:
    """Nothing is changed without need."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert ensure_open_files(1) == 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
