"""Mistakes planted into the consuming side of the SQS broker, which the stories must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import qdo.brokers.sqs.subscription
from qdo.brokers.sqs.in_flight import InFlightMessages
from qdo.brokers.sqs.subscription import Poller, SqsSubscription
from qdo.brokers.sqs.visibility import Deleter
from qdo.jobs.options import Order

Patch = pytest.MonkeyPatch


def _forgets_what_was_done(patch: Patch) -> None:
    """Names of done messages are not recorded."""
    patch.setattr(InFlightMessages, "unconfirmed", lambda self: ())


def _deletes_what_is_received(patch: Patch) -> None:
    """Messages are deleted when they are received."""
    take: Callable[..., Any] = InFlightMessages.take

    def taken(self: InFlightMessages, *args: Any) -> Any:
        found = take(self, *args)
        found.again += self.undone()
        return found

    patch.setattr(InFlightMessages, "take", taken)


def _never_asks_again(patch: Patch) -> None:
    """A queue that was found empty is not polled any more."""
    patch.setattr(Poller, "_pause_over", lambda self: None)


def _does_not_rest(patch: Patch) -> None:
    """An idle queue is polled without a pause."""
    patch.setattr(qdo.brokers.sqs.subscription, "idle_backoff", lambda *args: 0.0)


def _never_deletes(patch: Patch) -> None:
    """Deletes are taken for done without being made."""
    patch.setattr(Deleter, "_delete", lambda self, batch: None)


def _gives_back_what_runs(patch: Patch) -> None:
    """Messages in flight are released with the rest when no message may be started."""

    def keep(self: SqsSubscription, due: Any) -> list[Any]:
        self._release(self._holding.undone())
        return []

    patch.setattr(SqsSubscription, "_keep_what_runs", keep)


MUTANTS: Mapping[str, tuple[Callable[[Patch], None], str, Order]] = {
    made.__name__.strip("_"): (made, kind, order)
    for made, kind, order in (
        (_forgets_what_was_done, "fifo", "key"),
        (_deletes_what_is_received, "standard", "none"),
        (_never_asks_again, "fifo", "queue"),
        (_does_not_rest, "fifo", "key"),
        (_never_deletes, "standard", "none"),
        (_gives_back_what_runs, "fifo", "key"),
    )
}
"""With the kind of queue and the order in whose stories they show."""
