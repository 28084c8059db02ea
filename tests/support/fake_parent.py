"""A real parent (`qdo.worker.supervisor`) over make-believe worker processes.

    python -m tests.support.fake_parent SETTINGS-AS-JSON MODE [ARGUMENT...]

Where QDO_TEST_GATE names a file, process groups pass for alive until that file exists.
QDO_TEST_MARGIN_SECONDS shortens what a child may take beyond its time to drain.
"""

from __future__ import annotations

import json
import os
import sys

from qdo.settings import Settings
from qdo.worker import roster
from qdo.worker.processes import Child
from qdo.worker.supervisor import supervise


class GatedChild(Child):
    """A child whose process group outlives it for as long as the test wants."""

    def group_gone(self) -> bool:
        return os.path.exists(os.environ["QDO_TEST_GATE"]) and super().group_gone()


if __name__ == "__main__":
    argv = [sys.executable, "-m", "tests.support.fake_child", *sys.argv[2:]]
    kind = GatedChild if "QDO_TEST_GATE" in os.environ else Child
    margin = os.environ.get("QDO_TEST_MARGIN_SECONDS")
    if margin is not None:
        roster.DRAIN_MARGIN_SECONDS = float(margin)
    settings = Settings(**json.loads(sys.argv[1]))
    sys.exit(supervise(settings, "some:app", argv=argv, child=kind))
