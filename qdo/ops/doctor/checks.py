"""The checks of `qdo doctor`: a further one is a function, and a line in `CHECKS`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from qdo.errors import QdoError, UnreachableError
from qdo.ops.doctor import brokers, coordinator, fleet
from qdo.ops.doctor.case import Case, Diagnosis, failed, unknown
from qdo.text import describe

TOTAL_SECONDS = 8.0
"""For all checks. Opening the coordinator and the broker comes on top."""
CHECK_SECONDS = 5.0
FIRST_SECONDS = 2.0
"""For the checks that `qdo status` makes."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    :ivar name: stable, for programs.
    :ivar needs: what must be reachable: "coordinator", "broker", both, or nothing.
    :ivar first: `qdo status` and the dashboard make it, too: it is cheap, and finds a fault that
        the states of queues do not name.
    """

    name: str
    find: Callable[[Case], Diagnosis]
    needs: tuple[str, ...] = ()
    first: bool = False


BOTH = ("coordinator", "broker")
CHECKS = (
    Check("coordinator-latency", coordinator.latency, ("coordinator",)),
    Check("coordinator-servers", coordinator.servers, ("coordinator",), first=True),
    Check("coordinator-versions", coordinator.server_versions, ("coordinator",)),
    Check("leader", coordinator.leader, ("coordinator",)),
    Check("workers", fleet.workers, ("coordinator",)),
    Check("lost-workers", fleet.lost, ("coordinator",), first=True),
    Check("versions", coordinator.versions, ("coordinator",)),
    Check("clocks", coordinator.clock, ("coordinator",), first=True),
    Check("broker-latency", brokers.listing, ("broker",)),
    Check("disk", brokers.disk, first=True),
    Check("open-files", brokers.open_files),
    Check("deadlines", brokers.deadlines, ("broker",)),
    Check("dead-letters", brokers.dead_letters, ("broker",)),
    Check("queues-without-jobs", fleet.queues_without_jobs, BOTH),
    Check("jobs-without-queues", fleet.jobs_without_queues, ("broker",)),
    Check("broker-settings", brokers.configuration, ("broker",)),
    Check("rights", coordinator.rights, ("coordinator",)),
    Check("queues", fleet.queues, BOTH),
    Check("retention", brokers.retention, ("broker",)),
)
"""In the order in which they are made and shown; slow ones come last."""


def diagnose(
    case: Case, total_seconds: float = TOTAL_SECONDS, checks: tuple[Check, ...] = CHECKS
) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the name and the answer of each check; none takes longer than the time left."""
    yield from ((name, _reach(case, name)) for name in BOTH)
    deadline = time.monotonic() + total_seconds
    for check in checks:
        missing = [name for name in check.needs if _is_missing(case, name)]
        left = min(deadline - time.monotonic(), CHECK_SECONDS)
        if missing:
            yield check.name, unknown(f"this needs the {missing[0]}")
        elif left <= 0:
            yield check.name, unknown("not checked: the checks before it took too long")
        else:
            yield check.name, within(left, partial(_answer, check, case))


def notices(case: Case) -> list[dict[str, str | None]]:
    """Return the faults around the queues that the first checks find, as items."""
    first = tuple(each for each in CHECKS if each.first)
    return [
        {"check": name, "status": found.status, "reason": found.text, "remedy": found.remedy}
        for name, found in diagnose(case, FIRST_SECONDS, first)
        if name not in BOTH and found.status in ("warning", "failed")
    ]


def within(seconds: float, ask: Callable[[], Diagnosis]) -> Diagnosis:
    """Return an answer; "unknown" if it takes longer. Its thread is then left to itself."""
    found: list[Diagnosis] = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else unknown(f"no answer within {seconds:.1f} s")


def _answer(check: Check, case: Case) -> Diagnosis:
    try:
        return check.find(case)
    except UnreachableError as error:
        return failed(str(error), "start it, or correct its address")
    except QdoError as error:
        return unknown(str(error))
    except Exception as error:  # noqa: BLE001 - one check must not hide the others
        return unknown(describe(error))


def _is_missing(case: Case, name: str) -> bool:
    return (case.client if name == "coordinator" else case.broker) is None


def _reach(case: Case, name: str) -> Diagnosis:
    url = case.coordinator_url if name == "coordinator" else case.broker_url
    fault = case.faults.get(name)
    if fault is not None:
        return failed(fault, "start it, or correct its address")
    if _is_missing(case, name):
        what = "worker has used it" if name == "coordinator" else "message was sent to it"
        return failed(f"{url} does not exist: no {what}", "correct the address, or begin")
    return Diagnosis("ok", f"{url} can be reached")
