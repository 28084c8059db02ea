"""Certificates for TLS in tests, from authorities that the tests make."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its private key, in PEM files.

    :ivar both: a file with the key and the certificate, as ZooKeeper reads them.
    """

    cert: Path
    key: Path
    both: Path


class Authority:
    """A certificate authority of a test.

    :ivar path: PEM file with its certificate.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._certificate = (
            _builder(self._name, self._key, DAY)
            .issuer_name(self._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, ends_in: datetime.timedelta = DAY, host: str = "127.0.0.1"
    ) -> Certificate:
        """Return a certificate for a name and a host's address; a negative time: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = [x509.IPAddress(ipaddress.ip_address(host))]
        certificate = (
            _builder(_named(name), key, ends_in)
            .issuer_name(self._name)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        files = Certificate(*(self._folder / f"{name}-{kind}.pem" for kind in ("c", "k", "both")))
        text = certificate.public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        files.cert.write_bytes(text)
        for path, data in ((files.key, secret), (files.both, secret + text)):
            path.touch(0o600)
            path.write_bytes(data)
        return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * DAY)
        .not_valid_after(now + ends_in)
    )
