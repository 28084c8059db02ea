"""The ranges of shards: how a stream is divided, and what cannot be."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from qdo.brokers.streams import (
    StreamShard,
    check_ranges,
    checked_bound,
    first_shards,
    key_hash,
    merge,
    split,
)
from qdo.errors import NotFoundError, QueueNameError, ShardStateError, UsageError
from qdo.queues import stream_named

FOUR = first_shards("user", 4)


def names(shards: list[StreamShard]) -> list[str]:
    return [each.queue for each in shards]


def test_first_shards_have_equal_ranges() -> None:
    assert names(FOUR) == ["user.-40", "user.40-80", "user.80-c0", "user.c0-"]
    assert names(first_shards("user", 1)) == ["user.-"]
    many = first_shards("user", 4096)
    assert (many[1].queue, many[-1].queue) == ("user.0010-0020", "user.fff0-")


@pytest.mark.parametrize("count", [1, 2, 8, 512, pytest.param(4096, marks=pytest.mark.slow)])
def test_each_key_has_one_shard(count: int) -> None:
    shards = first_shards("user", count)
    for number in range(100):
        hashed = key_hash(f"key {number}")
        assert hashed == hashlib.sha256(f"key {number}".encode()).hexdigest()[:16]
        assert sum(each.has(hashed) for each in shards) == 1
    bounds = [each.low for each in shards]
    assert sum(each.has("0" * 16) for each in shards) == sum(each.has("f" * 16) for each in shards)
    assert all(sum(other.has(low.ljust(16, "0")) for other in shards) == 1 for low in bounds)


@pytest.mark.parametrize(
    ("wrong", "ranges"),
    [
        ("s.80-", ["80-"]),
        ("s.-40", ["-40"]),
        ("s.80-", ["-40", "80-"]),
        ("s.40-", ["-80", "40-"]),
        ("s.-", ["-", "-"]),
        ("s.-zz", ["-zz", "zz-"]),
    ],
)
def test_wrong_ranges_are_named(wrong: str, ranges: list[str]) -> None:
    shards = [StreamShard("s", f"s.{each}", *each.split("-")) for each in ranges]
    with pytest.raises(ShardStateError) as raised:
        check_ranges(shards)
    assert raised.value.details["queue"] == wrong
    check_ranges(FOUR)


def test_splits_and_merges_cover_what_was_there() -> None:
    """Whatever is divided at random, with bounds of any length."""
    dice = random.Random(1)
    shards = first_shards("s", 2)
    for _ in range(200):
        opened = sorted((each for each in shards if each.end is None), key=lambda each: each.low)
        if len(opened) > 1 and dice.random() < 0.5:
            place = dice.randrange(len(opened) - 1)
            children = merge(shards, opened[place + 1].queue, opened[place].queue)
        else:
            children = split(shards, dice.choice(opened).queue)
        parents = children[0].parents
        shards = [
            StreamShard(*(each.stream, each.queue, each.low, each.high), each.parents, 1)
            if each.queue in parents
            else each
            for each in [*shards, *children]
        ]
        ends = sorted((each.low, each.high) for each in shards if each.end is None)
        assert [low for low, _ in ends] == ["", *(high for _, high in ends[:-1])]
        assert ends[-1][1] == ""
    assert len({*names(shards)}) == len(shards)
    assert all(stream_named(each) == "s" for each in names(shards))


@pytest.mark.parametrize(
    ("bound", "short"),
    [
        ("8", "80"),
        ("80", "80"),
        ("8000", "80"),
        ("08", "08"),
        ("aBc", "abc0"),
        ("f" * 16, "f" * 16),
    ],
)
def test_bounds_have_one_form(bound: str, short: str) -> None:
    assert checked_bound(bound) == short


@pytest.mark.parametrize("bound", ["", "g", "8G", "1" * 17, "-", "0x8", None, 80, "8\n"])
def test_other_bounds_are_refused(bound: Any) -> None:
    with pytest.raises(UsageError):
        checked_bound(bound)


@pytest.mark.parametrize("at", ["40", "80", "4000", "0", "3f", "81", "ff"])
def test_a_bound_must_be_within_the_shard(at: str) -> None:
    with pytest.raises(UsageError):
        split(FOUR, "user.40-80", at)


def test_a_single_hash_cannot_be_divided() -> None:
    low = "ab" * 8
    narrow = StreamShard("s", f"s.{low}-{low[:-1]}c", low, f"{low[:-1]}c")
    with pytest.raises(UsageError):
        split([narrow], narrow.queue)


@pytest.mark.parametrize(
    "queues",
    [("user.-40",), ("user.-40", "user.80-c0"), ("user.-40", "user.-40"), ("user.c0-", "user.-40")],
)
def test_only_neighbors_are_merged(queues: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        merge(FOUR, *queues)


def test_shards_of_two_streams_are_not_merged() -> None:
    with pytest.raises(UsageError):
        merge([*FOUR, *first_shards("other", 4)], "user.-40", "other.40-80")


def test_sealed_and_unknown_shards_stay_as_they_are() -> None:
    sealed = StreamShard("user", "user.-40", "", "40", (), 7)
    for plan in (
        lambda: split([sealed], "user.-40"),
        lambda: merge([sealed, *FOUR[1:]], *names(FOUR[:2])),
    ):
        with pytest.raises(ShardStateError):
            plan()
    with pytest.raises(NotFoundError):
        split(FOUR, "user.00-40")


@pytest.mark.parametrize("count", [0, 3, 5000, 8192, -4, True, "4", 4.0, None])
def test_numbers_of_shards_are_powers_of_two(count: Any) -> None:
    with pytest.raises(UsageError):
        first_shards("user", count)


@pytest.mark.parametrize("name", ["a.b", "", "a/b", "u" * 200])
def test_a_stream_has_the_name_of_queues(name: str) -> None:
    """So that those of its shards are valid, too."""
    with pytest.raises((UsageError, QueueNameError)):
        first_shards(name, 4)


@pytest.mark.parametrize(
    "queue", ["mail", "mail-eu", "mail.eu-1", "mail.4-8", "a.b.40-80", "user.40-80.x", ".40-80"]
)
def test_other_names_are_of_no_stream(queue: str) -> None:
    assert stream_named(queue) is None
