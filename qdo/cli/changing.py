"""The common options of commands that make changes: --dry-run, --yes and --reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TextIO

import click

from qdo.cli.options import reason_option, with_output
from qdo.cli.output import Columns, emit, print_message, same_cells
from qdo.errors import RejectedError

# A function that writes the effect of a change to a stream, in one of the formats of --output.
Show = Callable[[str, TextIO], None]


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a change, as arguments for `emit`. Items may lack the key `executed`."""

    schema: str
    columns: Columns
    items: Sequence[Mapping[str, Any]]
    cells: Callable[[Mapping[str, Any]], Mapping[str, Any]] = same_cells

    def show(self, form: str, out: TextIO | None = None, *, executed: bool = False) -> None:
        items = [{**each, "executed": each.get("executed", executed)} for each in self.items]
        emit(self.schema, items, form, self.columns, out, cells=self.cells)


@dataclass(frozen=True, slots=True)
class Consent:
    """The options of a change. `form` is the output format. The action log gets `reason`."""

    dry_run: bool
    yes: bool
    form: str
    reason: str = ""

    def given(self, what: str, show: Show, *, asks: bool = True) -> bool:
        """Return whether to make the change. If not, show its effect.

        The command must not change or create anything before this returns True.

        :param what: the change as an imperative such as "delete 2 queues", for messages.
        :param show: a function that writes the effect, to call only if the change is not confirmed
            yet.
        :raises RejectedError: the operator has not confirmed the change.
        """
        unconfirmed = asks and not self.yes
        if self.dry_run:
            show(self.form, sys.stdout)
            remedy = "replace --dry-run by --yes" if unconfirmed else "leave out --dry-run"
            print_message(f"nothing was changed; {remedy} to {what}")
            return False
        if not unconfirmed:
            return True
        if sys.stdin.isatty() and sys.stderr.isatty():
            show("table", sys.stderr)  # only the result belongs to stdout
            if _answer(what):
                return True
        else:
            show(self.form, sys.stdout)
        raise RejectedError(reason=f"nothing was changed; add --yes to {what}")


def _answer(what: str) -> bool:
    try:
        return click.confirm(f"{what}?", err=True)
    except click.Abort:  # Ctrl-C or Ctrl-D
        return False


def changing(*names: str, logged: bool = True, **options: bool) -> Callable[[Any], Any]:
    """Add --dry-run, --yes, --reason and --output (as `consent`) and the settings to a command.

    :param logged: whether the action log of an app gets an entry for the change, with --reason.
    :param options: options of `with_settings`.
    """

    def decorate(function: Any) -> Any:
        def call(dry_run: bool, yes: bool, form: str, reason: str = "", **arguments: Any) -> Any:
            return function(consent=Consent(dry_run, yes, form, reason), **arguments)

        call = with_output(*names, **options)(update_wrapper(call, function))
        click.option("--yes", is_flag=True, help="Do it without a question.")(call)
        click.option(
            "--dry-run", is_flag=True, help="Only check it and show the effect; change nothing."
        )(call)
        return reason_option(call) if logged else call

    return decorate
