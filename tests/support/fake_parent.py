"""A real parent (`qdo.worker.supervisor`) over make-believe worker processes.

python -m tests.support.fake_parent SETTINGS-AS-JSON MODE [ARGUMENT...]
"""

from __future__ import annotations

import json
import sys

from qdo.settings import Settings
from qdo.worker.supervisor import supervise

if __name__ == "__main__":
    argv = [sys.executable, "-m", "tests.support.fake_child", *sys.argv[2:]]
    sys.exit(supervise(Settings(**json.loads(sys.argv[1])), "some:app", argv=argv))
