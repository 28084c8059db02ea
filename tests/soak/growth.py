"""What must not grow while a fleet runs: the memory of its processes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

SAMPLE_SECONDS = 5.0
SETTLED_SECONDS = 20.0
"""A process has imported everything by then."""
MOST_MIB = 20.0
"""More growth of one process, between its settled state and its last sample, is a leak."""


class Growth:
    """Samples the resident memory of processes."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._next = 0.0

    def due(self) -> bool:
        """Return whether it is time for another sample."""
        return time.monotonic() >= self._next

    def sample(self, pids: Iterable[int]) -> None:
        """Take a sample."""
        now = time.monotonic()
        self._next = now + SAMPLE_SECONDS
        for pid in pids:
            mebibytes = resident_mib(pid)
            if mebibytes:
                self._samples[pid].append((now, mebibytes))

    def grown(self) -> dict[int, tuple[float, float, float]]:
        """Return, by process: seconds observed, MiB when it had settled, MiB at the end."""
        found = {}
        for pid, samples in self._samples.items():
            settled = [each for each in samples if each[0] >= samples[0][0] + SETTLED_SECONDS]
            if len(settled) > 1:
                seconds = settled[-1][0] - settled[0][0]
                found[pid] = seconds, settled[0][1], settled[-1][1]
        return found

    def violations(self) -> Iterator[str]:
        """Return the processes that have grown by too much."""
        for pid, (seconds, first, last) in self.grown().items():
            if last - first > MOST_MIB:
                grew = f"from {first:.0f} to {last:.0f} MiB in {seconds:.0f} s"
                yield f"memory: process {pid} grew {grew}"

    def summary(self) -> str:
        """Return the largest growth, for people."""
        grown = self.grown().values()
        worst = max(grown, key=lambda each: each[2] - each[1], default=(0.0, 0.0, 0.0))
        return f"largest growth {worst[1]:.1f} to {worst[2]:.1f} MiB in {worst[0]:.0f} s"


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)
