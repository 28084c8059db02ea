"""The data that a parent process passes to its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qdo.worker.metrics.page import MetricsPage
from qdo.worker.shared_memory.in_flight import InFlightTable
from qdo.worker.shared_memory.receipt_handles import SharedReceiptStore


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The surroundings of a worker process; the defaults are for a worker without a parent.

    :ivar target: the app as MODULE:APP, which jobs with the executor "process" import; "" if
        the app was built around the job named in the settings; None if its origin is unknown.
    :ivar in_flight: shared table of the messages in flight. The parent reads it after a crash.
    :ivar receipts: shared store of the receipt handles held at the broker, for the same purpose.
    :ivar metrics: where the worker publishes its metrics for the parent.
    :ivar left: queue and receipt handle of each message that dead processes held. The worker
        releases them, see `Broker.release`.
    :ivar restarted: the worker replaces a process that ran before. Queues that suit no job then
        do not stop it.
    :ivar ask_parent: asks the parent for what an operator wants of this worker, by the name of the
        action; None without a parent.
    :ivar exit: called with the exit code when the process must exit at once: from a native
        thread at the third stop signal, and at the end if jobs in threads are still running.
    """

    target: str | None = None
    in_flight: InFlightTable = field(default_factory=lambda: InFlightTable(1))
    receipts: SharedReceiptStore | None = None
    metrics: MetricsPage = field(default_factory=MetricsPage)
    left: Sequence[tuple[str, str]] = ()
    restarted: bool = False
    ask_parent: Callable[[str], None] | None = None
    exit: Callable[[int], None] | None = None
