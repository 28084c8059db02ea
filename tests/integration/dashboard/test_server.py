"""`qdo dashboard` as a process: its server, open pages, tokens, and its end."""

from __future__ import annotations

import http.client
import re
import signal
import socket
from contextlib import ExitStack, closing
from pathlib import Path

from qdo.dashboard import close_app, create_app
from qdo.errors import DatabaseError
from tests.support.cli import QDO, command
from tests.support.dashboard.served import Served, served
from tests.support.dashboard.shop import OPERATOR, VIEWER, FilledShop, Visitor
from tests.support.processes import wait_until


def test_the_dashboard_serves_and_ends(stack: ExitStack, shop: FilledShop) -> None:
    """Pages, files and JSON; SIGTERM ends it with success."""
    server = served(stack, shop)
    wait_until(lambda: "Worst queues" in server.get("/")[1], "the app is read")
    assert server.get("/api/queue?name=blocked")[0] == 200
    for name in ("dashboard.css", "dashboard.js", "icon.svg"):
        assert server.get(f"/static/{name}")[0] == 200
    server.proc.send(signal.SIGTERM)
    assert server.proc.wait() == 0


def test_an_open_page_learns_of_each_reading(stack: ExitStack, local_shop: FilledShop) -> None:
    """It asks, and that keeps the readings going; nobody's page makes none."""
    server = served(stack, local_shop)
    first = server.reading()
    wait_until(lambda: server.reading() != first, "there is another reading")


def test_an_open_page_survives_a_restart_of_the_dashboard(
    stack: ExitStack, local_shop: FilledShop
) -> None:
    """The readings of the new process have other names."""
    server = served(stack, local_shop)
    first = server.reading()
    server.proc.send(signal.SIGKILL)
    server.proc.wait()
    again = Served(local_shop, port=server.port)
    stack.enter_context(again.proc)
    assert again.reading() != first


def test_tokens_come_from_closed_files(local_shop: FilledShop, tmp_path: Path) -> None:
    """A file that others may read, or an empty one, is rejected; so is a second address."""
    path = tmp_path / "token"
    path.write_text(VIEWER)
    wrong: list[tuple[str, ...]] = [("--token-file", str(path)), ("--listen", "0.0.0.0:0")]
    wrong += [("--token-file", str(tmp_path / "none")), ("--listen", "x"), ("--tls-cert", "x")]
    wrong += [("--allow-actions",), ("--listen", "[::]:99999")]
    wrong += [("--tls-cert", str(path), "--tls-key", str(path))]
    wrong += [("--listen", f"127.0.0.1:{'7' * 5000}")]
    path.chmod(0o644)
    for options in wrong:
        ended = command(*QDO, "dashboard", "--app", "shop", *options, cwd=tmp_path)
        assert ended.code == 2, (options, ended)
        assert VIEWER not in ended.err


def test_an_address_in_use_is_a_usage_error(local_shop: FilledShop, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        listen = ("dashboard", "--app", "shop", "--listen", address)
        ended = command(*QDO, *listen, cwd=tmp_path)
    assert ended.code == 2
    assert address in ended.err


def test_a_token_of_a_file_lets_in(
    stack: ExitStack, local_shop: FilledShop, tmp_path: Path
) -> None:
    """And that of a variable lets in operators; neither is in the log."""
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{VIEWER}\n")
    options = ("--token-file", str(path), "--allow-actions")
    server = served(stack, local_shop, *options, QDO_DASHBOARD_OPERATOR_TOKEN=OPERATOR)
    for token in (VIEWER, OPERATOR):
        assert _logs_in(server, token)
    assert not _logs_in(server, "x" * 20)
    assert VIEWER not in server.proc.output
    assert OPERATOR not in server.proc.output


def _logs_in(server: Served, token: str) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as client:
        client.request("GET", "/login")
        page = client.getresponse()
        csrf = re.search('name="csrf" value="([^"]+)"', page.read().decode())
        assert csrf is not None
        host = f"127.0.0.1:{server.port}"
        headers = {
            "Cookie": (page.headers["Set-Cookie"] or "").partition(";")[0],
            "Origin": f"http://{host}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        client.request("POST", "/login", f"csrf={csrf[1]}&token={token}", headers)
        return client.getresponse().status == 302


def test_a_lost_broker_is_told_and_found_again(local_shop: FilledShop) -> None:
    """The last reading stays, with the reason; later it goes on by itself."""
    visitor = local_shop.visitor()
    visitor.page("/")
    reader = visitor.reader
    database = local_shop.folder / "messages.db"
    local_shop.app.close()
    files = list(local_shop.folder.glob("messages.db*"))
    for file in files:
        file.rename(f"{file}.kept")
    database.mkdir()
    reader._thread.submit(_fail)  # it would go on with the file that it has opened
    wait_until(lambda: bool(reader.look(1.0)) and reader.fault is not None, "the broker is lost")
    text = visitor.get("/").text
    assert "The app cannot be read" in text
    assert "qdo retry-now blocked" in text
    database.rmdir()
    for file in files:
        file.with_name(f"{file.name}.kept").rename(file)
    wait_until(lambda: bool(reader.look(1.0)) and reader.fault is None, "it is back")


def test_a_broker_that_never_answered_is_told(local_shop: FilledShop) -> None:
    """On a page that loads again by itself; in JSON with a code for programs."""
    settings = local_shop.app.settings.merged(
        {"broker": "postgresql://nobody@127.0.0.1:1/none"}, "a test"
    )
    flask = create_app(settings, anonymous=True, pause_seconds=0.05)
    try:
        visitor = Visitor(flask)
        reader = visitor.reader
        wait_until(lambda: reader.look(1.0) is None and reader.fault is not None, "it is told")
        text = visitor.get("/").text
        assert "The app cannot be read" in text
        assert 'http-equiv="refresh"' in text
        assert visitor.get("/api/status").status_code == 503
    finally:
        close_app(flask)


def _fail(connections: object) -> None:
    raise DatabaseError(path="messages.db", reason="cut")
