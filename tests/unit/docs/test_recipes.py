"""The recipes of the documentation work, and the programs of the page about async programs.

An acceptance test types the commands of the recipes.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from qdo.testing import TestKit
from tests.support.doc_pages import blocks, read

Recipe = Callable[..., ModuleType]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Return a function that imports a file of a page, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def load(name: str, page: str = "recipes") -> ModuleType:
        (text,) = [each.text for each in blocks(read(page)) if each.options.get("caption") == name]
        (tmp_path / name).write_text(text)
        module = name.removesuffix(".py")
        monkeypatch.delitem(sys.modules, module, raising=False)
        loaded = importlib.import_module(module)
        monkeypatch.delitem(sys.modules, module)
        return loaded

    return load


def test_nightly_work_runs_once_per_customer(recipe: Recipe) -> None:
    """Although a crash repeats the job; each night is a new one."""
    with TestKit(recipe("reports.py").app) as kit:
        kit.crash_at("after-job", queue="nightly")
        kit.advance(86_400)
        assert kit.faults_left == 0
        assert kit.done("report-ada") == kit.done("report-bob") == ["2026-01-01T01:30:00Z"]
        kit.advance(86_400)
        assert kit.done("report-ada")[1:] == ["2026-01-02T01:30:00Z"]


def test_page_gets_the_result_of_its_message(recipe: Recipe) -> None:
    """It waits until the job has ended, also if the job fails for good."""
    quotes = recipe("quotes.py")
    with TestKit(quotes.app, attempts=1) as kit:
        good, bad = quotes.ask("ada", 21), quotes.ask("ada", None)
        assert quotes.answer(good) == ("waiting", None)
        kit.run_until_settled()
        assert quotes.answer(good) == ("done", 42)
        assert quotes.answer(bad) == ("failed", None)


def test_cancelled_reminder_is_skipped(recipe: Recipe) -> None:
    """Also after a crash before that is recorded; another reminder is delivered."""
    reminders = recipe("reminders.py")
    with TestKit(reminders.app) as kit:
        reminders.cancel(kit.send("remind-ada", "call Bob", delay_seconds=3600))
        kit.send("remind-ada", "call Eve", delay_seconds=3600)
        kit.crash_at("after-job")
        kit.run_until_settled()
        assert kit.faults_left == 0
        assert set(kit.skipped("remind-ada")) == {"call Bob"}
        assert kit.done("remind-ada") == ["call Eve"]


def test_web_app_stores_a_repeated_request_once(recipe: Recipe) -> None:
    """The client learns the same number twice."""
    web = recipe("web.py")
    with TestKit(web.app) as kit, web.web.test_client() as client:
        headers = {"Idempotency-Key": "7"}
        answers = [client.post("/orders/ada", json={"n": 1}, headers=headers) for _ in range(2)]
        assert [each.status_code for each in answers] == [202, 202]
        assert answers[0].json == answers[1].json
        kit.run_until_settled()
        assert kit.done("order-ada") == [{"n": 1}]


def test_old_and_new_format_are_understood(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer one waits for newer code, and uses no attempt."""
    parcels = recipe("parcels.py")
    with TestKit(parcels.app) as kit:
        kit.send("parcel-ada", {"item": "book"})
        kit.send("parcel-ada", {"version": 2, "items": ["vase", "lamp"]})
        kit.send("parcel-ada", {"version": 3})
        kit.advance(3600)
        assert capsys.readouterr().out == "parcel-ada: book\nparcel-ada: vase, lamp\n"
        assert kit.backlog("parcel-ada").count == 1
        assert kit.dead_letters("parcel-ada") == []
        assert {each.outcome for each in kit.attempts("parcel-ada")[2:]} == {"wait"}


def test_the_async_page(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """A coroutine awaits a result, and so does its test."""
    quotes = recipe("quotes.py", "async")
    with TestKit(quotes.app):
        asyncio.run(quotes.main())
    assert capsys.readouterr().out == "42\n"
    page = recipe("test_quotes.py", "async")
    with TestKit(page.app) as kit:
        asyncio.run(page.test_a_quote(lambda app: kit))
