"""A ZooKeeper server with TLS, which requires client certificates, and with SASL accounts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.security.certificates import Authority, Certificate
from tests.support.zookeeper import SMALL, ZooKeeperServer, free_ports

PASSWORDS = {
    name: f"marker-{name}-5c9d"
    for name in ("worker", "operator", "monitor", "sender", "other", "admin")
}
"""Accounts of SASL, with texts that must not appear anywhere."""
_PACKAGE = "org.apache.zookeeper.server"


@dataclass(frozen=True, slots=True)
class SecureZooKeeper:
    """The server, its authority, and a certificate for its clients."""

    server: ZooKeeperServer
    secure_port: int
    authority: Authority
    client: Certificate

    def url(self, chroot: str, host: str = "127.0.0.1") -> str:
        """Return the address of the port with TLS."""
        return f"zookeeper://{host}:{self.secure_port}{chroot}"

    def plain_url(self, chroot: str) -> str:
        """Return the address of the port without TLS."""
        return f"zookeeper://{self.server.address}{chroot}"

    def logs(self) -> str:
        return self.server.tail()


@contextlib.contextmanager
def secure_zookeeper_server(folder: Path, java: Sequence[str] = SMALL) -> Iterator[SecureZooKeeper]:
    """Run a server with both ports."""
    authority = Authority(folder)
    own = authority.issue("zookeeper")
    port, secure_port = free_ports(2)
    users = "\n".join(f'  user_{name}="{word}"' for name, word in PASSWORDS.items())
    jaas = folder / "jaas.conf"
    jaas.write_text(f"Server {{\n  {_PACKAGE}.auth.DigestLoginModule required\n{users};\n}};\n")
    config = (
        f"secureClientPort={secure_port}\nsecureClientPortAddress=127.0.0.1\n"
        f"serverCnxnFactory={_PACKAGE}.NettyServerCnxnFactory\n"
        f"authProvider.sasl={_PACKAGE}.auth.SASLAuthenticationProvider\n"
        f"authProvider.x509={_PACKAGE}.auth.X509AuthenticationProvider\n"
        f"ssl.keyStore.location={own.both}\nssl.keyStore.type=PEM\n"
        f"ssl.trustStore.location={authority.path}\nssl.trustStore.type=PEM\n"
        "ssl.clientAuth=need\n"
    )
    options = (*java, f"-Djava.security.auth.login.config={jaas}")
    server = ZooKeeperServer(folder / "server", port, config, options=options)
    server.start()
    try:
        server.wait_ready()
        yield SecureZooKeeper(server, secure_port, authority, authority.issue("client"))
    finally:
        server.kill()
