"""Filters and parts of long lists. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Part(Generic[_Item]):
    """One page of a list.

    :ivar first: number of its first item, from 1; 0 if there are none.
    """

    items: Sequence[_Item]
    number: int
    pages: int
    first: int
    last: int
    total: int


def paged(items: Sequence[_Item], number: str | None, size: int) -> Part[_Item]:
    """Return a page of a list: the nearest one if there is none with this number.

    :param number: from the address of the page; anything else than a number counts as 1.
    """
    pages = max(1, -(-len(items) // size))
    wanted = int(number[:9]) if number and number.isascii() and number.isdecimal() else 1
    wanted = min(max(1, wanted), pages)
    begin = (wanted - 1) * size
    shown = items[begin : begin + size]
    first = begin + 1 if shown else 0
    return Part(shown, wanted, pages, first, begin + len(shown), len(items))


def glob_of(text: str) -> str:
    """Return the glob of a text that was typed into a filter: plain text matches anywhere."""
    return f"*{text}*" if text and not set(text) & set("*?[") else text or "*"
