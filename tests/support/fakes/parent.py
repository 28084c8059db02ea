"""A real parent (`qdo.worker.supervisor.supervisor`) over make-believe worker processes.

    python -m tests.support.fakes.parent SETTINGS-AS-JSON MODE [ARGUMENT...]

Where TESTS_GATE names a file, process groups pass for alive until that file exists.
TESTS_MARGIN_SECONDS shortens what a child may take beyond its time to drain.
"""

from __future__ import annotations

import json
import os
import sys

from qdo.settings.settings import Settings
from qdo.worker.supervisor import restarts as roster
from qdo.worker.supervisor.child import ChildProcess
from qdo.worker.supervisor.supervisor import supervise


class GatedChild(ChildProcess):
    """A child whose process group outlives it for as long as the test wants."""

    def group_gone(self) -> bool:
        return os.path.exists(os.environ["TESTS_GATE"]) and super().group_gone()


if __name__ == "__main__":
    argv = [sys.executable, "-m", "tests.support.fakes.child", *sys.argv[2:]]
    kind = GatedChild if "TESTS_GATE" in os.environ else ChildProcess
    margin = os.environ.get("TESTS_MARGIN_SECONDS")
    if margin is not None:
        roster.DRAIN_MARGIN_SECONDS = float(margin)
    settings = Settings(**json.loads(sys.argv[1]))
    sys.exit(supervise(settings, "some:app", argv=argv, child=kind))
