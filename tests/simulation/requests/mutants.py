"""Mistakes planted into the code of requests, which the histories must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import qdo.brokers.embedded.requests as statements
import qdo.worker.pools.returner
from qdo.errors import UnreachableError
from qdo.testing.memory_broker import MemoryRequests
from qdo.worker.pools.returner import Returner
from tests.simulation.requests.world import PoolSlot, PoolWorld, StoreLink

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
_GUARD, _NO_GUARD = statements._OF_TAKE, "WHERE app = :app AND id = :id"


def _edit(name: str, old: str, new: str) -> Plant:
    """Change a statement."""

    def plant(patch: Patch) -> None:
        text = getattr(statements, name)
        assert old in text, f"{name} no longer has {old!r}"
        patch.setattr(statements, name, text.replace(old, new))

    return plant


def _gives_back_without_sync(patch: Patch) -> None:
    names = PoolWorld.current_names
    patch.setattr(PoolWorld, "current_names", lambda *args, sync: names(*args, sync=False))


def _lists_workers_before_owners(patch: Patch) -> None:
    def give_back(self: Returner, client: Any, layout: Any, fence: Any) -> None:
        workers = qdo.worker.pools.returner.current_names(client, layout.workers)
        for owner in self._store.owners():
            if owner not in workers:
                self._store.give_back(owner)

    patch.setattr(Returner, "_give_back", give_back)


def _gives_back_without_owner(patch: Patch) -> None:
    """By the ids that an owner had when the leader looked."""
    owners, seen = MemoryRequests.owners, dict[str, list[str]]()

    def looked(self: MemoryRequests) -> list[str]:
        for owner in (found := owners(self)):
            seen[owner] = [each.id for each in self.records() if each.take.owner == owner]
        return found

    def give_back(self: MemoryRequests, owner: str) -> int:
        ids = seen.get(owner, ())
        return sum(self._alter(statements._GIVE_BACK, id=id) for id in ids)

    _edit("_GIVE_BACK", "owner = :owner AND", "id = :id AND")(patch)
    patch.setattr(MemoryRequests, "owners", looked)
    patch.setattr(MemoryRequests, "give_back", give_back)


def _looks_for_own_rows(patch: Patch, times: int) -> None:
    """A worker looks for lost answers so often after each."""
    left: dict[Any, int] = {}

    def take(self: StoreLink, owner: str, pool: str, places: int, running: Any) -> Any:
        known = running if left.get((owner, pool)) else list(self.world.store.rows)
        try:
            found = self._send("take", owner, pool, places, known)
        except UnreachableError:
            left[owner, pool] = times
            raise
        left[owner, pool] = max(0, left.get((owner, pool), 0) - 1)
        return found

    patch.setattr(StoreLink, "take", take)


def _ends_in_two_transactions(patch: Patch) -> None:
    """The worker sends the message once it knows of the end."""

    def end(
        self: StoreLink,
        take: Any,
        outcome: str,
        result: Any,
        error: str | None,
        messages: Any,
        failed: int | None,
    ) -> bool:
        ended: bool = self._send("end", take, outcome, result, error, (), failed)
        if ended:
            self._send("_send", None, messages)
        return ended

    patch.setattr(StoreLink, "end", end)


def _takes_in_order_of_age(patch: Patch) -> None:
    sql = statements._DUE.sql.replace("ORDER BY rank, number", "ORDER BY number")
    patch.setattr(statements, "_DUE", statements.Query(sql, statements._TAKEN_TYPES))


def _uses_names_again(patch: Patch) -> None:
    patch.setattr(PoolWorld, "reused_names", True)


MUTANTS: Mapping[str, Sequence[Plant]] = {
    "gives back without sync": [_gives_back_without_sync],
    "lists workers before owners": [_lists_workers_before_owners],
    "gives back without owner": [_gives_back_without_owner],
    "gives back what is over": [_edit("_GIVE_BACK", " AND state IN (1, 2)", "")],
    "puts back without guard": [_edit("_PUT_BACK", _GUARD, _NO_GUARD)],
    "starts without lease": [lambda patch: patch.setattr(PoolSlot, "may_start", lambda self: True)],
    "never looks for own rows": [lambda patch: _looks_for_own_rows(patch, 0)],
    "looks for own rows once": [lambda patch: _looks_for_own_rows(patch, 1)],
    "uses names again": [_uses_names_again],
    "uses names again, never looks": [
        _uses_names_again,
        lambda patch: _looks_for_own_rows(patch, 0),
    ],
    "ends in two transactions": [_ends_in_two_transactions],
    "ends without guard": [_edit("_END", _GUARD, _NO_GUARD)],
    "notes without guard": [_edit("_NOTE", _GUARD, _NO_GUARD)],
    "keeps the mark that resumed": [_edit("_NOTE", "END\n", "ELSE mark END\n")],
    "keeps answers given back": [_edit("_GIVE_BACK", "THEN mark END", "ELSE mark END")],
    "keeps answers put back": [_edit("_PUT_BACK", "THEN mark END", "ELSE mark END")],
    "answers another question": [_edit("_MARK", "mark IS :asked", "mark LIKE '{\"paused\"%'")],
    "forgets marks given back": [_edit("_GIVE_BACK", "THEN mark END", "THEN NULL END")],
    "resumes what is cancelled": [_edit("_MARK", "LIKE '{\"paused\"%' END", "IS NOT NULL END")],
    "takes in order of age": [_takes_in_order_of_age],
}
