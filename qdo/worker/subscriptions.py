"""What slots have with a broker that must be asked for messages: see `brokers.subscription`.

A subscription lasts as long as its claim, while a slot's reader comes and goes with its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qdo.brokers.base import Broker
from qdo.brokers.subscription import Subscription
from qdo.coordination.slots import Claim
from qdo.worker.slot import MessageExpired, Slot, State


class Subscriptions:
    """Those of one worker process.

    :ivar needed: the broker must be asked for messages.
    """

    def __init__(self, broker: Broker, clock: Callable[[], float]) -> None:
        self.needed = type(broker).subscribe is not Broker.subscribe
        self._broker = broker
        self._clock = clock

    def begin(self, slot: Slot, claim: Claim, batch: int) -> None:
        """Begin to have the broker asked for the messages of a claim.

        Raises whatever the broker raises.

        :param batch: how many messages the job takes at once, 0 where it takes single ones.
        """
        source = self._broker.subscribe(
            slot.queue,
            claim.done,
            claim.unconfirmed,
            lambda position: _expired(slot, position, batch),
        )
        slot.subscription = source
        if source is not None:
            claim.look = look_at(claim, source)
            source.may_start = lambda: _may_start(slot, claim, self._clock())
            source.in_hand = lambda: _all_in_hand(slot, batch)

    def end(self, slot: Slot) -> None:
        """Give back what the claim of a slot holds."""
        source, slot.subscription = slot.subscription, None
        if source is not None:
            source.close()


def look_at(claim: Claim, source: Subscription) -> Callable[[], None]:
    """Return what brings a claim up to date with its subscription before it is recorded."""

    def look() -> None:
        claim.unconfirmed = source.unconfirmed()

    return look


def note_end(slot: Slot, claim: Claim) -> None:
    """Take note of how far a queue is done beyond its last message, be it to its very end.

    For a queue of which everything that was fetched is done.
    """
    source = slot.subscription
    if source is None:
        return
    far = source.reached if source.end is None else source.end
    if far is not None and claim.done < far:
        claim.done = far


def _expired(slot: Slot, position: int, batch: int) -> None:
    """End the job of a message that the broker took back."""
    for each in slot.lanes.in_hand() if slot.lanes is not None else (slot,):
        if each.greenlet is not None and position in _in_hand(each, batch):
            each.greenlet.kill(MessageExpired(), block=False)


def _may_start(slot: Slot, claim: Claim, now: float) -> bool:
    """Return whether messages of a claim may be started, now or once there is a place."""
    in_force = slot.claim is claim and claim.open and now < claim.lease.until
    return in_force and slot.state is not State.HELD


def _all_in_hand(slot: Slot, batch: int) -> list[int]:
    slots = slot.lanes.in_hand() if slot.lanes is not None else (slot,)
    return [position for each in slots for position in _in_hand(each, batch)]


def _in_hand(slot: Slot, batch: int) -> Iterable[int]:
    """Return the positions of the messages in hand."""
    if slot.message is None:
        return ()
    if slot.letter is not None:  # its job has ended: it is being stored
        return (slot.letter.position,)
    if batch and slot.gathered:
        return [row[0] for row in slot.gathered[:batch]]
    return (slot.message.position,)
