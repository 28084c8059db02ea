"""What one process may use of a limit: max-min fair targets, permits, and starts of a rate."""

from __future__ import annotations

import random

from qdo.fleet.limit_node import ShareHolder
from qdo.fleet.permit_counts import StartCount, targets


def _targets(total: int, *wants: int) -> list[int]:
    return targets(total, [ShareHolder(f"w{n}", 0, each) for n, each in enumerate(wants)])


def test_targets_equal_a_deal_one_by_one() -> None:
    """Max-min fair, down the order, for random wants; and as fast for large numbers."""
    chance = random.Random(1)
    for _ in range(500):
        total = chance.randint(0, 20)
        wants = [chance.randint(0, 6) for _ in range(chance.randint(1, 6))]
        dealt, left = [0] * len(wants), total
        while left and dealt != wants:
            for index, each in enumerate(wants):
                if left and dealt[index] < each:
                    dealt[index] += 1
                    left -= 1
        assert _targets(total, *wants) == dealt
    assert _targets(10) == []
    assert _targets(1_000_000, 1_000_000, 999_999) == [500_000, 500_000]


def _share(units: int, unit_rate: float, now: float = 0.0) -> StartCount:
    share = StartCount()
    share.set_rate(unit_rate, now)
    share.acknowledge(units, units, now)
    return share


def _starts(share: StartCount, now: float) -> int:
    """Take all that may be taken."""
    count = 0
    while share.has_free(now):
        share.take()
        count += 1
    return count


def test_units_serve_one_start_in_a_window() -> None:
    """New units at once: their former holder kept them until their window was over."""
    share = _share(4, 0.5)
    assert _starts(share, 0.0) == 4
    assert share.next_at(0.0) == 2.0
    assert _starts(share, 1.9) == 0
    assert _starts(share, 2.0) == 4
    assert _starts(share, 100.0) == 4


def test_starts_of_a_lowered_share_are_given_up_after_a_window() -> None:
    share = _share(4, 0.5)
    assert _starts(share, 100.0) == 4
    share.limit(1, 100.0)
    assert share.occupied == 4
    assert share.less_at(100.0) == 102.0
    assert _starts(share, 101.9) == 0
    assert _starts(share, 102.0) == 1
    assert (share.occupied, share.next_at(102.0)) == (1, 104.0)


def test_moving_shares_start_no_more_than_the_rate_allows() -> None:
    """In any window at most the burst, however often shares move."""
    rate, burst = 10.0, 5
    chance = random.Random(2)
    shares = [_share(units, rate / burst) for units in (2, 2, 1)]
    times: list[float] = []
    now = 0.0
    for _ in range(3000):
        now += chance.random() * 0.05
        if chance.random() < 0.3:
            giver, taker = chance.sample(shares, 2)
            if giver.cap and not giver.has_free(now):
                giver.limit(giver.cap - 1, now)
            giver.demand(now)
            if giver.held > max(giver.cap, giver.occupied):
                giver.acknowledge(giver.held - 1, giver.cap, now)
                taker.acknowledge(taker.held + 1, taker.cap + 1, now)
        for share in shares:
            times += [now] * _starts(share, now)
    assert len(times) > 0.5 * rate * now
    assert all(later - at > 0.4999 for at, later in zip(times, times[burst:], strict=False))
