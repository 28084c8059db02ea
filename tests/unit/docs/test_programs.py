"""The documentation of the programs, their sample options, and their code agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from qdo.programs import archive, shell, webhook
from qdo.signatures import standard_headers, standard_key
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


@pytest.mark.parametrize(("program", "option"), OPTIONS, ids=lambda each: str(each)[:12])
def test_every_option_is_documented_with_its_default(
    program: str, option: dataclasses.Field[Any]
) -> None:
    """In the table of its program."""
    cells = table("programs", f"{program}-options")[variable(program, option)]
    assert cells[1] == default(option)
    assert cells[2]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_other_option_is_documented(program: str) -> None:
    """The tables list nothing that does not exist."""
    known = [variable(name, each) for name, each in OPTIONS if name == program]
    assert [*table("programs", f"{program}-options")] == known


@pytest.mark.parametrize(("program", "option"), OPTIONS, ids=lambda each: str(each)[:12])
def test_the_sample_has_every_option(program: str, option: dataclasses.Field[Any]) -> None:
    """With its meaning above it, at its default, and as a comment where it has none."""
    lines = SAMPLE.read_text().splitlines()
    name, preset = variable(program, option), default(option)
    (line,) = [each for each in lines if each.lstrip("#").startswith(f"{name}=")]
    assert line == f"{name}={preset}" if preset else line.startswith("#")
    words = " ".join(SAMPLE.read_text().replace("\n# ", " ").split()).lower()
    assert option.metadata["help"].lower() in words


def test_the_sample_has_no_other_option() -> None:
    """A copy of the sample starts without an error."""
    lines = [each.lstrip("#") for each in SAMPLE.read_text().splitlines()]
    named = {each.partition("=")[0] for each in lines if each.startswith("QDO_")}
    assert named == {variable(name, each) for name, each in OPTIONS}


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
