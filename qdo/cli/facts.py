"""What `qdo queue show` and `qdo worker show` print: a heading, facts with labels, and changes."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from qdo.cli.output import cell, values_text, width_of

WIDTH = 80
LABEL = 14
"""Columns that the names of facts take."""
_ALTERNATIVE = re.compile(", (?=qdo )| or (?=qdo )")


def print_heading(heading: str, reason: str | None, remedy: str | None) -> None:
    print(cell(heading))
    print_step(reason, remedy)


def print_step(reason: str | None, remedy: str | None) -> None:
    """Print a reason and the next step, as far as there are any.

    Each command of a remedy has lines of its own, so it can be copied.
    """
    steps = _ALTERNATIVE.split(remedy) if remedy else []
    for text in (reason, *(f"-> {step}" for step in steps)):
        if text:
            print(filled(cell(text), "  "))


def print_facts(facts: Sequence[tuple[str, str | None]]) -> None:
    print()
    for label, text in facts:
        if text:
            indent = " " * LABEL
            print(filled(f"{label:{LABEL}}{cell(text)}", "", indent))


def print_changes(changes: Sequence[Mapping[str, Any]]) -> None:
    for number, each in enumerate(changes):
        label = "changes" if not number else ""
        to = values_text(each["to"])
        text = f"{each['time']} {each['by']}: {each['command']} {to}".rstrip()
        reason = f" ({each['reason']})" if each["reason"] else ""
        print(filled(f"{label:{LABEL}}{cell(text + reason)}", "", " " * LABEL))


def filled(text: str, first: str, others: str | None = None) -> str:
    """Return a text in lines of the terminal; ids and names are never cut."""
    return textwrap.fill(
        text,
        width_of(sys.stdout) or WIDTH,
        initial_indent=first,
        subsequent_indent=first if others is None else others,
        break_long_words=False,
        break_on_hyphens=False,
    )
