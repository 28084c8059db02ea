"""The contract of every broker that is a log; runs over the `connect` fixture.

The same tests run a second time in a process that gevent has patched: see test_under_gevent.py.
"""

from __future__ import annotations

from qdo.testing.contracts.logs import *
