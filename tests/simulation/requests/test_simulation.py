"""Random histories of workers that take requests; see `tests.simulation.requests`."""

from __future__ import annotations

import pytest

from tests.simulation.requests.mutants import MUTANTS
from tests.simulation.requests.world import play

HISTORIES = 300
MUTANT_HISTORIES = 60


def test_no_history_of_requests_violates_an_invariant(histories: int | None) -> None:
    """Whatever gets lost or comes late: each ends once, with one message, run by one at a time."""
    for seed in range(histories or HISTORIES):
        violation, _ = play(seed)
        hint = f"{violation}; python -m tests.simulation.requests.world {seed}"
        assert violation is None, hint


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_with_requests_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that finds nothing would be worth nothing."""
    for plant in MUTANTS[name]:
        plant(monkeypatch)
    for seed in range(MUTANT_HISTORIES):
        if play(seed)[0] is not None:
            return
    pytest.fail(f"{MUTANT_HISTORIES} histories hold although the code {name}")


def test_a_seed_gives_the_same_requests_again() -> None:
    """The trace of a failure can be printed after the fact."""
    traces = [play(7, tracing=True)[1].schedule.trace for _ in range(2)]
    assert traces[0]
    assert traces[0] == traces[1]
