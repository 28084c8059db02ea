"""`qdo dashboard` as a process, and clients that speak to it byte by byte."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from contextlib import ExitStack, closing, suppress

from tests.support.cli import QDO
from tests.support.dashboard.shop import FilledShop
from tests.support.processes import Proc, wait_until

_URL = re.compile(r"dashboard: (https?)://127\.0\.0\.1:(\d+)/")


class Served:
    """A dashboard process."""

    def __init__(self, shop: FilledShop, *options: str, port: int = 0, **variables: str) -> None:
        settings = {f"QDO_{name.upper()}": value for name, value in shop.places.items()}
        environment = {"QDO_APP": "shop", **settings, **variables}
        listen = ("--listen", f"127.0.0.1:{port}")
        argv = (*QDO, "dashboard", *listen, *options)
        self.proc = Proc.python(*argv, env=environment, cwd=shop.folder)
        wait_until(lambda: _URL.search(self.proc.output) is not None, "the dashboard listens")
        found = _URL.search(self.proc.output)
        self.port = int(found[2]) if found else 0
        self._https = found is not None and found[1] == "https"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of an answer."""
        with closing(self._client()) as client:
            client.request("GET", path)
            answer = client.getresponse()
            return answer.status, answer.read().decode()

    def _client(self) -> http.client.HTTPConnection:
        if not self._https:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)

    def reading(self) -> str:
        """Return what names the last reading, once there is one."""
        wait_until(lambda: not self.get("/reading")[1].startswith("0.000"), "the app is read")
        return self.get("/reading")[1]

    def send(self, request: bytes) -> bytes:
        """Return everything that the server answers to bytes."""
        with closing(self.connect()) as client:
            client.sendall(request)
            answer = b""
            with suppress(ConnectionResetError):  # it does not read the rest of a long request
                while data := client.recv(65536):
                    answer += data
            return answer


def served(stack: ExitStack, shop: FilledShop, *options: str, **variables: str) -> Served:
    """Start a dashboard, to be killed after the test."""
    found = Served(shop, *options, **variables)
    stack.enter_context(found.proc)
    return found
