"""The paths of all nodes that qdo uses in the coordinator."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdo.errors import SettingsError
from qdo.queues import name_error

DEFAULT_NAMESPACE = "/mozilla/services/qdo"
WORKER_STEM = "worker-"
_WORKER = re.compile(r"worker-[0-9]{10,}", re.ASCII)
_VERSION = re.compile(r"[0-9]{10}", re.ASCII)


class _Below:
    """A node below the root of an app."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: FleetLayout | Layout, kind: object = None) -> str:
        return f"{layout.root}/{self._name}"


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """The paths of the nodes, except queues, that the processes of an app share."""

    root: str
    documents = _Below("documents")
    locks = _Below("locks")
    limits = _Below("limits")
    timers = _Below("timers")
    holds = _Below("holds")
    settings = _Below("settings")
    chores = _Below("chores")
    actions = _Below("actions")
    actionoutput = _Below("actionoutput")
    actionlog = _Below("actionlog")

    def lock(self, name: str) -> str:
        return f"{self.root}/locks/{name}"

    def limit(self, name: str) -> str:
        return f"{self.root}/limits/{name}"

    def document_set(self, name: str) -> str:
        return f"{self.root}/documents/{name}"

    def actions_of(self, worker: str) -> str:
        return f"{self.root}/actions/{worker}"

    def log_entry(self, name: str) -> str:
        return f"{self.root}/actionlog/{name}"


def clients_of(root: str) -> str:
    """Return the folder of processes that hold locks or permits but are not workers."""
    return f"{root}/components/client"


def holder_of(root: str, name: str) -> str:
    """Return the node of a holder of permits, given a worker's name or "client/COMPONENT"."""
    return f"{root}/{'components' if '/' in name else 'workers'}/{name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one app."""

    root: str
    workers = _Below("workers")
    queues = _Below("queues")
    assignments = _Below("assignments")
    rebalancer = _Below("rebalancer")
    election = _Below("election")
    components = _Below("components")
    doorbells = _Below("doorbells")
    broker = _Below("broker")

    @classmethod
    def of(cls, app: str, namespace: str = DEFAULT_NAMESPACE) -> Layout:
        """Return the layout of `app` below `namespace`; raise SettingsError for a bad name."""
        reason = name_error(app)
        if reason:
            raise SettingsError(name="app", reason=f"{app!r} cannot be a znode name: {reason}")
        if not namespace.startswith("/") or any(map(name_error, namespace.strip("/").split("/"))):
            raise SettingsError(
                name="namespace",
                reason=f"must be an absolute znode path such as /a/b, got {namespace!r}",
            )
        return cls(f"{namespace.rstrip('/')}/{app}")

    @property
    def fleet(self) -> FleetLayout:
        return FleetLayout(self.root)

    @property
    def persistent(self) -> tuple[str, ...]:
        """The nodes that must exist before a worker registers."""
        return (
            self.workers,
            self.queues,
            self.assignments,
            self.rebalancer,
            self.election,
            self.components,
            self.fleet.actions,
            self.fleet.actionlog,
            self.fleet.actionoutput,
            self.fleet.holds,
            self.fleet.settings,
        )

    def worker(self, name: str) -> str:
        return f"{self.root}/workers/{name}"

    def queue(self, name: str) -> str:
        return f"{self.root}/queues/{name}"

    def doorbell(self, queue: str) -> str:
        return f"{self.root}/doorbells/{queue}"

    def assignment(self, worker: str) -> str:
        return f"{self.root}/assignments/{worker}"


def is_version_name(name: str) -> bool:
    """Return whether a node below `settings` is a version of the live settings."""
    return _VERSION.fullmatch(name) is not None


def is_worker_name(name: str) -> bool:
    """Return whether a node below `workers` belongs to a worker, not to another tool."""
    return _WORKER.fullmatch(name) is not None
