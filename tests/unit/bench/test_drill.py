"""The faults of the drill, and what counts as a right diagnosis."""

from __future__ import annotations

import re

import pytest

from bench.drill import busy_shop
from bench.drill.busy import FLEETS
from bench.drill.faults import FAULTS, Evidence, Fault
from bench.drill.measure import is_right
from tests.support.cli import command
from tests.support.paths import ROOT


def test_there_are_ten_faults_of_different_names() -> None:
    assert len({each.name for each in FAULTS}) == len(FAULTS) == 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.name)
def test_the_guide_has_the_section_of_each_fault(fault: Fault) -> None:
    guide = (ROOT / "docs" / "on-call.rst").read_text()
    assert re.search(rf"^{re.escape(fault.section)}\n-+$", guide, re.MULTILINE)


def test_ten_busy_fleets_have_an_app() -> None:
    assert [each.name for each in FLEETS] == [vars(busy_shop)[each.name].name for each in FLEETS]
    assert len(FLEETS) == 10


def test_a_look_is_right_if_it_says_everything() -> None:
    look = Evidence(("status",), ("pay-7", r"block(ed|s)"))
    assert look.title == "qdo status"
    assert is_right("pay-7: blocked", look)
    assert not is_right("pay-7: ok", look)


@pytest.mark.parametrize("words", [("nonsense",), (), ("--random", "no-job")])
def test_a_wrong_choice_is_refused(words: tuple[str, ...]) -> None:
    """Before anything is started."""
    ended = command("-m", "bench.drill", *words, cwd=ROOT)
    assert ended.code == 2
    assert "starved-group" in ended.err
