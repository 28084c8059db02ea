"""Apps: registering jobs and hooks, sending, settings in code."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from decimal import Decimal
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ujson

import qdo
from qdo import App, Message, Settings
from qdo.encoding import encode_body
from qdo.errors import QueueNameError, SettingsError, UnknownSettingError, UsageError
from qdo.settings.sources import load


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App("mail", broker=f"sqlite:{tmp_path}/messages.db") as app:
        app.use(load(environ={}))
        yield app


def bodies(app: App, queue: str) -> list[bytes]:
    return [row[1] for row in app.broker.reader(queue, 0).fetch(100_000)]


# --- jobs ---


def test_a_job_is_registered_and_stays_a_function(app: App) -> None:
    """The decorator gives the function back, so that tests can call it."""

    @app.job(queues="a*", checkpoint="message")
    def greet(message: Any, context: Any) -> str:
        return "hello"

    assert greet(None, None) == "hello"
    job = app.job_for("abc")
    assert job is not None
    assert (job.function, job.queues, job.checkpoint) == (greet, "a*", "message")
    assert job.name.endswith("greet")
    assert app.job_for("xyz") is None


def test_the_most_particular_glob_wins(app: App) -> None:
    """The order of registration does not matter."""
    jobs = {glob: (lambda message, context: None) for glob in ("*", "mail-*", "mail-vip", "m*")}
    for glob, function in jobs.items():
        app.job(glob)(function)
    found = {queue: app.job_for(queue) for queue in ("x", "mail-1", "mail-vip", "mx", "Mail-1")}
    globs = {queue: job.queues for queue, job in found.items() if job}
    assert globs == {
        "x": "*",
        "mail-1": "mail-*",
        "mail-vip": "mail-vip",
        "mx": "m*",
        "Mail-1": "*",
    }


def no_context(message: Message) -> None: ...


def too_much(message: Message, context: Any, more: Any) -> None: ...


async def asynchronous(message: Message, context: Any) -> Any:
    yield 1


def generator(message: Message, context: Any) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_context, r"def no_context\(message, context\)"),
        (too_much, r"def too_much\(message, context\)"),
        (asynchronous, "asynchronous.*'yield'"),
        (generator, "generator.*'yield'"),
        ("text", "'text'"),
    ],
)
def test_functions_that_can_be_no_job(app: App, function: Any, reason: str) -> None:
    """They are rejected at registration, with the remedy, not when a message comes."""
    with pytest.raises(UsageError, match=reason):
        app.job()(function)
    assert app.jobs == ()


def test_the_decorator_needs_parentheses(app: App) -> None:
    """The most frequent slip has an answer of its own."""
    with pytest.raises(UsageError, match=r"@app\.job\(\)"):
        app.job(no_context)  # type: ignore[arg-type]


def test_checkpoint_is_one_of_two(app: App) -> None:
    """A misspelled checkpoint is rejected."""
    with pytest.raises(UsageError, match="'always'"):
        app.job(checkpoint="always")  # type: ignore[arg-type]


# --- hooks ---


def test_default_hooks(app: App) -> None:
    """Without hooks the context is an empty dict of the worker's own, failures are ignored."""
    with app.hooks.job_context() as one, app.hooks.job_context() as two:
        assert one == {}
        assert one is not two
    app.hooks.job_failure(Message("q", 1, None), {}, ValueError())


async def async_hook(*arguments: Any) -> None: ...


def generator_hook(*arguments: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("hook", "roles", "keyword"),
    [
        (async_hook, ["context"], "yield"),
        (generator_hook, ["failure", "observer"], "yield"),
    ],
)
def test_hooks_that_would_never_run_are_refused(
    app: App, hook: Any, roles: list[str], keyword: str
) -> None:
    """qdo would not await a coroutine, nor run what only makes a generator."""
    for role in roles:
        with pytest.raises(UsageError, match=rf"{hook.__name__}.*'{keyword}'"):
            getattr(app, role)(hook)


def test_rejects_a_job_context_without_context_manager(app: App) -> None:
    """If a function returns its resources instead of yielding them, the error shows the remedy."""
    app.context(lambda: {"connection": 1})
    with pytest.raises(UsageError, match=r"type dict.*'yield'"):
        app.hooks.job_context()


def test_hooks_given_in_code() -> None:
    """A generator function is made a context manager; failures reach the hook."""
    failures = []

    def resources() -> Iterator[str]:
        yield "connection"

    app = App(
        "a",
        job_context=resources,
        job_failure=lambda message, context, error: failures.append((message, context, error)),
    )
    with app.hooks.job_context() as context:
        assert context == "connection"
    error = ValueError("x")
    message = Message("q", 1, None)
    app.hooks.job_failure(message, "connection", error)
    assert failures == [(message, "connection", error)]


def test_hooks_by_decorator(app: App) -> None:
    """Decorators register hooks and give the function back."""

    @app.context
    @contextmanager
    def resources() -> Iterator[int]:
        yield 5

    @app.failure
    def failed(message: Any, context: Any, error: Any) -> None: ...

    manager: AbstractContextManager[Any] = app.hooks.job_context()
    with manager as context:
        assert context == 5
    assert app.hooks.job_failure is failed


def test_hooks_are_checked(app: App) -> None:
    """A hook that could not be called is rejected at once."""
    with pytest.raises(UsageError, match=r"job_failure .* \(message, context, error\)"):
        app.failure(lambda message: None)
    with pytest.raises(UsageError, match="job_context"):
        app.context(lambda message: None)


def test_a_second_hook_is_refused(app: App) -> None:
    """It would silently replace the first one."""
    first = contextmanager(lambda: iter([5]))
    app.context(first)
    with pytest.raises(UsageError, match="job_context"):
        app.context(contextmanager(lambda: iter([6])))
    hook = app.failure(lambda message, context, error: None)
    with pytest.raises(UsageError, match="job_failure"):
        app.failure(lambda message, context, error: None)
    with app.hooks.job_context() as context:
        assert context == 5
    assert app.hooks.job_failure is hook


# --- sending ---


def test_send_stores_compact_json(app: App) -> None:
    """Bodies are JSON in UTF-8 without needless bytes."""
    first = app.send("q", {"name": "Zoë", "path": "a/b"}, key="k", headers={"a": "ü"})
    second = app.send("q", None)
    assert first != second
    assert bodies(app, "q") == ['{"name":"Zoë","path":"a/b"}'.encode(), b"null"]


def test_send_many_keeps_order_and_returns_ids(app: App) -> None:
    """Tuples of two to four are taken; ids come in the same order and are distinct."""
    ids = app.send_many([("q", 1), ("p", 2, "key"), ("q", 3, None, {"h": "v"})])
    assert len(set(ids)) == 3
    assert bodies(app, "q") == [b"1", b"3"]
    assert app.send_many([]) == []


class NotJson:
    """Something that JSON does not know."""


class AlmostJson:
    """Something that ujson would ask for its JSON."""

    def __json__(self) -> str:
        return "1"

    def toDict(self) -> dict[str, int]:
        return {"a": 1}


@pytest.mark.parametrize(
    "body",
    [
        *([b"bytes"], {1, 2}, float("nan"), float("inf"), NotJson(), [NotJson()], range(3)),
        *(Decimal("1.5"), {"amount": Decimal("12345678901234567.89")}, [[Decimal(1)]]),
        *({1: "a"}, [{None: 1}], {"a": {(1, 2): 3}}, {b"a": 1}),
        *(AlmostJson(), {"a": AlmostJson()}),
        *("\ud800", {"\ud800": 1}, ["\ud83d\ude00"], 10**5000),
    ],
    ids=lambda body: type(body).__name__,
)
def test_bodies_that_json_cannot_hold(app: App, body: Any) -> None:
    """They are rejected with the valid alternatives; nothing is stored."""
    with pytest.raises(UsageError, match=r"'q'.*JSON"):
        app.send("q", body)
    with pytest.raises(UsageError):
        app.send_many([("q", 1), ("q", body)])
    assert app.broker.catalog.names() == []


@pytest.mark.parametrize(
    "body",
    [
        *(None, True, "", "\0 \N{GRINNING FACE} </script>", 0, -(10**30), 0.1, 5e-324, 1.7e308),
        *([], {}, {"": [1, {"a": [None, 2.5]}]}, OrderedDict(b=1, a=2), HTTPStatus.OK),
    ],
    ids=lambda body: type(body).__name__,
)
def test_a_body_arrives_as_it_was_sent(app: App, body: Any) -> None:
    """Every value that is taken; only tuples arrive as lists."""
    app.send_many([("q", body), ("q", (body, body))])
    assert [*map(ujson.loads, bodies(app, "q"))] == [body, [body, body]]


def test_endless_bodies() -> None:
    """A body that contains itself is rejected as well."""
    body: list[Any] = []
    body.append(body)
    with pytest.raises(UsageError, match="JSON"):
        encode_body("q", body)


@pytest.mark.parametrize("queue", [5, None, b"q", ["q"], 1.5])
def test_a_queue_that_is_not_text_is_named_as_the_fault(app: App, queue: Any) -> None:
    """A tenant's number for a queue, or queue and body exchanged."""
    for attempt in (lambda: app.send(queue, 1), lambda: app.send_many([("q", 1), (queue, 1)])):
        with pytest.raises(QueueNameError) as caught:
            attempt()
        assert caught.value.details["name"] == queue
        assert type(queue).__name__ in caught.value.details["reason"]
    assert app.broker.catalog.names() == []


def test_keys_and_headers_are_text(app: App) -> None:
    """All other types are rejected."""
    with pytest.raises(UsageError, match=r"key.*5"):
        app.send("q", 1, key=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="headers"):
        app.send("q", 1, headers={"a": 1})  # type: ignore[dict-item]


def test_a_closed_app_opens_again(app: App) -> None:
    """Closing is not final; sending opens the broker again."""
    app.send("q", 1)
    app.close()
    app.close()
    app.send("q", 2)
    assert bodies(app, "q") == [b"1", b"2"]


# --- settings ---


def test_settings_in_code_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment wins over the app's settings in code; it is read at first use."""
    app = App("a", fetch=5, attempts=5)
    monkeypatch.setenv("QDO_FETCH", "7")
    assert (app.settings.app, app.settings.fetch, app.settings.attempts) == ("a", 7, 5)
    assert app.settings.origin("attempts") == "App('a')"


def test_a_worker_takes_settings_by_name(app: App) -> None:
    """They win over the environment; the app itself sends with them."""
    app.use(load(environ={"QDO_FETCH": "7", "QDO_ATTEMPTS": "3"}))
    worker = qdo.Worker(app, fetch=8, burst=True)
    assert app.settings is worker.settings
    assert (app.settings.fetch, app.settings.attempts, app.settings.burst) == (8, 3, True)
    assert app.settings.origin("fetch") == "Worker"
    with pytest.raises(UnknownSettingError, match=r"Worker.*'burst'"):
        qdo.Worker(app, brust=True)


def test_settings_in_code_are_checked_at_once() -> None:
    """A misspelt or impossible setting does not wait for the first message."""
    with pytest.raises(UnknownSettingError, match=r"App\('a'\).*'broker'"):
        App("a", brokr="sqlite:x")
    with pytest.raises(SettingsError, match="fetch"):
        App("a", fetch=0)
    for name in ("a/b", "a:b", ""):
        with pytest.raises(SettingsError, match="setting app"):
            App(name)


def test_an_app_refuses_the_settings_of_another() -> None:
    """Otherwise messages would go to the wrong app."""
    with pytest.raises(UsageError, match=r"'a'.*QDO_APP.*'b'"):
        App("a").use(load(environ={"QDO_APP": "b"}))
    assert App("a").use(Settings()).app == "a"


def test_public_names() -> None:
    """Every public name can be had from the package, and a wrong one cannot."""
    missing = [name for name in qdo.__all__ if not hasattr(qdo, name)]
    assert missing == []
    assert set(qdo.__all__) <= set(dir(qdo))
    with pytest.raises(AttributeError, match="no attribute 'Ap'"):
        qdo.Ap  # noqa: B018


@pytest.mark.parametrize("queues", [["a", "b"], 3, None])
def test_a_job_is_for_one_glob(queues: Any) -> None:
    """A list would be taken for a glob, and end every worker at its first message."""
    with pytest.raises(UsageError, match="queues"):
        App("test").job(queues)(lambda message, context: None)


def test_threads_may_use_an_app_after_the_main_thread(tmp_path: Path) -> None:
    """The modules that a call loads late can be loaded then."""
    program = f"""
import threading
from qdo import App
app = App("a", broker="sqlite:{tmp_path}/m.db", coordinator="sqlite:{tmp_path}/c.db")
def late():
    threading.main_thread().join()
    app.send("q", 1)
    try:
        with app.limit("crm"): pass
    except Exception as error:
        print(type(error).__name__)
    app.close()
threading.Thread(target=late).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("LimitNotFoundError\n", "")


@pytest.mark.parametrize("statement", ["import qdo", "import qdo; qdo.App('a')"])
def test_import_of_qdo_stays_lazy(statement: str) -> None:
    """A program that only sends loads no library of a server, an executor or a database."""
    heavy = {"boto3", "botocore", "gevent", "kazoo", "sqlalchemy"}
    check = f"import sys; {statement}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def test_a_process_that_eventlet_has_patched_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A send would wait forever: its locks stop the threads of the broker."""
    patcher = SimpleNamespace(is_monkey_patched=lambda name: name == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with App("a", broker=f"sqlite:{tmp_path}/m.db") as app, pytest.raises(UsageError):
        app.send("q", 1)
