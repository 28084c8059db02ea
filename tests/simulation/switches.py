"""Faults in the environment of the state machines, for mutants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switches:
    """Everything off is the world as it should be.

    :ivar reuse_numbers: the coordinator gives the numbers of gone nodes again.
    :ivar late_requests: requests of a lost connection land after the reconnection.
    :ivar close_living: parents close the sessions of children that are only stopped.
    :ivar keep_starting: the engine starts messages though the claim is being released.
    :ivar ignore_lost: the engine continues with claims after it was notified of their loss.
    :ivar current_lease: the engine looks at the lease of the process's present registration.
    :ivar careless_threads: the threads of a blocked process start messages without a lease.
    :ivar filters: workers take only some queues; nothing is wrong with that world either.
    :ivar actions: operators ask workers for actions; nothing is wrong with that world either.
    :ivar moves: operators hand queues to workers; nothing is wrong with that world either.
    :ivar limits: jobs need permits of a limit; nothing is wrong with that world either.
    :ivar waits: jobs wait before they begin, as for documents; nor is with that one.
    """

    reuse_numbers: bool = False
    late_requests: bool = False
    close_living: bool = False
    keep_starting: bool = False
    ignore_lost: bool = False
    current_lease: bool = False
    careless_threads: bool = False
    filters: bool = False
    actions: bool = False
    limits: bool = False
    moves: bool = False
    waits: bool = False
