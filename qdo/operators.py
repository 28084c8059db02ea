"""Operator commands for the code of an app, such as a web page that cancels messages.

These methods use the functions of the `qdo` commands, with the same results, errors and entries in
the action log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from qdo.errors import UsageError
from qdo.queues import check_queue_name
from qdo.sending.sender import Sender
from qdo.system.twins import twin, warn_if_blocking

if TYPE_CHECKING:
    from qdo.coordination.client import Client
    from qdo.fleet.owners import Owner
    from qdo.fleet.pause_machine import Pause
    from qdo.ops.cancel import Cancellation
    from qdo.ops.decisions import OperatorDecision
    from qdo.ops.fleet import Fleet
    from qdo.ops.peek import Kind, PeekedMessage
    from qdo.sending.streams import Stream
    from qdo.system.per_process import PerProcess

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)

# Functions import their modules late, because most senders do not need these modules.


class OperatorService(Protocol):
    """Runs the calls of operators. `qdo.testing` has another implementation."""

    def cancel(
        self, queue: str, ids: Sequence[str], reason: str, timeout_seconds: float
    ) -> list[Cancellation]: ...

    def peek(self, queue: str, kinds: Collection[Kind], limit: int) -> list[PeekedMessage]: ...

    def owner(self, queue: str) -> Owner | None: ...

    def pause(self, pause: Pause, allow_none: bool, timeout_seconds: float) -> None: ...

    def resume(self, queues: Sequence[str], reason: str) -> None: ...

    def decide(
        self, queue: str, decision: OperatorDecision, ids: Sequence[str], every: bool, reason: str
    ) -> list[str | None]: ...


@dataclass(frozen=True, slots=True)
class FleetOperators:
    fleet: Fleet
    client: Client

    def cancel(
        self, queue: str, ids: Sequence[str], reason: str, timeout_seconds: float
    ) -> list[Cancellation]:
        from qdo.ops.cancel import cancel

        logged = _logged(reason, "cancel", queue)
        return cancel(
            self.fleet, queue, ids, timeout_seconds=timeout_seconds, reason=reason, logged=logged
        )

    def peek(self, queue: str, kinds: Collection[Kind], limit: int) -> list[PeekedMessage]:
        from qdo.ops.peek import peek

        return list(peek(self.fleet, queue, kinds, limit))

    def owner(self, queue: str) -> Owner | None:
        from qdo.fleet.owners import find_owner

        return find_owner(self.client, self.fleet.layout, queue)

    def pause(self, pause: Pause, allow_none: bool, timeout_seconds: float) -> None:
        from qdo.coordination.bulk_reads import names_below
        from qdo.fleet import pauses

        if not allow_none:
            pauses.check_matches(pause.queues, names_below(self.client, self.fleet.layout.queues))
        logged = _logged(pause.why, "pause", " ".join(pause.queues))
        start = pauses.pause_queues if logged else pauses.add_pause
        zxid = start(self.client, self.fleet.layout, pause)
        pauses.wait_in_force(self.client, self.fleet.layout, pause, zxid, timeout_seconds)

    def resume(self, queues: Sequence[str], reason: str) -> None:
        from qdo.fleet import pauses

        client = self.client
        layout = self.fleet.layout
        pauses.chosen(pauses.read_pauses(client, layout).node, queues)
        logged = _logged(reason, "resume", " ".join(queues))
        with pauses.recorded(client, layout, "resume", queues, reason) as record:
            pauses.resume_globs(client, layout, queues, record=record if logged else None)

    def decide(
        self, queue: str, decision: OperatorDecision, ids: Sequence[str], every: bool, reason: str
    ) -> list[str | None]:
        from qdo.ops.decisions import decide, plan_decision

        client = self.client
        layout = self.fleet.layout
        broker = self.fleet.broker
        logged = _logged(reason, decision, queue)
        plan = plan_decision(client, layout, broker, broker.positions, queue, decision, ids, every)
        decided = decide(
            client,
            layout,
            queue,
            decision,
            plan.which,
            reason,
            running=plan.running,
            logged=logged,
        )
        return [plan.ids.get(each.position) for each in decided]


def _logged(reason: str, call: str, target: str) -> bool:
    """Return whether a call gets an entry in the action log. If not, write a log line."""
    # Without this rule, the entries of a program that calls often would evict operators' entries.
    if not reason:
        _log.info("queue %s: a call of %s without a reason", target, call)
    return bool(reason)


class OperatorCalls(Sender):
    """The calls of operators, which use the connection for the app's locks.

    Each call raises CoordinatorUnreachableError or UnreachableError if the answer does not arrive
    before the timeout. The change may have taken effect. The caller can repeat the call. A change
    with a `reason` gets an entry in the action log. A change without a reason gets a line in the
    log of this process.
    """

    _locks: PerProcess[Any]

    def cancel(
        self, queue: str, *ids: str, reason: str = "", timeout_seconds: float = 5.0
    ) -> dict[str, str]:
        """Cancel waiting or delayed messages, like `qdo cancel`. Cancelled messages never run.

        >>> id = app.send("mail-eu", {"to": "Ada"}, delay_seconds=3600)
        >>> app.cancel("mail-eu", id) == {id: "cancelled"}
        True

        :param ids: ids of messages, from `send`, or positions.
        :param reason: the text for the action log. A call without a reason has no entry.
        :param timeout_seconds: maximum time for the owner of the queue to answer.
        :return: "cancelled" or "already-cancelled" for each message.
        :raises NotFoundError: the queue does not exist, or none of the messages exists. A delayed
            message that was cancelled without a reason no longer exists.
        :raises PartialFailureError: a message has begun, is done or does not exist, or the owner
            did not answer. The other messages are cancelled.
        :raises UnsupportedError: SQS cannot cancel messages.
        """
        from qdo.ops.cancel import check_outcomes

        warn_if_blocking()
        if not ids:
            raise UsageError(reason="cancel must name messages, got no id")
        done = self._act(lambda each: each.cancel(queue, ids, reason, timeout_seconds))
        check_outcomes(queue, done)
        return {each.name: each.outcome for each in done}

    acancel = twin(cancel)

    def peek(self, queue: str, *, kind: Kind | None = None, limit: int = 10) -> list[PeekedMessage]:
        """Return messages of a queue that are not done, as `qdo peek` shows them.

        The messages stay in the queue. Each `body` is bytes, decrypted if `keys` has its key.

        >>> id = app.send("mail-eu", {"to": "Ada"})
        >>> [each.kind for each in app.peek("mail-eu")]
        ['waiting']

        :param kind: return only "waiting", "delayed", "failing" or "blocking" messages.
        :param limit: maximum number of messages, up to 1000.
        :raises NotFoundError: the queue does not exist.
        :raises UnsupportedError: SQS shows only messages that fail or block the queue.
        """
        from qdo.ops.dead_letters import decrypted
        from qdo.ops.peek import KINDS, MOST
        from qdo.settings.vaults import vault_of

        warn_if_blocking()
        if kind is not None and kind not in KINDS:
            raise UsageError(reason=f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if not 0 < limit <= MOST:
            raise UsageError(reason=f"limit must be 1 to {MOST}, got {limit!r}")
        vault = vault_of(self.settings, self.name, self._stream_of)
        kinds = KINDS if kind is None else (kind,)

        def opened(message: PeekedMessage) -> PeekedMessage:
            if message.body is None:
                return message
            body, headers, fault = decrypted(queue, message.body, message.headers, vault)
            return message if fault is not None else replace(message, body=body, headers=headers)

        return list(map(opened, self._act(lambda each: each.peek(queue, kinds, limit))))

    apeek = twin(peek)

    def owner(self, queue: str) -> Owner | None:
        """Return the worker that owns a queue now; None without an owner, such as for a new queue.

        >>> found = app.owner("mail-eu")
        >>> found and found.address
        '10.0.0.7:8001'

        The method reads two nodes of the coordinator. The queue may move to another worker before
        the caller contacts this owner. A pool never has an owner.
        """
        warn_if_blocking()
        name = check_queue_name(queue)
        return self._act(lambda each: each.owner(name))

    aowner = twin(owner)

    def stream(self, name: str, *, shards: int = 4) -> Stream:
        """Return a stream, whose queues divide the range of keys.

        Operators can split queues at any time.

        >>> users = app.stream("user", shards=4)
        >>> id = users.send("ada@example.org", {"op": "visit"})

        The first use of the stream creates the queues ``user.-40``, ``user.40-80``, ``user.80-c0``
        and ``user.c0-``. The job for "user.*" processes their messages (see "Streams").

        :param shards: the initial number of queues, a power of two up to 4096.
        """
        from qdo.sending.streams import Stream

        return Stream(self, name, shards, self.owner)

    def pause(
        self,
        *queues: str,
        reason: str = "",
        seconds: float | None = None,
        allow_none: bool = False,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Pause queues in the whole fleet, like `qdo pause`. `exclusive` pauses queues for a block.

        The method returns once no message of these queues is in flight. Do not call it in a job of
        these queues.

        :param queues: globs of the queues' names. The pause also applies to later queues.
        :param reason: text that `qdo pause --list` and `qdo queues` show.
        :param seconds: duration of the pause. With None, the pause lasts until `resume`.
        :param allow_none: also accept globs that match no queue yet.
        :raises NotFoundError: a glob matches no queue that workers have seen.
        :raises PauseNotObeyedError: messages are still in flight. The queues stay paused.
        """
        from qdo.fleet.pauses import new_pause

        warn_if_blocking()
        pause = new_pause(queues, reason, seconds)
        self._act(lambda each: each.pause(pause, allow_none, timeout_seconds))

    apause = twin(pause, alone=True)

    def resume(self, *queues: str, reason: str = "") -> None:
        """Resume queues that `pause` or `qdo pause` has paused, like `qdo resume`.

        :param queues: the same globs as for `pause`.
        :raises NotFoundError: one of the globs is not paused.
        """
        warn_if_blocking()
        if not queues:
            raise UsageError(reason="resume must name queues, got no glob")
        self._act(lambda each: each.resume(queues, reason))

    aresume = twin(resume)

    def retry_now(
        self, queue: str, *ids: str, every: bool = False, reason: str = ""
    ) -> list[str | None]:
        """Retry messages that fail or block a queue immediately, like `qdo retry-now`.

        :param ids: ids or positions of messages. Without ids, the method retries the first message.
        :param every: retry all messages that fail or block the queue.
        :return: the ids of the messages.
        :raises NotFoundError: no worker has seen the queue.
        :raises NotFailingError: a given message does not fail, or no message fails. Nothing has
            changed.
        """
        warn_if_blocking()
        if ids and every:
            raise UsageError(reason="give ids or every=True, not both")
        return self._act(lambda each: each.decide(queue, "retry", ids, every, reason))

    aretry_now = twin(retry_now)

    def skip(self, queue: str, *ids: str, reason: str = "") -> list[str | None]:
        """Skip messages that fail, run or block a queue, like `qdo skip`.

        Skipped messages never run again.

        The worker ends a running attempt. Parameters, result and errors are the same as for
        `retry_now`.
        """
        warn_if_blocking()
        if not ids:
            raise UsageError(reason="skip must name messages, got no id")
        return self._act(lambda each: each.decide(queue, "skip", ids, False, reason))

    askip = twin(skip)

    def _act(self, act: Callable[[OperatorService], _Result]) -> _Result:
        from qdo.ops.fleet import Fleet
        from qdo.system.home_loop import at_home

        locks = self._locks.get()
        if locks.operators is not None:
            return act(locks.operators)
        client = locks.connection.client
        return at_home(act, FleetOperators(Fleet(client, locks.layout, self.broker), client))
