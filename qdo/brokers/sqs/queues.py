"""The SQS queues below a prefix: their names, URLs, tags, settings and counts.

Each read costs a call. So qdo reads a queue's URL once, its tags and settings rarely, and its
counts within a budget of calls.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ujson

from qdo.broker_errors import AccessDeniedError, AwsError, AwsNotFoundError, SqsNameError
from qdo.brokers.aws.errors import BOTO_ERRORS, code_of, is_not_found, translate, translation
from qdo.brokers.sqs.url import FIFO, MAX_SQS_NAME, SqsAddress
from qdo.errors import UnreachableError
from qdo.queues import name_error
from qdo.system.native import run_parallel

log = logging.getLogger(__name__)
# The approximate time after which qdo reads a queue's settings and tags again.
SETTINGS_SECONDS = 3600.0
# qdo reads counts again after `COUNTS_SECONDS`, or later if the queues would exceed the maximum
# rate, `COUNTS_PER_SECOND`. 5 calls a second cost 5 dollars a month.
COUNTS_SECONDS = 5.0
COUNTS_PER_SECOND = 5.0
# The retention of queues that qdo creates: 14 days, the maximum of SQS.
RETENTION_SECONDS = 1_209_600
_PAGE = 1000
# The error codes if another process has just created the queue with other attributes.
_EXISTS = ("QueueNameExists", "QueueAlreadyExists")


@dataclass(frozen=True, slots=True)
class Redrive:
    """A redrive policy: SQS moves messages that consumers have received too often."""

    # The SQS name of the queue that receives the moved messages.
    target: str
    max_receives: int


@dataclass(frozen=True, slots=True)
class QueueAttributes:
    """The settings of an SQS queue and its approximate counts, as SQS reports them."""

    # The time of the call on the monotonic clock.
    read_at: float
    retention_seconds: int = 345_600
    visibility_seconds: int = 30
    redrive: Redrive | None = None
    # The number of receivable messages.
    waiting: int = 0
    # The number of messages that consumers have received but not deleted.
    in_flight: int = 0
    delayed: int = 0


def sqs_name_fault(name: str) -> str | None:
    """Return the reason why SQS does not allow a queue name; None for a valid name."""
    if len(name) > MAX_SQS_NAME:
        return f"{name!r} has {len(name)} characters"
    bare = name.removesuffix(FIFO)
    if not bare:
        return "nothing is left of it"
    refused = next((c for c in bare if not (c.isascii() and c.isalnum()) and c not in "-_"), None)
    return None if refused is None else f"it holds {refused!r}"


def facts_of(attributes: Mapping[str, str], now: float) -> QueueAttributes:
    return QueueAttributes(
        read_at=now,
        retention_seconds=int(attributes.get("MessageRetentionPeriod", 345_600)),
        visibility_seconds=int(attributes.get("VisibilityTimeout", 30)),
        redrive=_redrive_of(attributes.get("RedrivePolicy")),
        waiting=int(attributes.get("ApproximateNumberOfMessages", 0)),
        in_flight=int(attributes.get("ApproximateNumberOfMessagesNotVisible", 0)),
        delayed=int(attributes.get("ApproximateNumberOfMessagesDelayed", 0)),
    )


def _redrive_of(policy: str | None) -> Redrive | None:
    if not policy:
        return None
    try:
        found = ujson.loads(policy)
        target = str(found["deadLetterTargetArn"]).rsplit(":", 1)[-1]
        return Redrive(target, int(found.get("maxReceiveCount", 10)))
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("redrive policy %r cannot be parsed and is ignored", policy)
        return None


@dataclass(slots=True)
class _Known:
    url: str | None = None
    facts: QueueAttributes | None = None
    settings_until: float = -math.inf
    tags: Mapping[str, str] | None = None
    tags_until: float = -math.inf


class SqsQueues:
    """The queues below the prefix of an address. Safe to use from several threads or greenlets."""

    # Methods raise the errors of `aws.errors.translation`.

    def __init__(
        self, client: Any, address: SqsAddress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._address = address
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self._counted: set[str] = set()
        self._warned: set[str] = set()

    def full_name(self, queue: str) -> str:
        """Return the full SQS name of a queue; raise SqsNameError if SQS does not allow it."""
        name = self._address.prefix + queue
        # Also check the part after the prefix, because it may be empty.
        reason = name_error(queue) or sqs_name_fault(name)
        if name in self._address.letter_queues:
            reason = "it stores dead letters"
        if reason is not None:
            raise SqsNameError(name=queue, reason=reason)
        return name

    def url(self, queue: str, *, create: bool = False) -> str:
        """Return the SQS URL of a queue; create a missing queue if the address allows this."""
        return self.url_of(self.full_name(queue), self._address.create if create else "none")

    def url_of(self, name: str, create: str = "none") -> str:
        url = self._entry(name).url
        if url is not None:
            return url
        with translate(self._address.place, "queue", name):
            try:
                url = str(self._client.get_queue_url(QueueName=name)["QueueUrl"])
            except BOTO_ERRORS as error:
                gone = is_not_found(error)
                if gone:
                    self.forget(name)
                if not gone or create == "none":
                    raise
        if url is None:
            url = self.create(name, create)
        self._entry(name).url = url
        return url

    def forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)

    def forget_queue(self, queue: str) -> None:
        self.forget(self.full_name(queue))

    def _forget_all_but(self, names: Iterable[str]) -> None:
        """Drop cached queues that SQS no longer lists, to limit memory."""
        kept = {*names, *self._address.letter_queues}
        with self._lock:
            self._known = {name: each for name, each in self._known.items() if name in kept}
        self._counted &= kept

    def create(self, name: str, kind: str) -> str:
        """Create a standard or FIFO queue, depending on its full name; return its URL."""
        fifo = name.endswith(FIFO)
        if fifo != (kind == "fifo"):
            reason = f"create={kind} is set, but names of FIFO queues, only those, end in {FIFO!r}"
            raise SqsNameError(name=name.removeprefix(self._address.prefix), reason=reason)
        attributes = {
            "MessageRetentionPeriod": str(RETENTION_SECONDS),
            "VisibilityTimeout": str(self._address.visibility_seconds),
        }
        if fifo:
            attributes["FifoQueue"] = "true"
        tag = self._address.tag
        tags = {"tags": dict([tag])} if tag else {}
        with translate(self._address.place, "queue", name):
            try:
                made = self._client.create_queue(QueueName=name, Attributes=attributes, **tags)
            except BOTO_ERRORS as error:
                if code_of(error) not in _EXISTS:
                    raise
                made = self._client.get_queue_url(QueueName=name)  # another process has created it
        log.info("queue %s was created in SQS", name)
        return str(made["QueueUrl"])

    def _entry(self, name: str) -> _Known:
        with self._lock:
            return self._known.setdefault(name, _Known())

    def names(self, *, strict: bool = True) -> list[str]:
        """Return the sorted names of all queues, without the prefix.

        :param strict: raise an error if SQS does not return the attributes of a queue. If False,
            the result may include the target of this queue's redrive policy. Workers must not own
            this target.
        """
        # Omit qdo's dead-letter queues, targets of redrive policies, queues without the address's
        # tag, and names that znodes cannot have.
        listed = self._listed()
        self._forget_all_but(listed)
        found = [name for name in listed if name not in self._address.letter_queues]
        if self._address.tag is not None:
            found = self._tagged(found, self._address.tag)
        facts = self._settings(found, strict)
        targets = {each.redrive.target for each in facts.values() if each.redrive}
        bare = (name.removeprefix(self._address.prefix) for name in found if name not in targets)
        return sorted(name for name in bare if self._is_usable(name))

    def probe(self) -> None:
        """Make one call to check whether qdo can reach SQS with these credentials."""
        try:
            with translate(self._address.place, "prefix", self._address.prefix):
                self._client.list_queues(**self._wanted(1))
        except AccessDeniedError:
            pass  # SQS has responded; senders need no permission to list queues

    def _wanted(self, count: int) -> dict[str, Any]:
        prefix = self._address.prefix
        return {"MaxResults": count} | ({"QueueNamePrefix": prefix} if prefix else {})

    def _listed(self) -> list[str]:
        found: list[str] = []
        page = self._wanted(_PAGE)
        with translate(self._address.place, "prefix", self._address.prefix):
            while True:
                answer = self._client.list_queues(**page)
                for url in answer.get("QueueUrls", ()):
                    name = url.rsplit("/", 1)[-1]
                    found.append(name)
                    self._entry(name).url = url
                if not answer.get("NextToken"):
                    return found
                page["NextToken"] = answer["NextToken"]

    def _is_usable(self, name: str) -> bool:
        reason = name_error(name)
        if reason is None:
            return True
        full = self._address.prefix + name
        self._warn_once(full, f"SQS queue {full!r} is left out: without the prefix {reason}")
        return False

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s", text)

    def settings(self, queue: str) -> QueueAttributes:
        """Return the attributes of a queue; the counts may be old."""
        known = self._entry(self.full_name(queue))
        if known.facts is not None and known.settings_until > self._clock():
            return known.facts
        return self._read(self.full_name(queue))

    def settings_of(self, queues: Sequence[str]) -> dict[str, QueueAttributes]:
        """Return the attributes of queues; omit unreadable queues."""
        facts = self._settings(list(map(self.full_name, queues)))
        named = ((queue, facts.get(self.full_name(queue))) for queue in queues)
        return {queue: each for queue, each in named if each is not None}

    def counts(self, queue: str) -> QueueAttributes:
        """Return the attributes of a queue, with counts as recent as the budget allows."""
        return self.counts_of(self.full_name(queue))

    def waiting(self, queue: str) -> int:
        """Make a call, and return the approximate number of receivable messages."""
        return self._read(self.full_name(queue)).waiting

    def counts_of(self, name: str) -> QueueAttributes:
        self._counted.add(name)
        max_age = max(COUNTS_SECONDS, len(self._counted) / COUNTS_PER_SECOND)
        facts = self._entry(name).facts
        if facts is not None and self._clock() - facts.read_at <= max_age:
            return facts
        return self._read(name)

    def _tagged(self, names: Sequence[str], tag: tuple[str, str]) -> list[str]:
        """Return the full names of the queues that have a tag."""
        # Queues of other programs may deny reading their tags. Raise an error only if all queues
        # deny it.
        now = self._clock()
        faults: list[tuple[str, AwsError]] = []

        def read(name: str) -> None:
            try:
                self._read_tags(name)
            except AwsError as error:
                faults.append((name, error))

        run_parallel(read, [n for n in names if self._entry(n).tags_until <= now])
        if faults and all(self._entry(name).tags is None for name in names):
            raise faults[0][1]
        for name, error in faults:
            known = self._entry(name)
            known.tags_until = self._until()
            effect = "is left out" if known.tags is None else "keeps its last known tags"
            self._warn_once(name, f"{error}; the queue {effect}")
        return [name for name in names if (self._entry(name).tags or {}).get(tag[0]) == tag[1]]

    def _read_tags(self, name: str) -> None:
        with contextlib.suppress(AwsNotFoundError):  # SQS lists deleted queues for some time
            tags = self._call("list_queue_tags", name).get("Tags", {})
            known = self._entry(name)
            known.tags = tags
            known.tags_until = self._until()

    def _settings(self, names: Sequence[str], strict: bool = True) -> dict[str, QueueAttributes]:
        """Return the attributes of queues by their full names; omit unreadable queues."""
        now = self._clock()
        due = [name for name in names if self._entry(name).settings_until <= now]
        run_parallel(lambda name: self._try_read(name, strict), due)
        found = ((name, self._entry(name).facts) for name in names)
        return {name: facts for name, facts in found if facts is not None}

    def _try_read(self, name: str, strict: bool) -> None:
        """Read the attributes of a queue; an error must not stop discovery."""
        try:
            self._read(name)
        except AwsNotFoundError:
            pass  # an operator deleted the queue
        except AwsError as error:
            self._entry(name).settings_until = self._until()
            self._warn_once(name, f"{error}; its redrive policy is unknown")
        except UnreachableError:
            if strict:
                raise

    def _read(self, name: str) -> QueueAttributes:
        answer = self._call("get_queue_attributes", name, AttributeNames=["All"])
        facts = facts_of(answer.get("Attributes", {}), self._clock())
        known = self._entry(name)
        known.facts = facts
        known.settings_until = self._until()
        return facts

    def _until(self) -> float:
        """Return a random time for the next read, which differs between queues."""
        return self._clock() + SETTINGS_SECONDS * random.uniform(0.5, 1.5)  # spreads reads

    def _call(self, method: str, name: str, **parameters: Any) -> Any:
        url = self.url_of(name)
        try:
            return getattr(self._client, method)(QueueUrl=url, **parameters)
        except BOTO_ERRORS as error:
            if is_not_found(error):
                self.forget(name)
            raise translation(error, self._address.place, "queue", name) from error
