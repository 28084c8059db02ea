"""Python imports this before the worker: a host whose clock is ahead."""

import os
import socket
import time

_AHEAD_SECONDS = float(os.environ["DRILL_AHEAD_SECONDS"])
_time, _time_ns, _host = time.time, time.time_ns, os.environ["DRILL_HOST"]

time.time = lambda: _time() + _AHEAD_SECONDS
time.time_ns = lambda: _time_ns() + int(_AHEAD_SECONDS * 1e9)
socket.gethostname = lambda: _host
