"""The shop of the FastAPI page: its test, its web server with a worker, and both in one process."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import WORKER, clean_environment
from tests.support.doc_pages import Shell, blocks, read, steps
from tests.support.processes import Proc, wait_until
from tests.support.zookeeper import free_ports

PAGE = list(blocks(read("fastapi")))
TOKEN = "0123456789abcdef"
SECRET = "geheim"


HEAD = "POST /stripe HTTP/1.1\r\nHost: localhost\r\n"
RUDE = (
    "Content-Length: 1000000\r\n\r\nslow",
    "Content-Length: 1000000\r\n\r\ngone",
    "Content-Length: 99999999\r\n\r\nlong",
    "Content-Length: 2\r\nContent-Length: 8\r\n\r\n{}123456",
    "Transfer-Encoding: chunked\r\n\r\nffffff\r\n{}",
)
"""The rest of requests to the webhook that are slow, cut, too long or ambiguous."""


class FastApiShop:
    """The programs of the page in a folder, with a database and a port of their own."""

    def __init__(self, folder: Path, database: str, stack: ExitStack) -> None:
        self._stack = stack
        self.shell = Shell(folder, pytest=f'{sys.executable} -m pytest -p no:cacheprovider "$@"')
        for block in PAGE:
            if "caption" in block.options:
                self.shell.write(block.options["caption"], block.text)
        (self.port,) = free_ports(1)
        self._variables = {
            "SHOP_DATABASE": database,
            "STRIPE_SECRET": SECRET,
            "DASHBOARD_TOKEN": TOKEN,
            "QDO_BROKER": database,
        }

    def run(self, command: str) -> str:
        given = "; ".join(f"export {name}='{text}'" for name, text in self._variables.items())
        return self.shell.run(f"{given}; {command}")

    def start(self, *argv: str) -> Proc:
        env = clean_environment(self._variables)
        return self._stack.enter_context(Proc.python(*argv, env=env, cwd=self.shell.folder))

    def workers(self) -> list[Any]:
        found: list[Any] = json.loads(self.run("qdo workers --app shop -o json 2> hints"))["items"]
        return found

    def serve(self, target: str, *options: str) -> Proc:
        """Start uvicorn, and wait until it listens."""
        server = self.start("-m", "uvicorn", target, "--port", str(self.port), *options)
        server.wait_for_line("Uvicorn running on", timeout_seconds=60)
        return server

    def ask(
        self, method: str, path: str, body: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with closing(client):
            client.request(method, path, body, headers or {})
            answer = client.getresponse()
            return answer.status, answer.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def check_calls(self) -> None:
        """Make the calls of the page, which must give what it shows."""
        (shown,) = (each for each in PAGE if each.options.get("class") == "calls")
        for command, lines in steps(shown):
            call = command.replace("8000", str(self.port)).removeprefix("sleep 1; ")

            def is_shown(call: str = call, lines: list[str] = lines) -> bool:
                return self.run(call).splitlines() == lines

            wait_until(is_shown, call, 60)


@pytest.fixture
def shop(tmp_path: Path, bare_database_url: str) -> Iterator[FastApiShop]:
    with ExitStack() as stack:
        yield FastApiShop(tmp_path, bare_database_url, stack)


def create_schema(shop: FastApiShop) -> None:
    (shown,) = (each for each in PAGE if each.options.get("class") == "serve")
    for command, _ in steps(shown):
        if command.startswith(("python", "qdo admin")):
            shop.run(command)


def test_the_shop_runs_as_shown(shop: FastApiShop) -> None:
    """Orders, an invoice, a webhook, the dashboard, and the end by SIGTERM."""
    create_schema(shop)
    server = shop.serve("main:web")
    worker = shop.start(*WORKER, "shop:app")
    shop.check_calls()
    event = json.dumps({"id": "evt_1"})
    now = str(int(time.time()))
    digest = hmac.new(SECRET.encode(), f"{now}.{event}".encode(), hashlib.sha256).hexdigest()
    signature = {"Stripe-Signature": f"t={now},v1={digest}"}
    with ExitStack() as rude:
        for rest in RUDE * 20:
            client = rude.enter_context(closing(shop.connect()))
            client.sendall(f"{HEAD}Stripe-Signature: t={now},v1=0\r\n{rest}".encode())
            if "gone" in rest:
                client.close()
        answers = [shop.ask("POST", "/stripe", event, signature)[0] for _ in range(2)]
    assert answers == [202, 202]
    assert shop.ask("POST", "/stripe", event)[0] == 401
    worker.wait_for_line("paid: evt_1", timeout_seconds=60)
    assert "/stripe" in json.loads(shop.ask("GET", "/openapi.json")[1])["paths"]
    assert shop.ask("GET", "/queues/")[0] == 302
    assert 'action="/queues/login"' in shop.ask("GET", "/queues/login")[1]
    assert shop.ask("POST", "/orders", '{"customer": "a/b", "item": "x"}')[0] == 422
    for each in (server, worker):
        each.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert server.wait() in (0, -signal.SIGTERM)
    assert worker.output.count("paid: evt_1") == 1
    assert "Traceback" not in server.output
    assert "BlockedLoopWarning" not in server.output


def test_a_type_checker_accepts_the_shop(shop: FastApiShop) -> None:
    # mypy takes 20 s of a processor for the sources of SQLAlchemy.
    command = 'python -m pyright --pythonpath "$(command -v python)" shop.py main.py both.py'
    assert "0 errors, 0 warnings" in shop.run(command)


def test_the_tests_of_the_page_pass(shop: FastApiShop) -> None:
    (shown,) = (each for each in PAGE if each.options.get("class") == "test")
    (command,) = (each for each, _ in steps(shown) if "pytest" in each and "pip" not in each)
    found = shop.run(command.partition(" ")[2])
    assert "3 passed" in found


@pytest.mark.parametrize(
    ("options", "workers"), [((), 1), (("--workers", "2"), 2), (("--reload",), 1)]
)
def test_a_worker_runs_in_the_web_server(
    shop: FastApiShop, options: tuple[str, ...], workers: int
) -> None:
    """It ends with the server, which waits for its messages."""
    create_schema(shop)
    server = shop.serve("both:web", *options)
    server.wait_for_line("Application startup complete", count=workers)
    if "--reload" in options:
        (shop.shell.folder / "shop.py").touch()
        server.wait_for_line("Application startup complete", count=2)
        assert server.output.count("Application shutdown complete") == 1
    wait_until(lambda: len(shop.workers()) == workers, "the workers are registered", 60)
    shop.check_calls()
    server.send(signal.SIGTERM)
    assert server.wait() in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in server.output
    assert "Traceback" not in server.output
    assert shop.workers() == []
