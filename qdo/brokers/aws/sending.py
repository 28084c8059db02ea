"""The common part of the SQS and Kinesis senders: retries, and errors for unsent messages.

Both services may store some messages of a call and reject others. A sender repeats the call with
the rejected messages while `SendAttempts.wait` returns True.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from qdo.backoff import Backoff
from qdo.broker_errors import AwsError, AwsUnreachableError, ThrottledError
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.errors import SERVICES, is_throttling_code
from qdo.errors import PartialSendError, QdoError
from qdo.text import join_some

# The time from the first attempt, or the last progress, to the start of the last attempt.
PATIENCE_SECONDS = 30.0


class SendAttempts:
    """The attempts to send some messages; setting `stopped` ends them."""

    # Only time limits the attempts. A limit on the number of attempts would end them after a few
    # short delays. A service that throttles a burst accepts more messages only much later.

    def __init__(
        self,
        backoff: Backoff,
        stopped: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backoff = backoff
        self._stopped = stopped
        self._clock = clock
        self.progress()

    def progress(self) -> None:
        """Reset the attempts, because the service has stored some messages."""
        self._failures = 0
        self._since = self._clock()

    def wait(self) -> bool:
        """Wait after a failed attempt; return False if no other attempt should follow."""
        left = self._since + PATIENCE_SECONDS - self._clock()
        if left <= 0:
            return False
        self._failures += 1
        delay = self._backoff.delay(self._failures, random.random())  # spreads the retries
        return not self._stopped.wait(min(delay, left))


def rejection(
    place: ServiceAddress, action: str, resource: str, failed: Mapping[str, object]
) -> QdoError:
    """Return the error for one rejected message of a call.

    :param failed: the entry of the response, from SQS or Kinesis.
    :return: an `UnreachableError` if a retry can succeed.
    """
    code = str(failed.get("Code") or failed.get("ErrorCode") or "no code")
    text = failed.get("Message") or failed.get("ErrorMessage") or "no reason was given"
    reason = " ".join(str(text).split()).rstrip(".")
    service = SERVICES[place.service]
    if is_throttling_code(code):
        return ThrottledError(
            service=service, action=action, resource=resource, reason=f"{code}: {reason}"
        )
    if failed.get("SenderFault"):
        return AwsError(service=service, action=action, resource=resource, code=code, reason=reason)
    return AwsUnreachableError(
        service=service,
        region=place.region,
        reason=f"it rejected a message: {code}: {reason}",
        hint="",
    )


def unsent_error(sent: Sequence[object], error: QdoError) -> QdoError:
    """Return the error for a call that stored only some of its messages, or no messages.

    :param sent: the id of each message; None for an unsent message.
    :param error: the cause; the function returns this error if the call stored no message.
    """
    unsent = tuple(index for index, each in enumerate(sent) if each is None)
    if len(unsent) == len(sent):
        return error
    return PartialSendError(
        done=len(sent) - len(unsent),
        total=len(sent),
        rest=f"those with the numbers {join_some(unsent)}, counted from 0",
        reason=str(error),
        unsent=unsent,
        sent=tuple(sent),
    )
