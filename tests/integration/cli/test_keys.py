"""`qdo admin keys`, and commands with encrypted bodies, inside this process."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.registry import open_broker
from qdo.encoding import key_id_of
from qdo.encryption.key_ring import read_keys
from tests.support.cli import Run
from tests.support.fakes.key_files import line


@pytest.fixture(autouse=True)
def key_file(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDO_KEYS", "keys")


def listed(cli: Run) -> list[tuple[str, str, bool]]:
    """Return id, purpose and use of each key."""
    found = cli("admin", "keys", "list", "-o", "json").items()
    return [(each["id"], each["purpose"], each["in_use"]) for each in found]


def test_keys_are_made_listed_and_retired(cli: Run) -> None:
    """The steps of a rotation; the file keeps its mode, and no command shows key bytes."""
    old = cli("admin", "keys", "new").out.strip()
    assert stat.S_IMODE(os.stat("keys").st_mode) == 0o600
    new, sign = cli("admin", "keys", "new"), cli("admin", "keys", "new", "sign").out.strip()
    assert old in new.err
    new_id = new.out.strip()
    assert listed(cli) == [
        (old, "encrypt", True),
        (new_id, "encrypt", False),
        (sign, "sign", True),
    ]
    secrets = [line(key).split()[2] for key in read_keys("keys")]
    outputs = [
        cli("admin", "keys", "list"),
        cli("admin", "keys", "retire", old),
        cli("admin", "keys", "list", "-o", "json"),
    ]
    assert not any(secret in each.out + each.err for secret in secrets for each in outputs)
    assert listed(cli) == [
        (new_id, "encrypt", True),
        (sign, "sign", True),
        (old, "encrypt", False),
    ]
    assert cli("admin", "keys", "retire", old, "--delete", "--yes").code == 0
    assert [each.id for each in read_keys("keys")] == [new_id, sign]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("admin", "keys", "list"), 2),
        (("admin", "keys", "new", "decrypt"), 2),
        (("admin", "keys", "retire", "none"), 6),
        (("admin", "keys"), 2),
    ],
)
def test_mistakes_have_exit_codes(
    cli: Run, arguments: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file, an unknown purpose, an unknown key."""
    if arguments[2:] != ("list",):
        cli("admin", "keys", "new")
    assert cli(*arguments).code == code
    monkeypatch.setenv("QDO_KEYS", "")
    assert cli("admin", "keys", "new").code == 2


def test_send_encrypts_single_bodies_and_files(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON, bytes and lines."""
    cli("admin", "keys", "new")
    monkeypatch.setenv("QDO_ENCRYPT", "bodies")
    Path("lines").write_text('{"n": 1}\n{"n": 2}\n')
    assert cli("send", "q", '{"n": 0}').code == 0
    assert cli("send", "q", "--file", "lines").code == 0
    assert cli("send", "q", "raw", "--raw").code == 0
    broker = open_broker("sqlite:qdo-data/messages.db", "a")
    reader = broker.reader("q", 0)
    bodies = [row[1] for row in reader.fetch(10)]
    broker.close()
    assert len(bodies) == 4
    assert all(map(key_id_of, bodies))


def test_send_in_clear_is_no_fallback(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a usable key nothing is sent."""
    cli("admin", "keys", "new", "sign")
    monkeypatch.setenv("QDO_ENCRYPT", "bodies")
    assert cli("send", "q", "1").code == 2
    os.chmod("keys", 0o644)
    assert cli("send", "q", "1").code == 2
    assert not Path("qdo-data").exists()


def test_dead_letters_are_shown_decrypted(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key; without it, as ciphertext with the reason. A retry needs no key."""
    cli("admin", "keys", "new")
    monkeypatch.setenv("QDO_ENCRYPT", "bodies")
    cli("send", "q", '{"n": "MARKER"}')
    broker = open_broker("sqlite:qdo-data/messages.db", "a")
    reader = broker.reader("q", 0)
    ((position, body, key, headers),) = reader.fetch(1)
    broker.dead_letters.store(
        DeadLetterRecord("q", position, body, key, headers, "E: e", "", 1, "w", 1)
    )
    broker.close()
    id = str(position)
    assert "MARKER" in cli("dead-letters", "show", "q", id).out
    assert json.loads(cli("dead-letters", "export").out)["body"] == {"n": "MARKER"}
    monkeypatch.setenv("QDO_KEYS", "")
    monkeypatch.setenv("QDO_ENCRYPT", "")
    assert "MARKER" not in cli("dead-letters", "show", "q", id).out
    shown = json.loads(cli("dead-letters", "export").out)
    assert "body" not in shown
    assert {"body_base64", "body_error"} <= shown.keys()
    assert cli("dead-letters", "retry", "q", id).code == 0
