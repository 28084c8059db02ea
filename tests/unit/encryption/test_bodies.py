"""Encrypted bodies: what is bound, hidden and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdo.brokers.kinesis.codec import decoded as kinesis_decoded
from qdo.brokers.kinesis.codec import encoded as kinesis_encoded
from qdo.encoding import CONTENT_TYPE, RAW, encoded, key_id_of, parsed, with_body_kind
from qdo.encryption.bodies import BodyVault
from qdo.encryption.key_ring import KeyRing
from qdo.errors import BodyAuthenticationError, ClearBodyError, KeyMissingError, SettingsError
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of
from tests.support.fakes.key_files import key, write_keys

K1, K2 = key("k1"), key("k2")


def vault(folder: Path, *keys: object, app: str = "a", **options: bool) -> BodyVault:
    path = write_keys(folder / "keys", *keys)  # type: ignore[arg-type]
    return BodyVault(KeyRing(path), lambda queue: f"{app}\0{queue}", **options)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"n": 1}, None),
        ({"n": 1}, {"trace": "x"}),
        (b"\x00\xff", None),
        (b"", {"trace": "x"}),
        (b"png", {CONTENT_TYPE: "image/png", "trace": "x"}),
        (b"{}", {CONTENT_TYPE: "application/json"}),
    ],
)
def test_body_and_headers_come_back(tmp_path: Path, body: object, headers: dict[str, str]) -> None:
    """The content type of bytes is encrypted, too; other headers are not."""
    made = vault(tmp_path, K1)
    stored = encoded("q", body, headers)
    sealed, clear = made.seal("q", *stored)
    assert key_id_of(sealed) == "k1"
    assert len(stored[0]) == 0 or stored[0] not in sealed
    assert "image" not in (clear or "")
    assert (parsed(clear) or {}).get("trace") == (headers or {}).get("trace")
    opened, found = made.open("q", sealed, clear)
    assert opened == stored[0]
    assert parsed(found) == parsed(stored[1])


def test_each_encryption_differs(tmp_path: Path) -> None:
    """Equal bodies cannot be recognized."""
    made = vault(tmp_path, K1)
    assert len({made.seal("q", b"1", None)[0] for _ in range(100)}) == 100


def test_the_first_key_encrypts_and_all_decrypt(tmp_path: Path) -> None:
    """As a rotation needs it."""
    old = vault(tmp_path, K1).seal("q", b"1", None)
    made = vault(tmp_path, K2, K1)
    new = made.seal("q", b"2", None)
    assert (key_id_of(old[0]), key_id_of(new[0])) == ("k1", "k2")
    assert (made.open("q", *old)[0], made.open("q", *new)[0]) == (b"1", b"2")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """It is another error than a changed body: the message must wait."""
    sealed, headers = vault(tmp_path, K2).seal("q", b"1", None)
    with pytest.raises(KeyMissingError) as caught:
        vault(tmp_path, K1).open("q", sealed, headers)
    assert (caught.value.details["key"], caught.value.details["queue"]) == ("k2", "q")


def test_a_body_is_bound_to_its_queue_and_app(tmp_path: Path) -> None:
    """Moved to another place it cannot be decrypted."""
    sealed, headers = vault(tmp_path, K1).seal("q", b"1", None)
    for app, queue in (("a", "p"), ("b", "q"), ("a\0q", ""), ("", "a\0q")):
        with pytest.raises(BodyAuthenticationError):
            vault(tmp_path, K1, app=app).open(queue, sealed, headers)


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    """And each missing one."""
    made = vault(tmp_path, K1)
    sealed, headers = made.seal("q", b'{"n":1}', None)
    for index in range(len(b"q1.k1."), len(sealed)):
        changed = bytearray(sealed)
        changed[index] ^= 1
        with pytest.raises(BodyAuthenticationError):
            made.open("q", bytes(changed), headers)
    with pytest.raises(BodyAuthenticationError):
        made.open("q", sealed[:-1], headers)


def test_a_body_in_clear_is_accepted_or_refused(tmp_path: Path) -> None:
    """Bytes that begin like an encrypted body are in clear if a header says that they are bytes."""
    raw = '{"content-type": "text/plain"}'
    sealed = vault(tmp_path, K1).seal("q", b"1", None)[0]
    for body, headers in ((b"1", None), (b"q1.", None), (sealed, raw)):
        assert vault(tmp_path, K1).open("q", body, headers) == (body, headers)
        with pytest.raises(ClearBodyError):
            vault(tmp_path, K1, required=True).open("q", body, headers)


def test_codecs_leave_encrypted_bodies_as_they_are(tmp_path: Path) -> None:
    """They are not taken for bytes of another program, which would get a content type."""
    sealed, _ = vault(tmp_path, K1).seal("q", b"1", None)
    assert with_body_kind(sealed, None) is None
    assert with_body_kind(b"q1.k1.", None) == f'{{"{CONTENT_TYPE}":"{RAW}"}}'
    for headers in (None, '{"a":"b"}'):
        assert kinesis_decoded(kinesis_encoded(sealed, headers, "q")) == (sealed, headers)


def test_the_vault_of_kinesis_is_bound_to_the_stream(tmp_path: Path) -> None:
    """A shard is not known when a message is sent, and any app may read the stream."""
    keys = write_keys(tmp_path / "keys", K1)

    def made(app: str, broker: str) -> BodyVault:
        found = vault_of(Settings(broker=broker, keys=keys), app, str)
        assert found is not None
        return found

    sealed, _ = made("a", "kinesis://eu-west-1/s").seal("s", b"1", None)
    assert made("b", "kinesis://eu-west-1/s").open("shardId-0", sealed, None)[0] == b"1"
    for app, broker in (("a", "kinesis://eu-west-1/other"), ("a", "sqs://eu-west-1/a")):
        with pytest.raises(BodyAuthenticationError):
            made(app, broker).open("s", sealed, None)


def test_no_vault_without_keys() -> None:
    """Apps without keys pay nothing, and cannot ask for encryption."""
    assert vault_of(Settings(), "a", str) is None
    for wish in ({"encrypt": ("bodies",)}, {"require_encryption": True}):
        with pytest.raises(SettingsError) as caught:
            Settings(**wish)
        assert caught.value.details["name"] in wish
    with pytest.raises(SettingsError):
        Settings(keys="k", encrypt=("headers",))


def test_a_key_file_without_a_key_to_encrypt_fails_at_once(tmp_path: Path) -> None:
    """Not at the first message."""
    keys = write_keys(tmp_path / "keys", key("s", "sign"))
    assert vault_of(Settings(keys=keys), "a", str) is not None
    with pytest.raises(SettingsError):
        vault_of(Settings(keys=keys, encrypt=("bodies",)), "a", str)
