"""A backend for Django's tasks: each task is a request of a pool, and any worker runs it.

Django 6 has tasks; earlier versions have them from the package ``django-tasks``. The pools are
``tasks-QUEUE``, and ``async-tasks-QUEUE`` for tasks that are coroutines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.utils import timezone
from django.utils.module_loading import import_string

from qdo.brokers.requests import OVER, WAITING, RequestRecord
from qdo.callables import is_async
from qdo.contrib.django.project_app import project_app
from qdo.message import NORMAL
from qdo.requests.jobs import Request
from qdo.requests.replies import opened

if TYPE_CHECKING:
    from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued
else:
    try:
        from django.tasks import TaskContext, TaskResult, TaskResultStatus
        from django.tasks.backends.base import BaseTaskBackend
        from django.tasks.base import TaskError
        from django.tasks.exceptions import TaskResultDoesNotExist
        from django.tasks.signals import task_enqueued
    except ImportError:
        from django_tasks import TaskContext, TaskResult, TaskResultStatus
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import TaskError
        from django_tasks.exceptions import TaskResultDoesNotExist
        from django_tasks.signals import task_enqueued

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LEAST_URGENT = 9
_FAILED = "qdo.errors.RequestFailedError"
app = project_app()


class QdoBackend(BaseTaskBackend):
    """Runs tasks in workers. The options are parameters of `App.request`: ``keep_seconds``."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def enqueue(
        self, task: Task[_P, _R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult[_P, _R]:
        self.validate_task(task)
        kind = "async-tasks" if is_async(task.func) else "tasks"
        called = {"task": task.module_path, "args": list(args), "kwargs": dict(kwargs)}
        due = task.run_after
        handle = app.request(
            f"{kind}-{task.queue_name}",
            {**called, "backend": self.alias, "queue": task.queue_name},
            # Django's priorities are from -100 to 100, the most urgent.
            priority=min(_LEAST_URGENT, NORMAL - round(task.priority * NORMAL / 100)),
            at=timezone.make_aware(due) if due is not None and timezone.is_naive(due) else due,
            **self.options,
        )
        result = self._result(task, _record(handle.id), called)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        record = _record(result_id)
        # A request that is done has no body, so its result has the call.
        called = opened(app, record.pool, record.result or record.content)
        return self._result(_task_of(called), record, called)

    def _result(
        self, task: Task[_P, _R], record: RequestRecord, called: Mapping[str, Any]
    ) -> TaskResult[_P, _R]:
        status = _status(record)
        is_attempted = status in (TaskResultStatus.RUNNING, TaskResultStatus.SUCCESSFUL)
        # The store has the text of an error, not its class.
        errors = (
            []
            if record.error is None
            else [TaskError(exception_class_path=_FAILED, traceback=record.error)]
        )
        result = TaskResult(
            task=task,
            id=record.id,
            status=status,
            enqueued_at=_time(record.asked),
            started_at=_time(record.started),
            last_attempted_at=_time(record.started),
            finished_at=_time(record.ended),
            args=called["args"],
            kwargs=called["kwargs"],
            backend=self.alias,
            errors=errors,
            worker_ids=[record.take.owner] * (record.failed + is_attempted),
        )
        # The class is frozen, and Django's backends set this value in the same way.
        object.__setattr__(result, "_return_value", called.get("value"))
        return result


def _record(id: str) -> RequestRecord:
    record = app.broker.requests.find(id)
    if record is None:
        raise TaskResultDoesNotExist(id)
    return record


def _status(record: RequestRecord) -> TaskResultStatus:
    if record.state != OVER:
        return TaskResultStatus.READY if record.state == WAITING else TaskResultStatus.RUNNING
    return TaskResultStatus.SUCCESSFUL if record.outcome == "done" else TaskResultStatus.FAILED


def _time(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _task_of(called: Mapping[str, Any]) -> Task[..., Any]:
    task: Task[..., Any] = import_string(called["task"])
    return task.using(backend=called["backend"], queue_name=called["queue"])


def _arguments(request: Request, task: Task[..., Any]) -> list[Any]:
    """Return the arguments of a task by position, the first of which may be its context."""
    arguments: list[Any] = request.body["args"]
    if not task.takes_context:
        return arguments
    result = task.get_backend().get_result(request.id)
    return [TaskContext(task_result=result), *arguments]


@app.job("tasks-*", pool=True)
def run_task(request: Request, context: Any) -> Any:
    """Run a task; its result must be JSON."""
    task = _task_of(request.body)
    value = task.func(*_arguments(request, task), **request.body["kwargs"])
    return {**request.body, "value": value}


@app.job("async-tasks-*", pool=True)
async def run_async_task(request: Request, context: Any) -> Any:
    """Run a task that is a coroutine."""
    task = _task_of(request.body)
    arguments = await sync_to_async(_arguments)(request, task)
    value = await task.func(*arguments, **request.body["kwargs"])
    return {**request.body, "value": value}
