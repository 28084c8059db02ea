"""What a parent process serves by HTTP: metrics and health, of itself and of all its processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from qdo.errors import SettingsError
from qdo.settings.settings import Settings
from qdo.system.http_server import HttpServer
from qdo.text import describe
from qdo.worker.metrics.exposition import check_library
from qdo.worker.metrics.monitor import STEP_SECONDS, Monitor, MonitoredChild, SlotView
from qdo.worker.supervisor.restarts import Phase, RestartPolicy

_STATES = {Phase.RUNNING: "running", Phase.WAITING: "restarting", Phase.ENDED: "ended"}

_log = logging.getLogger(__name__)


class HttpService:
    """The HTTP server of a parent, and what it shows; without an address, nothing.

    Leaving it as a context manager closes the server.
    """

    def __init__(self) -> None:
        self._server: HttpServer | None = None
        self._monitor: Monitor | None = None

    def listen(self, settings: Settings) -> None:
        """Serve at the address in the settings, unless this process already serves at one.

        :raises SettingsError: it cannot listen there, or a library is missing.
        """
        if not settings.http or self._server is not None:
            return
        check_library()
        monitor = Monitor(settings.session_timeout_seconds)
        routes = {
            "/metrics": monitor.metrics,
            "/healthz": monitor.healthz,
            "/readyz": monitor.readyz,
        }
        host, _, port = settings.http.rpartition(":")
        try:
            self._server = HttpServer(host.strip("[]"), int(port), routes)
        except (OSError, UnicodeError) as error:
            reason = (
                f"cannot listen at {settings.http}: {describe(error)}; name a free port of this"
                " machine"
            )
            raise SettingsError(name="http", reason=reason) from error
        self._monitor = monitor
        self._server.start()
        host, bound = self._server.address
        shown = f"[{host}]" if ":" in host else host
        _log.info("serving metrics and health at http://%s:%d", shown, bound)

    @property
    def next_at(self) -> float | None:
        """When `look` has to be called again, on `time.monotonic`; None: never."""
        return None if self._monitor is None else time.monotonic() + STEP_SECONDS

    def look(self, policy: RestartPolicy, children: Mapping[int, MonitoredChild]) -> None:
        """Take note of the processes that a parent supervises."""
        if self._monitor is not None:
            self._monitor.look(
                [
                    SlotView(
                        slot_name(slot),
                        _STATES[entry.phase],
                        policy.is_stopping(slot),
                        children.get(slot),
                    )
                    for slot, entry in enumerate(policy.slots)
                ]
            )

    def __enter__(self) -> HttpService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()


def slot_name(slot: int) -> str:
    """Return the name of the process of a slot, for logs and answers."""
    return f"process {slot + 1}"
