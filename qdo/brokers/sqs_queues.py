"""Which queues of SQS there are below a prefix, where they are, and what they are like.

What is asked of a queue costs a request each. So its address is asked for once, its tags and
settings seldom, and its counts no more often than a budget allows.
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

from qdo.brokers.aws_address import FIFO, SqsAddress
from qdo.brokers.aws_errors import BOTO_ERRORS, code_of, is_not_found, translated, translation
from qdo.brokers.side_by_side import side_by_side
from qdo.brokers.sqs_facts import QueueFacts, facts_of, sqs_name_fault
from qdo.errors import AccessDeniedError, AwsError, AwsNotFoundError, SqsNameError
from qdo.names import name_fault

log = logging.getLogger(__name__)

SETTINGS_SECONDS = 3600.0
"""How long a queue's settings and tags are taken for unchanged, about."""
COUNTS_SECONDS = 5.0
COUNTS_PER_SECOND = 5.0
"""Counts are asked for again after `COUNTS_SECONDS`, or later where so many queues are asked
about that it would take more requests than this: 5 a second cost 5 dollars a month."""
RETENTION_SECONDS = 1_209_600
"""Of queues that are created: 14 days, the most SQS offers."""
_PAGE = 1000
_EXISTS = ("QueueNameExists", "QueueAlreadyExists")
"""Somebody created the queue meanwhile, with other attributes."""


@dataclass(slots=True)
class _Known:
    """What is remembered of a queue."""

    url: str | None = None
    facts: QueueFacts | None = None
    settings_until: float = -math.inf
    tags: Mapping[str, str] | None = None
    tags_until: float = -math.inf


class SqsQueues:
    """The queues below the prefix of an address. Safe to use from several threads or greenlets.

    Methods raise what `aws_errors.translation` makes of errors.

    :param clock: seconds on a monotonic clock.
    """

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

    # --- names and addresses ---

    def full_name(self, queue: str) -> str:
        """Return what SQS calls a queue.

        :raises SqsNameError: it cannot be the name of a queue of SQS.
        """
        name = self._address.prefix + queue
        # A queue that is called like the prefix alone has no name here.
        reason = name_fault(queue) or sqs_name_fault(name)
        if name in self._address.letter_queues:
            reason = "dead letters are kept there"
        if reason is not None:
            raise SqsNameError(name=queue, reason=reason)
        return name

    def url(self, queue: str, *, create: bool = False) -> str:
        """Return the URL by which SQS knows a queue.

        :param create: create a queue that is missing, if the address says so.
        :raises AwsNotFoundError: there is no such queue.
        """
        return self.url_of(self.full_name(queue), self._address.create if create else "none")

    def url_of(self, name: str, create: str = "none") -> str:
        """Return the URL of a queue by its full name; see `url`."""
        url = self._entry(name).url
        if url is not None:
            return url
        with translated(self._address.place, "queue", name):
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
        """Forget what is known of a queue, by its full name: it is gone."""
        with self._lock:
            self._known.pop(name, None)

    def _forget_all_but(self, names: Iterable[str]) -> None:
        """Forget queues that are not listed any more, or memory would grow with their coming
        and going; whoever means one asks for it anew."""
        kept = {*names, *self._address.letter_queues}
        with self._lock:
            self._known = {name: each for name, each in self._known.items() if name in kept}
        self._counted &= kept

    def create(self, name: str, kind: str) -> str:
        """Create a queue; return its URL.

        :param name: in full.
        :param kind: standard or fifo: the name has to agree with it.
        """
        fifo = name.endswith(FIFO)
        if fifo != (kind == "fifo"):
            reason = (
                f"create={kind} is asked for, and names of FIFO queues, only those, end in {FIFO!r}"
            )
            raise SqsNameError(name=name.removeprefix(self._address.prefix), reason=reason)
        attributes = {
            "MessageRetentionPeriod": str(RETENTION_SECONDS),
            "VisibilityTimeout": str(self._address.visibility_seconds),
        }
        if fifo:
            attributes["FifoQueue"] = "true"
        tag = self._address.tag
        tags = {"tags": dict([tag])} if tag else {}
        with translated(self._address.place, "queue", name):
            try:
                made = self._client.create_queue(QueueName=name, Attributes=attributes, **tags)
            except BOTO_ERRORS as error:
                if code_of(error) not in _EXISTS:
                    raise
                made = self._client.get_queue_url(QueueName=name)  # somebody was faster
        log.info("queue %s was created in SQS", name)
        return str(made["QueueUrl"])

    def _entry(self, name: str) -> _Known:
        with self._lock:
            return self._known.setdefault(name, _Known())

    # --- which there are ---

    def names(self) -> list[str]:
        """Return the names of all queues, without the prefix, in order.

        Left out are qdo's own dead-letter queues, those that a redrive policy of another one
        names, those without the tag of the address, and names that no znode can have.
        """
        listed = self._listed()
        self._forget_all_but(listed)
        found = [name for name in listed if name not in self._address.letter_queues]
        if self._address.tag is not None:
            found = self._tagged(found, self._address.tag)
        facts = self._settings(found)
        targets = {each.redrive.target for each in facts.values() if each.redrive}
        bare = (name.removeprefix(self._address.prefix) for name in found if name not in targets)
        return sorted(name for name in bare if self._is_usable(name))

    def probe(self) -> None:
        """Make one request, to see whether SQS can be reached with these credentials."""
        try:
            with translated(self._address.place, "prefix", self._address.prefix):
                self._client.list_queues(**self._wanted(1))
        except AccessDeniedError:
            pass  # it answers, and who only sends needs no leave to list

    def _wanted(self, count: int) -> dict[str, Any]:
        """Return what to ask ListQueues for."""
        prefix = self._address.prefix
        return {"MaxResults": count} | ({"QueueNamePrefix": prefix} if prefix else {})

    def _listed(self) -> list[str]:
        found: list[str] = []
        page = self._wanted(_PAGE)
        with translated(self._address.place, "prefix", self._address.prefix):
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
        reason = name_fault(name)
        if reason is None:
            return True
        full = self._address.prefix + name
        self._warn_once(
            full, f"queue {full!r} of SQS is left out: without the prefix {reason}"
        )
        return False

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s", text)

    # --- what they are like ---

    def settings(self, queue: str) -> QueueFacts:
        """Return what a queue is like; its counts may be old."""
        known = self._entry(self.full_name(queue))
        if known.facts is not None and known.settings_until > self._clock():
            return known.facts
        return self._read(self.full_name(queue))

    def settings_of(self, queues: Sequence[str]) -> dict[str, QueueFacts]:
        """Return what queues are like, those left out that do not say it."""
        facts = self._settings(list(map(self.full_name, queues)))
        named = ((queue, facts.get(self.full_name(queue))) for queue in queues)
        return {queue: each for queue, each in named if each is not None}

    def counts(self, queue: str) -> QueueFacts:
        """Return what a queue is like, with counts as young as the budget allows."""
        return self.counts_of(self.full_name(queue))

    def read(self, queue: str) -> QueueFacts:
        """Return what a queue is like, with counts of now: always a request."""
        return self._read(self.full_name(queue))

    def counts_of(self, name: str) -> QueueFacts:
        """Do as `counts` for a queue by its full name."""
        self._counted.add(name)
        max_age = max(COUNTS_SECONDS, len(self._counted) / COUNTS_PER_SECOND)
        facts = self._entry(name).facts
        if facts is not None and self._clock() - facts.read_at <= max_age:
            return facts
        return self._read(name)

    def _tagged(self, names: Sequence[str], tag: tuple[str, str]) -> list[str]:
        """Return the queues that have a tag, by their full names.

        Some may be somebody else's, and not say it.

        :raises AwsError: not one of them says it.
        """
        now = self._clock()
        faults: list[tuple[str, AwsError]] = []

        def read(name: str) -> None:
            try:
                self._read_tags(name)
            except AwsError as error:
                faults.append((name, error))

        side_by_side(read, [n for n in names if self._entry(n).tags_until <= now])
        if faults and all(self._entry(name).tags is None for name in names):
            raise faults[0][1]
        for name, error in faults:
            known = self._entry(name)
            known.tags_until = self._until()
            taken = "one without the tag" if known.tags is None else "what it was"
            self._warn_once(name, f"{error}; it is taken for {taken}")
        return [name for name in names if (self._entry(name).tags or {}).get(tag[0]) == tag[1]]

    def _read_tags(self, name: str) -> None:
        with contextlib.suppress(AwsNotFoundError):  # deleted; lists show it for a while
            tags = self._request("list_queue_tags", name).get("Tags", {})
            known = self._entry(name)
            known.tags, known.tags_until = tags, self._until()

    def _settings(self, names: Sequence[str]) -> dict[str, QueueFacts]:
        """Return what queues are like by their full names, those left out that do not say it."""
        now = self._clock()
        due = [name for name in names if self._entry(name).settings_until <= now]
        side_by_side(self._read_if_told, due)
        found = ((name, self._entry(name).facts) for name in names)
        return {name: facts for name, facts in found if facts is not None}

    def _read_if_told(self, name: str) -> None:
        """Ask what a queue is like; that it does not say it must not stop discovery."""
        try:
            self._read(name)
        except AwsNotFoundError:
            pass  # see `_read_tags`
        except AwsError as error:
            self._entry(name).settings_until = self._until()
            self._warn_once(name, f"{error}; its redrive policy stays unknown")

    def _read(self, name: str) -> QueueFacts:
        answer = self._request("get_queue_attributes", name, AttributeNames=["All"])
        facts = facts_of(answer.get("Attributes", {}), self._clock())
        known = self._entry(name)
        known.facts, known.settings_until = facts, self._until()
        return facts

    def _until(self) -> float:
        """Return when to ask again: never for all queues at the same time."""
        return self._clock() + SETTINGS_SECONDS * random.uniform(0.5, 1.5)

    def _request(self, method: str, name: str, **parameters: Any) -> Any:
        url = self.url_of(name)
        try:
            return getattr(self._client, method)(QueueUrl=url, **parameters)
        except BOTO_ERRORS as error:
            if is_not_found(error):
                self.forget(name)
            raise translation(error, self._address.place, "queue", name) from error
