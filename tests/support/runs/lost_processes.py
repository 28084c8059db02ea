"""A plugin of pytest: a run with xdist goes on if one of its processes is lost.

xdist 3.8 gives the next process all items of the lost one again, even those that are done. It
then waits forever for results of these, and the item at fault takes one process after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling


class Scheduling(LoadGroupScheduling):
    """Groups as in xdist, where a lost process costs one item."""

    def remove_node(self, node: Any) -> str | None:
        """Give the items that a process has left to others; return the one that it was running."""
        units = self.assigned_work.pop(node)
        lost: str | None = None
        for scope, unit in units.items():
            for item in [item for item, is_done in unit.items() if not is_done]:
                if lost is None:
                    lost = item
                    unit[item] = True  # it has failed
            if not all(unit.values()):
                self.workqueue[scope] = unit
        if lost is not None:
            for each in self.assigned_work:
                self._reschedule(each)
        return lost

    def schedule(self) -> None:
        """Give work to all processes, and twice to a new one: it keeps the last item waiting."""
        is_new_process = self.collection is not None
        super().schedule()
        if is_new_process:
            super().schedule()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Replace xdist's own."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
