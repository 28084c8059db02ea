"""The queues that the operators of a soak change."""

from __future__ import annotations

SERIAL = (*(f"ops-{number}" for number in range(5)), "opsblock-0", "opsblock-1", "opsbatch-0")
KEYED = ("opskey-0", "opskey-1")
KEPT = (*SERIAL, *KEYED)
DELETED = ("gone-0", "gone-1")
CREW_QUEUES = (*KEPT, *DELETED)
