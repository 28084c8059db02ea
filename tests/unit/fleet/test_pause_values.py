"""Values of the node `holds`, and globs that have a name in common."""

from __future__ import annotations

import fnmatch
import itertools

import pytest

from qdo.errors import UsageError
from qdo.fleet.names import match_everything, overlap
from qdo.fleet.pause_machine import MAX_PAUSES, Pause, PauseNode, paused_queues, pauses_of
from qdo.fleet.pauses import new_pause


def test_holds_are_read_as_they_were_written() -> None:
    pauses = (
        Pause("0123456789ab", ("tenant-7-*", "x"), "migrate", "me@host", 5.0, 17.5),
        Pause("f" * 32, ("*",), by="/qdo/shop/pauses/ffff"),
    )
    assert PauseNode.parse(PauseNode(pauses).encode()) == PauseNode(pauses)


@pytest.mark.parametrize("data", [None, b"", b"{}", b'{"holds": []}'])
def test_empty_nodes_hold_nothing(data: bytes | None) -> None:
    assert PauseNode.parse(data) == PauseNode()


@pytest.mark.parametrize(
    "value",
    [
        b"null",
        b'{"holds": null}',
        b'{"holds": [{}]}',
        b'{"holds": [{"id": 7, "queues": ["*"]}]}',
        b'{"holds": [{"id": "01234567", "queues": []}]}',
        b'{"holds": [{"id": "01234567", "queues": ["a", 1]}]}',
        b'{"holds": [{"id": "01234567", "queues": ["a"], "until": "soon"}]}',
        b'{"holds": [{"id": "01234567", "queues": ["a"], "until": true}]}',
        b'{"holds": [{"id": "01234567", "queues": ["a"], "until": 9223372036854775808}]}',
        b'{"holds": [{"id": "01234567", "queues": ["a"], "by": "relative"}]}',
        b'{"holds": [{"id": "01234567", "queues": ["a"], "by": "/a//b"}]}',
        b'{"holds": [{"id": "01234567", "queues": ["' + b"*a" * 9000 + b'"]}]}',
        b'{"holds": ["' + b"x" * 70_000 + b'"]}',
        PauseNode(tuple(Pause(f"{n:08x}", ("a",)) for n in range(MAX_PAUSES + 1))).encode(),
    ],
)
def test_unreadable_nodes_say_why(value: bytes) -> None:
    node = PauseNode.parse(value)
    assert node.fault
    assert not node.pauses


def test_holds_match_queues_by_any_of_their_globs() -> None:
    first, second = Pause("a" * 8, ("a-*", "b")), Pause("b" * 8, ("a-1",))
    paused = paused_queues([first, second])
    assert paused is not None
    assert [paused(name) for name in ("a-1", "a-2", "b", "c")] == [True, True, True, False]
    assert pauses_of("a-1", [first, second]) == (first, second)
    assert pauses_of("b", [first, second]) == (first,)
    assert paused_queues([]) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_hold_must_last_some_time(seconds: float) -> None:
    with pytest.raises(UsageError):
        new_pause(["q"], seconds=seconds)


GLOBS = ["*", "a", "a*", "*a", "a*b", "?", "a?", "?b", "[ab]", "[!a]*", "ab*a", "*b*", "aa"]
NAMES = ["".join(each) for length in range(5) for each in itertools.product("abc", repeat=length)]


def test_globs_overlap_if_a_name_matches_both() -> None:
    """A set counts as any character: then more globs overlap, and never fewer."""
    for one, other in itertools.product(GLOBS, repeat=2):
        common = any(
            fnmatch.fnmatchcase(name, one) and fnmatch.fnmatchcase(name, other) for name in NAMES
        )
        if "[" in one + other:
            assert overlap(one, other) or not common, (one, other)
        else:
            assert overlap(one, other) == common, (one, other)


def test_long_globs_count_as_overlapping() -> None:
    assert overlap("a" * 5000, "b")


@pytest.mark.parametrize(
    ("globs", "names", "expected"),
    [
        (("*",), (), True),
        (("a", "***"), (), True),
        (("?*",), (), True),
        (("*?*",), ("a",), True),
        (("??*",), (), False),
        (("?",), (), False),
        (("",), (), False),
        (("a",), ("a",), False),
        (("a", "b"), ("a", "b"), True),
        (("a", "b"), ("a", "b", "c"), False),
        (("[ab]*",), ("a", "b2"), True),
    ],
)
def test_globs_of_every_queue(
    globs: tuple[str, ...], names: tuple[str, ...], expected: bool
) -> None:
    """All that are known, if there are several, or all whatever their names."""
    assert match_everything(globs, names) is expected
