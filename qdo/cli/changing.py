"""The convention of all commands that change something: --dry-run, --yes and --reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TextIO, TypeVar

import click

from qdo.cli.options import reason_option
from qdo.cli.output import print_message
from qdo.errors import RejectedError

Show = Callable[[str, TextIO], None]
"""Writes the effect of a change in a format of `output_option` to a stream."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Consent:
    """The consent of an operator to a change.

    :ivar reason: for the action log, "" for none.
    """

    dry_run: bool
    yes: bool
    reason: str = ""

    def given(self, what: str, show: Show, form: str, *, asks: bool = True) -> bool:
        """Return whether to change something; if not, the effect has been shown.

        Nothing may be changed or created before this returns True.

        :param what: the change as messages name it, an imperative such as "delete 2 queues".
        :param show: writes the effect; called only if the change is not certain.
        :param form: the format in which it is written to stdout.
        :raises RejectedError: the operator has not confirmed it.
        """
        unconfirmed = asks and not self.yes
        if self.dry_run:
            show(form, sys.stdout)
            remedy = "replace --dry-run by --yes" if unconfirmed else "leave out --dry-run"
            print_message(f"nothing was changed; {remedy} to {what}")
            return False
        if not unconfirmed:
            return True
        if sys.stdin.isatty() and sys.stderr.isatty():
            show("table", sys.stderr)  # stdout is for the result
            if _answer(what):
                return True
        else:
            show(form, sys.stdout)
        raise RejectedError(reason=f"nothing was changed; add --yes to {what}")


def _answer(what: str) -> bool:
    try:
        return click.confirm(f"{what}?", err=True)
    except click.Abort:  # Ctrl-C or Ctrl-D
        return False


def changing(function: _Function) -> _Function:
    """Give a command --dry-run, --yes and --reason, as `consent`."""
    decorated: _Function = changing_unlogged(function)
    return reason_option(decorated)


def changing_unlogged(function: Any) -> Any:
    """Give a command --dry-run and --yes: its change belongs to no app, and so to no action log."""

    def call(dry_run: bool, yes: bool, reason: str = "", **arguments: Any) -> Any:
        return function(consent=Consent(dry_run, yes, reason), **arguments)

    update_wrapper(call, function)
    click.option("--yes", is_flag=True, help="Do it without a question.")(call)
    click.option(
        "--dry-run", is_flag=True, help="Only check it and show the effect; change nothing."
    )(call)
    return call
