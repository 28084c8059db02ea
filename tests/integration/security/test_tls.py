"""Connections to ZooKeeper with TLS: whole fleets, and certificates that are not accepted."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.coordination.access import Access, Tls
from qdo.coordination.client import connect
from qdo.errors import CoordinatorTlsError, CoordinatorUnreachableError
from tests.support.processes import children, wait_until
from tests.support.security.certificates import DAY, Authority, Certificate
from tests.support.security.fleet import HANGS, SecureFleet
from tests.support.security.zookeeper import PASSWORDS, SecureZooKeeper


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["", "digest:worker", "sasl:worker", "x509:CN=client"])
def test_a_fleet_over_tls(fleet: SecureFleet, auth: str) -> None:
    """Workers and commands connect with TLS, with each kind of account.

    So does the parent: it counts an attempt of a message whose process died.
    """
    config = fleet.config(**account_settings(fleet, auth))
    with fleet.worker(config) as worker:
        fleet.process("a", 1, config)
        assert fleet.qdo("send", "a", str(HANGS), config=config).code == 0
        wait_until((fleet.folder / "hangs").exists, "the message is in flight")
        (process,) = children(worker.pid)
        os.kill(process, signal.SIGKILL)
        worker.wait_for_line("one attempt is counted")
        worker.wait_for_line("closed its session")
        fleet.process("a", 2, config)
        assert fleet.qdo("queues", config=config).code == 0
    assert fleet.done() == ["a 1", f"a {HANGS}", "a 2"]


def account_settings(fleet: SecureFleet, auth: str) -> dict[str, Any]:
    """Return the settings for an account with all rights."""
    if not auth:
        return {}
    if auth.startswith("x509:"):
        return {"acl": "required", "acl_workers": [auth]}
    return {"acl": "required", **fleet.login(auth, PASSWORDS["worker"])}


def test_the_host_must_fit_unless_told(secure_zookeeper: SecureZooKeeper, chroot: str) -> None:
    url = secure_zookeeper.url(chroot, "localhost")
    ca, own = str(secure_zookeeper.authority.path), secure_zookeeper.client
    assert "certificate" in refusal(url, Tls(ca, str(own.cert), str(own.key)))
    open_client(url, Tls(ca, str(own.cert), str(own.key), check_host=False))


def test_foreign_servers_are_refused(
    secure_zookeeper: SecureZooKeeper, chroot: str, tmp_path: Path, tls: dict[str, Any]
) -> None:
    """The worker ends with exit code 3 and one line that names the reason."""
    foreign = Authority(tmp_path)
    fleet = SecureFleet(tmp_path / "app", coordinator=secure_zookeeper.url(chroot), **tls)
    config = fleet.config(coordinator_ca=str(foreign.path), connect_seconds=2.0)
    for ended in (fleet.worker_ends(config), fleet.qdo("queues", config=config)):
        assert ended.code == 3
        assert "certificate signature failure" in ended.err or "unable to get" in ended.err


def test_an_expired_server_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    expired = authority.issue("server", -DAY)
    with tls_server(expired) as port, pytest.raises(CoordinatorTlsError) as raised:
        open_client(f"zookeeper://127.0.0.1:{port}", Tls(str(authority.path)))
    assert raised.value.details["reason"] == "certificate has expired"


def test_the_reason_survives_a_further_attempt(tmp_path: Path) -> None:
    """The time to connect is over while a second handshake gets no answer."""
    authority = Authority(tmp_path)
    expired = authority.issue("server", -DAY)
    with tls_server(expired, answers=1) as port, pytest.raises(CoordinatorTlsError):
        open_client(f"zookeeper://127.0.0.1:{port}", Tls(str(authority.path)))


@pytest.mark.parametrize("kind", ["none", "foreign", "expired"])
def test_the_server_refuses_clients(
    secure_zookeeper: SecureZooKeeper, chroot: str, tmp_path: Path, kind: str
) -> None:
    """A client without a valid certificate learns the reason."""
    own = secure_zookeeper.authority
    issuer = Authority(tmp_path) if kind == "foreign" else own
    given = issuer.issue(f"client-{kind}", datetime.timedelta(days=-1 if kind == "expired" else 1))
    files = ("", "") if kind == "none" else (str(given.cert), str(given.key))
    assert "certificate" in refusal(secure_zookeeper.url(chroot), Tls(str(own.path), *files))


def test_plain_clients_do_not_get_in(secure_zookeeper: SecureZooKeeper, chroot: str) -> None:
    with pytest.raises(CoordinatorUnreachableError):
        open_client(secure_zookeeper.url(chroot), None)


def test_answers_in_one_tls_record_arrive(tmp_path: Path) -> None:
    """The second answer is delivered although no further bytes arrive from the network."""
    authority = Authority(tmp_path)
    with tls_server(authority.issue("server")) as port:
        access = Access(Tls(str(authority.path)))
        client = connect(f"zookeeper://127.0.0.1:{port}", access=access)
        client.open(5.0)
        answers = [client.exists_async("/a"), client.exists_async("/b")]
        assert [each.get(timeout=2.0) for each in answers] == [None, None]
        client.detach()


def open_client(url: str, tls: Tls | None, timeout_seconds: float = 1.0) -> None:
    """Connect and disconnect."""
    client = connect(url, access=Access(tls))
    client.open(timeout_seconds)
    client.stop()
    client.close()


def refusal(url: str, tls: Tls) -> str:
    """Return the reason of a TLS error; a busy server may answer no handshake of one attempt."""
    reasons: list[str] = []

    def refused() -> bool:
        try:
            open_client(url, tls)
        except CoordinatorTlsError as error:
            reasons.append(error.details["reason"])
        except CoordinatorUnreachableError:
            return False
        return True

    wait_until(refused, "the server refuses the client")
    assert reasons, "the server let the client in"
    return reasons[0]


@contextlib.contextmanager
def tls_server(certificate: Certificate, answers: int = 1000) -> Iterator[int]:
    """Run a server that opens a session and answers two later requests in one TLS record.

    :param answers: connections that it answers; it stays silent on later ones.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    stopping = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, context, stopping, answers))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stopping.set()
            with contextlib.suppress(OSError):
                socket.create_connection(listener.getsockname(), timeout=1).close()
            thread.join()


def _serve(
    listener: socket.socket, context: ssl.SSLContext, stopping: threading.Event, answers: int
) -> None:
    for number in itertools.count():
        plain, _ = listener.accept()
        with contextlib.suppress(OSError), plain:
            if number >= answers:
                stopping.wait()
            if stopping.is_set():
                return
            _answer(context.wrap_socket(plain, True))


def _answer(peer: ssl.SSLSocket) -> None:
    """Open a session, answer its requests, and wait for its end."""
    with peer:
        _frame(peer)
        granted = struct.pack("!iiqi16sb", 0, 10_000, 1, 16, b"p" * 16, False)
        peer.sendall(struct.pack("!i", len(granted)) + granted)
        missing = -101
        for requests in (1, 2):  # the first one is that of `Client.open`
            xids = [struct.unpack("!i", _frame(peer)[:4])[0] for _ in range(requests)]
            answers = [struct.pack("!iiqi", 16, xid, 1, missing) for xid in xids]
            peer.sendall(b"".join(answers))
        while peer.recv(4096):
            pass


def _frame(peer: socket.socket) -> bytes:
    (size,) = struct.unpack("!i", _exactly(peer, 4))
    return _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
