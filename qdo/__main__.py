"""The programs `qdo` (also ``python -m qdo``) and `qdo-worker`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    _end_at_interrupt()
    from qdo.cli.main import main

    main()


def worker() -> None:
    _end_at_interrupt()
    from qdo.cli.worker import main

    main()


def _end_at_interrupt() -> None:
    """Let Ctrl-C end this process silently, until `qdo.cli.framework.run` handles it."""
    if os.getpid() == 1:  # in a container, the kernel drops signals without a handler
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the signal may be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
