"""The shop of the FastAPI page: its test, its web server with a worker, and both in one process."""

from __future__ import annotations

import signal
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import WORKER
from tests.support.doc_pages import Shell, blocks, read, steps
from tests.support.processes import Proc, wait_until
from tests.support.webhook_sender import SECRET, post, signed
from tests.support.zookeeper import free_ports

PAGE = list(blocks(read("fastapi")))
STEPS = {each.options["class"]: steps(each) for each in PAGE if "class" in each.options}


@pytest.fixture
def shop(tmp_path: Path, bare_database_url: str, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """The programs of the page in a folder, with their database."""
    monkeypatch.setenv("SHOP_DATABASE", bare_database_url)
    monkeypatch.setenv("STRIPE_SECRET", SECRET)
    monkeypatch.setenv("DASHBOARD_TOKEN", "0123456789abcdef")
    shell = Shell(tmp_path, pytest=f'{sys.executable} -m pytest -p no:cacheprovider "$@"')
    for block in PAGE:
        if "caption" in block.options:
            shell.write(block.options["caption"], block.text)
    return shell


@contextmanager
def serving(shop: Shell, target: str, *options: str) -> Iterator[tuple[Proc, int]]:
    """Create the tables, and yield a web server and its port; it must end cleanly at SIGTERM."""
    for command, _ in STEPS["serve"]:
        if command.startswith(("python", "qdo admin")):
            shop.run(command)
    (port,) = free_ports(1)
    argv = ("-m", "uvicorn", target, "--port", str(port), *options)
    with Proc.python(*argv, cwd=shop.folder) as server:
        server.wait_for_line("Uvicorn running on", timeout_seconds=60)
        yield server, port
        server.send(signal.SIGTERM)
        assert server.wait() in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in server.output
        assert "Traceback" not in server.output
        assert "BlockedLoopWarning" not in server.output


def check_calls(shop: Shell, port: int) -> None:
    """Make the calls of the page, which must give what it shows."""
    for command, lines in STEPS["calls"]:
        call = command.replace("8000", str(port)).removeprefix("sleep 1; ")
        wait_until(lambda call=call, lines=lines: shop.run(call).splitlines() == lines, call, 60)


def test_the_shop_runs_as_shown(shop: Shell) -> None:
    """Orders, an invoice, a webhook, the dashboard, and the end by SIGTERM."""
    event = b'{"id": "evt_1"}'
    with (
        serving(shop, "main:web") as (_, port),
        Proc.python(*WORKER, "shop:app", cwd=shop.folder) as worker,
    ):
        check_calls(shop, port)
        headers = [*[signed("stripe", event)] * 2, {}]
        assert [post(port, "/stripe", event, each) for each in headers] == [202, 202, 401]
        worker.wait_for_line("paid: evt_1", timeout_seconds=60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/queues/", timeout=30) as login:
            assert b'action="/queues/login"' in login.read()
        assert post(port, "/orders", b'{"customer": "a/b", "item": "x"}', {}) == 422
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert worker.output.count("paid: evt_1") == 1


def test_a_type_checker_accepts_the_shop(shop: Shell) -> None:
    # mypy takes 20 s of a processor for the sources of SQLAlchemy.
    command = 'python -m pyright --pythonpath "$(command -v python)" shop.py main.py both.py'
    assert "0 errors, 0 warnings" in shop.run(command)


def test_the_tests_of_the_page_pass(shop: Shell) -> None:
    _, (command, _) = STEPS["test"]
    assert "3 passed" in shop.run(command.partition(" ")[2])


@pytest.mark.parametrize(("option", "workers"), [("--workers=2", 2), ("--reload", 1)])
def test_a_worker_runs_in_the_web_server(shop: Shell, option: str, workers: int) -> None:
    """It ends with the server, which waits for its messages."""
    list_workers = "qdo workers --app shop:app -o name 2> hints"
    with serving(shop, "both:web", option) as (server, port):
        server.wait_for_line("Application startup complete", count=workers)
        if option == "--reload":
            (shop.folder / "shop.py").touch()
            server.wait_for_line("Application startup complete", count=2)
            assert server.output.count("Application shutdown complete") == 1
        wait_until(lambda: len(shop.run(list_workers).split()) == workers, "the workers", 60)
        check_calls(shop, port)
    assert shop.run(list_workers) == ""
