"""A worker process that only speaks with its parent, for tests of the parent.

python -m tests.support.fakes.child MODE [ARGUMENT...]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

TOLD = json.loads(os.environ["QDO_CHILD"])
PARENT = socket.socket(fileno=TOLD["pipe"])


def say(value: dict[str, str | None]) -> None:
    """Tell the parent."""
    PARENT.sendall(json.dumps(value).encode() + b"\n")


def show(text: str) -> None:
    """Print a line for the test, in one write."""
    os.write(1, f"{text}\n".encode())


def asked_to_end() -> threading.Event:
    """Return an event that is set at SIGTERM and at the parent's end.

    Not with a handler: the kernel may give the signal to any thread, above all right after
    SIGCONT, and then Python would not run it before the main thread wakes up.
    """
    done = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for wait in (lambda: signal.sigwait({signal.SIGTERM}), lambda: PARENT.recv(1)):
        threading.Thread(target=lambda wait=wait: (wait(), done.set()), daemon=True).start()
    return done


def serve() -> None:
    """Wait for SIGTERM or for the parent's end, then finish as a drained worker does."""
    done = asked_to_end()
    show(f"child up pid={os.getpid()}")
    done.wait()
    show(f"child drained pid={os.getpid()}")


def stubborn() -> None:
    """Count SIGTERMs and continue."""
    asked = threading.Semaphore(0)
    signal.signal(signal.SIGTERM, lambda number, frame: asked.release())
    show(f"child up pid={os.getpid()}")
    count = 0
    while True:
        asked.acquire()
        count += 1
        show(f"child asked count={count}")


def leave(code: str) -> None:
    """End at once with a code."""
    show(f"child up pid={os.getpid()}")
    sys.exit(int(code))


def leave_first(folder: str, code: str) -> None:
    """The first one ends with a code; those after it serve."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"{folder}/was-here", os.O_CREAT | os.O_EXCL))
        leave(code)
    serve()


def babble() -> None:
    """Send a report that no parent understands, and serve."""
    for line in (b"\n", b"not json\n", b"[]\n", b'{"session": "x"}\n', b'{"session": "1"}\n'):
        PARENT.sendall(line)
    serve()


def orphan() -> None:
    """Have a process that starts another one, ends, and leaves it behind; then serve."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '0.1']).pid)"
    middle = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    show(f"orphan pid={middle.stdout.strip()}")
    serve()


def hold() -> None:
    """Hold an ephemeral node, and an executor process that outlives this one; report both."""
    from qdo.coordination.client import connect

    done = asked_to_end()
    client = connect(
        TOLD["settings"]["coordinator"],
        session_timeout_seconds=float(TOLD["settings"]["session_timeout_seconds"]),
    )
    client.open(10.0)
    session, password = client.client_id
    say({"session": f"{session:x}", "password": password.hex()})
    executor = subprocess.Popen(
        [sys.executable, "-c", "import threading; threading.Event().wait(600)"]
    )
    client.create(f"/held/{os.getpid()}", str(executor.pid).encode(), ephemeral=True)
    show(f"child holds pid={os.getpid()} executor={executor.pid} session={session:x}")
    done.wait()
    executor.kill()
    executor.wait()
    client.stop()
    client.close()
    say({"session": None})


MODES: dict[str, Callable[..., None]] = {
    "serve": serve,
    "stubborn": stubborn,
    "leave": leave,
    "leave_first": leave_first,
    "babble": babble,
    "orphan": orphan,
    "hold": hold,
}

if __name__ == "__main__":
    MODES[sys.argv[1]](*sys.argv[2:-1])  # the last one is for `ps`
