"""Levels of the test suite: every item runs in `make test` or `make test-rest`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import LEVELS
from tests.support.paths import ROOT
from tests.support.runs.levels import (
    LONG,
    REST,
    SHARES,
    long_reason,
    other_combinations,
    other_twins,
    twin,
)


def test_every_file_has_an_item_in_make_test(request: pytest.FixtureRequest) -> None:
    """Or a reason why it has none."""
    known = request.config.stash[LEVELS]
    tested = {item.path for item, level in known.items() if level != REST}
    missing = {item.path for item in known if long_reason(item) is None} - tested
    assert missing == set()


def test_reasons_name_files_that_exist() -> None:
    """A renamed file loses its reason, and must not lose its place unseen."""
    assert [each for each in LONG if not (ROOT / each).exists()] == []


def test_make_selects_by_level_only() -> None:
    """`make test` and `make test-rest` together are all items, and check is a part of test."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    chosen = [line for line in lines if "--level " in line]
    levels = [line.partition("--level ")[2].split()[0].strip(";") for line in chosen]
    assert levels == ["check", "test", "rest"]
    others = (" -m ", " -k ", "--ignore", "--deselect", "tests/")
    assert not any(each in line.replace("python -m", "") for line in chosen for each in others)


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("a.py::t[embedded]", ("a.py::t[*]", "zookeeper")),
        ("a.py::t[zookeeper]", ("a.py::t[*]", "zookeeper")),
        ("a.py::t[x-zookeeper_url-2]", ("a.py::t[x-*-2]", "zookeeper_url")),
        ("a.py::t[files-1]", ("a.py::t[*-1]", "servers")),
        ("tests/contract/a.py::t[moto-1]", ("tests/contract/a.py::t[*-1]", "moto")),
        ("tests/contract/a.py::t[sqs-fifo]", ("tests/contract/a.py::t[sqs-*]", "fifo")),
        ("tests/contract/a.py::t[embedded]", None),
        ("a.py::t[fifo]", None),
        ("a.py::test_embedded", None),
        ("a.py::t[embeddedness]", None),
    ],
)
def test_a_twin_is_known_by_its_parameter(nodeid: str, expected: tuple[str, str] | None) -> None:
    """The rest of the name says which two belong together."""
    assert twin(nodeid) == expected


@pytest.mark.parametrize("kinds", [("files", "servers"), ("embedded", "zookeeper", "database")])
def test_one_of_the_twins_is_kept(kinds: tuple[str, ...]) -> None:
    """Each coordinator gets about the same share of the items."""
    items = {f"a.py::test_{number}[{kind}]" for number in range(300) for kind in kinds}
    kept = items - other_twins(sorted(items))
    counts = Counter(each.partition("[")[2] for each in kept)
    assert len({each.partition("[")[0] for each in kept}) == len(kept) == 300
    assert len(counts) == len(kinds)
    assert min(counts.values()) > 70


def test_items_without_a_twin_stay() -> None:
    """A test of one coordinator is not a twin, and contracts compare all."""
    assert other_twins(["a.py::t[embedded]", "b.py::t[zookeeper]"]) == set()
    contract = [f"tests/contract/a.py::t[{each}]" for each in ("embedded", "zookeeper")]
    assert other_twins(contract) == set()


def test_combinations_are_shared_out() -> None:
    """Functions are divided one by one, and keep each value of a parameter with n values."""
    for file, share in SHARES.items():
        assert (ROOT / file).exists()
        values = {*map(str, range(share))}
        items = [f"{file}::{name}[{x}-{y}]" for name in "ab" for x in values for y in values]
        kept = {*items} - other_combinations([f"{file}::plain", *items])
        for name in "ab":
            found = [
                each[:-1].partition("[")[2].split("-") for each in kept if f"::{name}[" in each
            ]
            assert len(found) == share
            assert {x for x, _ in found} == {y for _, y in found} == values
    assert other_combinations(["a.py::t[p]", "a.py::t[q]"]) == set()
