"""Every path that qdo uses in ZooKeeper."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdo.errors import SettingsError
from qdo.queues import name_error

DEFAULT_NAMESPACE = "/mozilla/services/qdo"


WORKER_STEM = "worker-"


_WORKER = re.compile(r"worker-[0-9]{10,}", re.ASCII)
_VERSION = re.compile(r"[0-9]{10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """The paths of the nodes that the processes of one app share beside queues."""

    root: str

    @property
    def documents(self) -> str:
        return f"{self.root}/documents"

    @property
    def locks(self) -> str:
        return f"{self.root}/locks"

    def lock(self, name: str) -> str:
        return f"{self.root}/locks/{name}"

    @property
    def limits(self) -> str:
        return f"{self.root}/limits"

    def limit(self, name: str) -> str:
        return f"{self.root}/limits/{name}"

    @property
    def timers(self) -> str:
        return f"{self.root}/timers"

    @property
    def holds(self) -> str:
        return f"{self.root}/holds"

    @property
    def settings(self) -> str:
        return f"{self.root}/settings"

    @property
    def chores(self) -> str:
        return f"{self.root}/chores"

    def document_set(self, name: str) -> str:
        return f"{self.root}/documents/{name}"

    @property
    def actions(self) -> str:
        return f"{self.root}/actions"

    def actions_of(self, worker: str) -> str:
        return f"{self.root}/actions/{worker}"

    @property
    def actionoutput(self) -> str:
        return f"{self.root}/actionoutput"

    @property
    def actionlog(self) -> str:
        return f"{self.root}/actionlog"

    def log_entry(self, name: str) -> str:
        return f"{self.root}/actionlog/{name}"


def clients_of(root: str) -> str:
    """Return the folder of processes that are not workers, but hold locks or permits."""
    return f"{root}/components/client"


def holder_of(root: str, name: str) -> str:
    """Return the node of a holder of permits: a worker, or "client/" and a component."""
    return f"{root}/{'components' if '/' in name else 'workers'}/{name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one app."""

    root: str

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
    def workers(self) -> str:
        return f"{self.root}/workers"

    @property
    def queues(self) -> str:
        return f"{self.root}/queues"

    @property
    def assignments(self) -> str:
        return f"{self.root}/assignments"

    @property
    def rebalancer(self) -> str:
        return f"{self.root}/rebalancer"

    @property
    def election(self) -> str:
        return f"{self.root}/election"

    @property
    def components(self) -> str:
        return f"{self.root}/components"

    @property
    def doorbells(self) -> str:
        return f"{self.root}/doorbells"

    @property
    def broker(self) -> str:
        return f"{self.root}/broker"

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
    """Return whether a node below `workers` belongs to a worker, and not to another tool."""
    return _WORKER.fullmatch(name) is not None
