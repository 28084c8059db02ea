"""The functions of a job: each takes the messages of a kind, with bodies of a type.

Several functions may share a glob of queues. For the worker they are one job, so that the messages
of a queue keep their order. Conversions run where the job runs: within the middleware, in the job's
thread or process. So middleware and hooks get the body as JSON, and the decoder does nothing more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from qdo.bodies import (
    BodyType,
    MisfitError,
    annotated_type,
    body_type,
    checked_kind,
    kind_of,
)
from qdo.callables import describe_callable, is_async
from qdo.errors import BodyTypeError, UnknownKindError, UsageError
from qdo.message import Batch, Message
from qdo.text import did_you_mean, join_some

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class KindJob:
    """A function, the kind of its messages, and the type of their bodies; None stands for any."""

    function: Function
    kind: str | None = None
    type: BodyType | None = None

    @classmethod
    def of(cls, function: Function, body: Any, kind: str | None) -> KindJob:
        """Return a function with the type in `body`, or in its annotation, and the type's kind."""
        wanted = _wanted_type(function, body)
        type = None if wanted is None else body_type(wanted)
        if kind is not None:
            checked_kind(kind)
        elif type is not None:
            kind = type.kind
        return cls(function, kind, type)


def _wanted_type(function: Function, body: Any) -> Any:
    """Return the type in `body` or in the annotation; raise UsageError if the two differ."""
    try:
        annotated = annotated_type(function, (Message, Batch))
    except UsageError:
        if body is None:
            raise
        return body  # the annotation has names that exist for type checkers only
    if body is not None and annotated not in (None, body):
        raise UsageError(
            reason=f"job {describe_callable(function)} must have one type of bodies, got "
            f"body={body!r:.100} and the annotation {annotated!r:.100}; leave one out"
        )
    return annotated if body is None else body


class Kinds:
    """The functions of one job, in the order of their registration."""

    def __init__(self, members: tuple[KindJob, ...]) -> None:
        self.members = members
        self.known = [each.kind for each in members if each.kind is not None]
        self._by_kind: dict[str | None, KindJob] = {each.kind: each for each in members}
        self._rest = self._by_kind.get(None)
        if len(members) == 1:
            self._by_kind[None] = members[0]  # the only one takes messages without a kind

    @property
    def is_plain(self) -> bool:
        """Whether the job is one function, which takes all bodies of all kinds."""
        return self.members == (KindJob(self.members[0].function),)

    def find(self, kind: str | None) -> KindJob | None:
        """Return the function for messages of a kind, None if there is none."""
        return self._by_kind.get(kind) or self._rest

    def kind_of(self, body: type) -> str | None:
        """Return the kind of the function for bodies of a class, or else the name of the class."""
        for each in self.members:
            if each.type is not None and each.type.type is body:
                return each.kind
        return kind_of(body)

    def type_of(self, queue: str, kind: str | None) -> BodyType | None:
        """Return the type of bodies of a kind, for senders; UsageError for an unknown kind."""
        found = self.find(kind)
        if found is None:
            known = join_some(self.known)
            hint = did_you_mean(kind, self.known) if kind else ""
            raise UsageError(
                reason=f"a message for queue {queue!r} must have one of the kinds {known} of its "
                f"jobs, got {kind!r}{hint}; give it one of them, or register a job for its kind"
            )
        return found.type

    def function(self) -> Function:
        """Return the function for workers, which converts a body and calls the right function."""
        first = self.members[0].function
        if self.is_plain:
            return first
        if is_async(first):

            async def arun(message: Message, context: Any) -> Any:
                function, fitting = self._prepared(message)
                return await function(fitting, context)

            return self._named(arun)

        def run(message: Message, context: Any) -> Any:
            function, fitting = self._prepared(message)
            return function(fitting, context)

        return self._named(run)

    def _named(self, call: Function) -> Function:
        """Give a function the names of all members, for errors and logs."""
        first = self.members[0].function
        if len(self.members) == 1:
            return functools.wraps(first)(call)
        names = [describe_callable(each.function).rpartition(":")[2] for each in self.members]
        # No `__wrapped__`, because errors would name only the first.
        functools.update_wrapper(call, first, assigned=("__module__",), updated=())
        vars(call).pop("__wrapped__")
        call.__qualname__ = ", ".join(names)
        return call

    def _prepared(self, work: Any) -> tuple[Function, Any]:
        """Return the function and its message or batch; raise BodyDecodeError for a misfit."""
        if not isinstance(work, Batch):
            return self._converted(work)
        # The engine then runs each message alone. The messages before the misfit must not run now:
        # a middleware with a transaction would undo their work.
        return self.members[0].function, Batch(self._converted(each)[1] for each in work)

    def _converted(self, message: Message) -> tuple[Function, Message]:
        kind = message.kind
        member = self.find(kind)
        if member is None:
            known = join_some(self.known)
            raise UnknownKindError(queue=message.queue, id=message.id, kind=kind, known=known)
        if member.type is None:
            return member.function, message
        try:
            return member.function, message._with_body(member.type.load(message.body))
        except MisfitError as error:
            raise BodyTypeError(
                queue=message.queue, id=message.id, type=member.type.name, reason=str(error)
            ) from None
