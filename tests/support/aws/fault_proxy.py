"""A proxy in front of a server of AWS that injects faults by rules.

``python -m tests.support.aws.fault_proxy UPSTREAM`` prints the address it listens on.
Clients use it like the server. Requests to S3 go to another server, if one is configured. Control
requests in JSON:

- ``POST /_proxy/rule``: add a rule, see `FaultRule`; the first one that fits is applied;
- ``POST /_proxy/clear``: forget all rules;
- ``GET /_proxy/log``: every request: time, service, action, name, fault, status, attempt;
- ``POST /_proxy/reset_log``: forget these.

Tests use it as `Proxy`, by `proxying`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.aws import http1
from tests.support.aws.errors import REFUSALS, Call, refuse
from tests.support.aws.http1 import Connection, HttpRequest
from tests.support.aws.server_process import ServerProcess, serving

FAULTS = ("pass", "slow", "unanswered", "reset-before", "reset-after", "cut", "page", *REFUSALS)
PAGE = b"<html><body>Please log in</body></html>"
"""The response of the fault "page"."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_HOPS = re.compile(rb"\r\n(?:connection|expect):[^\r]*", re.IGNORECASE)
_FRAMES = re.compile(
    rb"\r\n(?:connection|keep-alive|transfer-encoding|content-length):[^\r]*", re.IGNORECASE
)


@dataclass(slots=True)
class FaultRule:
    """A fault, and the requests that it applies to.

    :ivar fault: ``pass``; ``slow``: forwarded, the answer comes `seconds` later; ``unanswered``:
        forwarded, the connection breaks after `seconds` without an answer; ``reset-before``: the
        connection breaks at once; ``reset-after``: it breaks when the server has done the work;
        ``cut``: it breaks in the middle of the answer; ``page``: a page of HTML with status 200,
        as of a gateway that asks for a login, and the server is not asked; or one of `REFUSALS`,
        which never reach the server either.
    :ivar action: name of an action, "" for all; S3's are HTTP methods.
    :ivar name: text in the name of the queue or stream (which GetRecords has only if it is given
        the ARN), behind it the shard of GetShardIterator, or in the path for S3.
    :ivar skip: how many matching requests pass before.
    :ivar count: how many requests get the fault, 0 for all.
    """

    fault: str
    action: str = ""
    name: str = ""
    skip: int = 0
    count: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"no fault {self.fault!r}, only {FAULTS}")

    def fits(self, call: Call) -> bool:
        return self.action in ("", call.action) and self.name in call.name


class Rules:
    """The rules, oldest first."""

    def __init__(self) -> None:
        self._rules: list[FaultRule] = []

    def add(self, rule: FaultRule) -> None:
        self._rules.append(rule)

    def clear(self) -> None:
        self._rules.clear()

    def next(self, call: Call) -> FaultRule:
        """Return the rule for a call."""
        for rule in self._rules:
            if not rule.fits(call):
                continue
            if rule.skip:
                rule.skip -= 1
                break
            if rule.count:
                rule.count -= 1
                if not rule.count:
                    self._rules.remove(rule)
            return rule
        return FaultRule("pass")


@dataclass(slots=True)
class LoggedRequest:
    """A request in the log.

    :ivar time: arrival, in Unix seconds.
    :ivar status: 0 without a response, or before it.
    :ivar attempt: see `Call`.
    """

    time: float
    service: str
    action: str
    name: str
    fault: str
    status: int = 0
    attempt: str = ""


class Forwarder:
    """The proxy in its process."""

    def __init__(self, upstream: str, s3: str) -> None:
        self._upstream, self._s3 = _address(upstream), _address(s3)
        self._rules = Rules()
        self._log: list[LoggedRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()

    def handle(self, request: HttpRequest) -> None:
        """Answer control requests; handle all other requests in a task."""
        if request.path.startswith("/_proxy/"):
            self._administer(request)
            return
        call = Call.of(request)
        rule = self._rules.next(call)
        entry = LoggedRequest(
            time.time(), call.service, call.action, call.name, rule.fault, attempt=call.attempt
        )
        self._log.append(entry)
        if rule.fault in REFUSALS:
            entry.status = refuse(request, call, rule.fault)
        elif rule.fault == "reset-before":
            request.connection.reset()
        elif rule.fault == "page":
            entry.status = 200
            request.reply(200, b"" if request.method == "HEAD" else PAGE, "text/html")
        else:
            task = asyncio.get_running_loop().create_task(self._pass(request, rule, entry))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, request: HttpRequest, rule: FaultRule, entry: LoggedRequest) -> None:
        try:
            answer = await self._forward(
                request, self._s3 if entry.service == "s3" else self._upstream
            )
        except (OSError, asyncio.IncompleteReadError):
            request.connection.reset()  # as if the server itself were gone
            return
        await asyncio.sleep(rule.seconds)
        if rule.fault in ("reset-after", "unanswered"):
            request.connection.reset()
            return
        entry.status = int(answer.split(b" ", 2)[1])
        if rule.fault == "cut":
            head = answer.index(b"\r\n\r\n") + 4
            request.connection.cut(answer[: (head + len(answer)) // 2])
            return
        request.connection.answer(answer)

    async def _forward(self, request: HttpRequest, address: tuple[str, int]) -> bytes:
        """Return a server's whole answer to a request."""
        reader, writer = await asyncio.open_connection(*address)
        try:
            head = _HOPS.sub(b"", request.head) + b"\r\nConnection: close\r\n\r\n"
            writer.write(head + request.raw)
            answer = b""
            while not answer or answer.startswith(b"HTTP/1.1 100"):
                answer = await reader.readuntil(b"\r\n\r\n")
            return await _whole(answer[:-4], request.method == "HEAD", reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _administer(self, request: HttpRequest) -> None:
        answer: Any = {}
        if request.path == "/_proxy/log":
            answer = [asdict(entry) for entry in self._log]
        elif request.path == "/_proxy/reset_log":
            self._log.clear()
        elif request.path == "/_proxy/clear":
            self._rules.clear()
        elif request.path == "/_proxy/rule":
            self._rules.add(FaultRule(**json.loads(request.body)))
        else:
            request.reply(404, b"{}")
            return
        request.reply(200, json.dumps(answer).encode())


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def _whole(head: bytes, bare: bool, reader: asyncio.StreamReader) -> bytes:
    """Return a response with a Content-Length, whatever framing the server used."""
    length = _LENGTH.search(head)
    if bare:
        return _HOPS.sub(b"", head) + b"\r\n\r\n"
    if _CHUNKED.search(head):
        body = await _chunks(reader)
    elif length:
        body = await reader.readexactly(int(length[1]))
    else:
        body = await reader.read()
    head = _FRAMES.sub(b"", head).replace(b"HTTP/1.0", b"HTTP/1.1", 1)
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


# --- for tests


class Proxy:
    """A running proxy, from a test's side."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    @property
    def url(self) -> str:
        return self._process.url

    def spoil(self, fault: str, action: str = "", **terms: Any) -> None:
        """Add a rule; see `FaultRule` for its terms."""
        self._process.ask("/_proxy/rule", asdict(FaultRule(fault, action, **terms)))

    def clear(self) -> None:
        """Forget all rules and the log."""
        self._process.ask("/_proxy/clear", {})
        self._process.ask("/_proxy/reset_log", {})

    def log(self, action: str = "") -> list[LoggedRequest]:
        """Return the requests in order, of one action or of all."""
        found = [LoggedRequest(**each) for each in self._process.ask("/_proxy/log")]
        return [entry for entry in found if action in ("", entry.action)]


@contextlib.contextmanager
def proxying(upstream: str, s3: str = "") -> Iterator[Proxy]:
    """Run a proxy for one or two servers during the block."""
    with serving("tests.support.aws.fault_proxy", upstream, "--s3", s3 or upstream) as process:
        yield Proxy(process)


async def run(upstream: str, s3: str, port: int) -> None:
    """Serve until the process is ended."""
    forwarder = Forwarder(upstream, s3)
    forever = await http1.serve(forwarder.handle, forwarder.connections, port)
    await forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aws.fault_proxy")
    parser.add_argument("upstream", help="http://HOST:PORT")
    parser.add_argument("--s3", default="", help="http://HOST:PORT of another server for S3")
    parser.add_argument("--port", type=int, default=0, help="on loopback; 0 for a free one")
    given = parser.parse_args()
    asyncio.run(run(given.upstream, given.s3 or given.upstream, given.port))


if __name__ == "__main__":
    main()
