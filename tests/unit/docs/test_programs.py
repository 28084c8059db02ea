"""The documentation of the programs, their sample options, and their code agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from qdo.programs import archive, shell, webhook
from qdo.webhook_signatures import standard_headers, standard_key
from tests.support.doc_pages import blocks, read, table
from tests.support.paths import ROOT

SAMPLE = ROOT / "config" / "programs.env"
PROGRAMS = {
    "archive": archive.ArchiveOptions,
    "shell": shell.ShellOptions,
    "webhook": webhook.WebhookOptions,
}
OPTIONS = [(name, each) for name, kind in PROGRAMS.items() for each in dataclasses.fields(kind)]


def variable(program: str, option: dataclasses.Field[Any]) -> str:
    return f"QDO_{program.upper()}_{option.name.upper()}"


def default(option: dataclasses.Field[Any]) -> str:
    return "" if option.default is dataclasses.MISSING else str(option.default)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_is_documented_with_its_default(program: str) -> None:
    """In the table of its program, which lists nothing that does not exist."""
    found = table("programs", f"{program}-options")
    known = {variable(name, each): default(each) for name, each in OPTIONS if name == program}
    assert {name: cells[1] for name, cells in found.items()} == known
    assert list(found) == list(known)
    assert all(cells[2] for cells in found.values())


def test_the_sample_has_every_option() -> None:
    """With its meaning above it, at its default, and as a comment where it has none."""
    text = SAMPLE.read_text()
    words = " ".join(text.replace("\n# ", " ").split()).lower()
    lines = [each for each in text.splitlines() if each.lstrip("#").startswith("QDO_")]
    found = {line.lstrip("#").partition("=")[0]: line for line in lines}
    assert len(lines) == len(OPTIONS)
    for program, option in OPTIONS:
        name, preset = variable(program, option), default(option)
        line = found[name]
        assert line == f"{name}={preset}" if preset else line.startswith(f"#{name}=")
        assert option.metadata["help"].lower() in words


def test_exit_codes_of_commands_are_documented() -> None:
    """Those that have a meaning."""
    codes = {code for code in table("programs", "shell-codes") if code.isdecimal()}
    assert codes == {"0", str(shell.EX_TEMPFAIL), str(shell.EX_DATAERR)}


def test_the_receiver_of_the_page_verifies_signatures() -> None:
    """The example accepts signed requests, and nothing else."""
    (shown,) = [each for each in blocks(read("programs")) if each.language == "python"]
    names: dict[str, Any] = {}
    exec(compile(shown.text, shown.options["caption"], "exec"), names)
    secret, body = webhook.new_secret(), b'{"n": 1}'
    now = int(names["time"].time())
    keys = [standard_key(each) for each in (webhook.new_secret(), secret)]
    headers = standard_headers(keys, "a", now, body)
    assert Webhook(secret).verify(body, headers) == {"n": 1}
    assert names["is_genuine"](secret, headers, body)
    assert not names["is_genuine"](secret, headers, body + b" ")
    assert not names["is_genuine"](webhook.new_secret(), headers, body)
    old = standard_headers(keys, "a", now - 301, body)
    assert not names["is_genuine"](secret, old, body)
