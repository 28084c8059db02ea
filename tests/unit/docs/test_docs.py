"""The documentation and the product agree."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import click
import pytest

import qdo
from qdo import broker_errors
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.clients import make_client
from qdo.brokers.aws.errors import permission
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.brokers.sqs.url import SqsAddress, sqs_address
from qdo.cli.framework import EXIT_CODES
from qdo.cli.worker import worker as worker_command
from qdo.settings.settings import Settings, declarations
from qdo.settings.sources import SPECIAL_VARIABLES
from qdo.worker.supervisor import restarts as roster
from tests.support.commands import every_command
from tests.support.doc_pages import (
    DOCS,
    Block,
    blocks,
    blocks_in,
    check_session,
    pages,
    read,
    table,
)
from tests.support.paths import ROOT, tree_of

BROKERS = ROOT / "qdo" / "brokers"


def examples(language: str) -> pytest.MarkDecorator:
    """Run a test for each code block in a language."""
    found = blocks_in(language)
    return pytest.mark.parametrize(
        "block", [block for _, block in found], ids=[name for name, _ in found]
    )


# --- settings, exit codes, names --------------------------------------------------


@pytest.mark.parametrize("variable", sorted(SPECIAL_VARIABLES))
def test_variables_that_are_no_settings_are_documented(variable: str) -> None:
    """An operator who finds one in an environment can look it up."""
    assert f"`{variable}`" in read("configuration")


def test_the_time_until_a_hanging_worker_is_killed_is_documented() -> None:
    """An operator has to know it to set up a service."""
    text = " ".join((worker_command.epilog or "").split())
    assert f"{roster.DRAIN_MARGIN_SECONDS:g} seconds after `drain_seconds`" in text
    assert f"{roster.ABORT_SECONDS:g} seconds after the second signal" in text
    assert f"`drain_seconds` plus {roster.DRAIN_MARGIN_SECONDS:g}" in read("deployment")


def test_defaults_in_sentences_are_those_of_the_settings() -> None:
    """Such as "`max_queues`, by default 100,000", and "`concurrency` (100"."""
    defaults = {each.name: each.default for each in declarations()}
    pattern = r"`(\w+)`+(?: is)?,? (?:\(?(?:by )?default,? |\()(\d[\d,.]*\d|\d)"
    found = [each for page in pages() for each in re.findall(pattern, _text(page))]
    said = [(name, number) for name, number in found if name in defaults]
    assert len(said) > 2
    wrong = [each for each in said if float(each[1].replace(",", "")) != defaults[each[0]]]
    assert wrong == []


def test_exit_codes_in_sentences_are_those_of_the_commands() -> None:
    """A code that exists, and that of each error in the same line."""
    known = {int(code) for code in re.findall(r"^  (\d+)  ", EXIT_CODES, re.MULTILINE)}
    compared = 0
    for page in pages():
        for line in _text(page).splitlines():
            codes = set(map(int, re.findall(r"(?:exit code|code is) (\d+)", line.lower())))
            assert codes <= known, line
            for name in re.findall(r"`(\w+Error)`", line) if len(codes) == 1 else ():
                error = getattr(qdo.errors, name, None) or getattr(broker_errors, name)
                assert {error.exit_code} == codes, line
                compared += 1
    assert compared > 5


def test_the_time_of_all_attempts_is_that_of_the_pages() -> None:
    policy = Settings().default_policy
    for page in ("quickstart", "failures", "coming-from/celery"):
        assert f"{policy.attempts} attempts" in read(page)
    pauses = range(1, policy.attempts)
    least, most = (sum(policy.backoff.delay(n, chance) for n in pauses) for chance in (0.0, 1.0))
    assert f"{least / 60:.0f} minutes at least, {most / 60:.0f} at most" in read("failures")


def test_the_page_about_jobs_names_what_a_message_has() -> None:
    """Every public attribute; `limit` belongs to executors."""
    named = set(re.findall(r"\w+", " ".join(table("jobs", "message"))))
    assert named == {name for name in dir(qdo.Message) if name[0] != "_"} - {"limit"}


def test_every_extra_is_documented() -> None:
    """An extra that no page names is one that nobody needs."""
    listed = (ROOT / "setup.py").read_text(encoding="utf-8").split("extras_require={")[1]
    extras = set(re.findall(r'^ +"(\w+)": [A-Z]+,$', listed, re.MULTILINE)) - {"test", "docs"}
    assert extras == set(re.findall(r"(?:qdo|clone|\.)\[(\w+)\]", "".join(map(_text, pages()))))


def test_git_ignores_what_the_examples_create() -> None:
    """Those of README and of the page on SQS are typed in a clone."""
    text = read("README") + read("sqs")
    made = {"/hello.py", "qdo-data/", *(f"/{name}" for name in re.findall(r"> (\S+\.log)", text))}
    assert len(made) == 3
    assert made <= set((ROOT / ".gitignore").read_text().splitlines())


def test_no_page_replaces_the_installation_of_a_clone() -> None:
    """Without -e, the user's own changes would have no effect from then on."""
    for page in pages():
        assert not re.search(r"pip install ['\"]?\.", _text(page)), page


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- SQS --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "address", "in_words"),
    [
        ("sqs", SqsAddress, {"tag": "none", "bucket": "none"}),
        ("kinesis", KinesisAddress, {"dead_letters": "none"}),
    ],
)
def test_options_of_addresses_are_documented_with_defaults(
    page: str, address: type, in_words: dict[str, str]
) -> None:
    """And no others; defaults that an address cannot express are given in words."""
    told = {name: cells[1].strip("`") for name, cells in table(page, f"{page}-options").items()}
    known = {each.name: each.default for each in dataclasses.fields(address)}
    assert told.keys() == known.keys() - {"region", "prefix", "stream"}
    if page == "sqs":
        assert told.pop("dead_letters") == "PREFIX + `dead-letters"
        assert sqs_address("sqs://eu-west-1/a-").dead_letters == "a-dead-letters"
    in_words = {"endpoint": "AWS's own", **in_words}
    assert {name: told.pop(name) for name in in_words} == in_words
    assert {known[name] for name in in_words} == {None}
    assert told == {name: str(known[name]).removesuffix(".0") for name in told}


@pytest.mark.parametrize(
    ("page", "sources"),
    [
        ("sqs", {"sqs": "sqs/*.py", "s3": "aws/s3.py"}),
        ("kinesis", {"kinesis": "kinesis/*.py", "s3": "kinesis/*.py"}),
    ],
)
def test_policies_allow_only_the_used_actions(page: str, sources: dict[str, str]) -> None:
    """Every operation of the services that the code of their brokers names."""
    (policy,) = [json.loads(each.text) for each in blocks(read(page)) if each.language == "json"]
    allowed = {action for each in policy["Statement"] for action in _listed(each["Action"])}
    asked = {"sqs:TagQueue"} if page == "sqs" else set()  # to create a queue with a tag
    for service, pattern in sources.items():
        code = "\n".join(file.read_text() for file in BROKERS.glob(pattern))
        known = make_client(ServiceAddress(service, "eu-west-1")).meta.method_to_api_mapping
        used = {known[name] for name in known if re.search(rf"\b{name}\b", code)}
        asked |= {f"{service}:{permission(service, each)}" for each in used}
    assert {each for each in allowed if each.partition(":")[0] in sources} == asked


def _listed(actions: str | list[str]) -> list[str]:
    return [actions] if isinstance(actions, str) else actions


def test_every_trap_of_kinesis_has_a_test_where_the_page_says() -> None:
    """Sixteen of them, in order; the tests are numbered the same."""
    traps = table("kinesis", "kinesis-traps")
    assert list(traps) == [str(number) for number in range(1, 17)]
    numbered = (ROOT / "tests/contract/broker/test_kinesis_traps.py").read_text()
    for number, cells in traps.items():
        for place in cells[-1].split(", "):
            if place == "traps":
                assert f"def test_trap_{number}_" in numbered
            elif place == "workers":
                assert (ROOT / "tests/integration/kinesis/test_workers.py").exists()
            else:
                assert (ROOT / place.strip("`")).exists()


def test_every_trap_of_sqs_has_its_tests_or_a_reason() -> None:
    """In each file that the table names there is a test with the number of the trap."""
    traps = table("sqs", "traps")
    assert [*traps] == [str(number) for number in range(1, 21)]
    for number, cells in traps.items():
        where = cells[3]
        named = re.findall(r"`([\w/]+/test_\w+\.py)`", where)
        assert named or where.startswith("None: "), number
        for name in named:
            path = ROOT / "tests" / name
            found = re.search(
                rf"def test_trap_(\d\d_)*{int(number):02}_", path.read_text(encoding="utf-8")
            )
            assert found or where.startswith("the whole of"), (number, name)


# --- commands ---------------------------------------------------------------------


def sources() -> list[Path]:
    """Return every file with texts that users read."""
    kinds = {".py", ".html", ".js", ".toml", ".yml", ".yaml", ".json", ".sql", ".service", ".sh"}
    folders = [ROOT / each for each in ("qdo", "config", "workers")]
    return [*pages(), *(each for one in folders for each in one.rglob("*") if each.suffix in kinds)]


def test_every_page_whose_commands_run_is_run() -> None:
    """Otherwise its output ages."""
    tests = "".join(map(_text, (ROOT / "tests" / "acceptance").glob("test_*.py")))
    for page in pages():
        if any(block.options.get("class") == "run" for block in blocks(_text(page))):
            name = page.relative_to(DOCS).with_suffix("") if DOCS in page.parents else page.stem
            assert f'"{name}"' in tests


def options_of(command: click.Command) -> set[str]:
    found = (each for one in command.params for each in (*one.opts, *one.secondary_opts))
    return {"--help", *found}


def test_no_text_names_an_option_that_does_not_exist() -> None:
    """With its command: "qdo skip --force" is found, "--force" alone is not."""
    known = {f"qdo {name}": options_of(command) for name, command in every_command()}
    known["qdo-worker"] = options_of(worker_command)
    known["qdo dead-letters"] |= known["qdo dead-letters list"]
    seen, missing = 0, set()
    for path in sources():
        text = _text(path).partition("Where each command went")[0]
        text = re.sub(r'"\s*\n\s*f?"|\\\n\s*', " ", text)
        for line in re.findall(r"(?:[`\"']|\$ |\| |-> )(qdo(?:-worker)? [^`\n|>&]*)", text):
            words = line.split()
            names = (" ".join(words[:count]) for count in (4, 3, 2, 1))
            name = next((each for each in names if each in known), None)
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line) if name else ():
                seen += 1
                if option not in known[str(name)]:
                    missing.add((path.name, name, option))
    assert seen > 200
    assert missing == set()


def product_texts() -> str:
    """Return the texts of the product's code, with a number for each value."""
    found = []
    for path in (ROOT / "qdo").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]|%\.\d+f", "7", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(each, "value", None) for each in node.values)
                found.append("".join(each if isinstance(each, str) else "7" for each in parts))
    return "\n".join(found)


def test_every_word_to_look_for_in_the_log_is_in_the_log() -> None:
    """Those of grep on a page."""
    texts = product_texts()
    words = [
        word
        for page in pages()
        for pattern in re.findall(r"grep -E '([^']+)' worker.log", _text(page))
        for word in pattern.split("|")
    ]
    assert len(words) > 5
    assert [word for word in words if not re.search(word, texts)] == []


def named_commands(text: str) -> set[str]:
    """Return the commands, with one further word, that a text tells to run.

    A command follows a backtick, a shell's prompt or pipe, or an arrow; a string of code may begin
    with one. Strings that continue on the next line count as one.
    """
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    pattern = (
        r"(?:`|\$ |\| |-> |\"(?=qdo [a-z-]+(?: [a-z-]+)?\"))qdo ([a-z][a-z-]*(?: [a-z][a-z-]*)?)"
    )
    return set(re.findall(pattern, text))


def test_no_text_names_a_command_that_does_not_exist() -> None:
    """Pages, samples, errors, log lines, remedies, templates and docstrings."""
    known = dict(every_command())
    missing = set()
    for path in sources():
        text = _text(path).partition("Where each command went")[0]  # names that are gone follow
        for words in named_commands(text):
            name, _, further = words.partition(" ")
            group = isinstance(known.get(name), click.Group) and name != "dead-letters"
            if name not in known or (group and further and words not in known):
                missing.add((path.name, words))
    assert missing == set()


# --- examples ---------------------------------------------------------------------


@examples("json")
def test_json_examples_are_json(block: Block) -> None:
    """Every shown value of a node can be read."""
    assert isinstance(json.loads(block.text), dict)


@examples("python")
def test_python_examples_are_python(block: Block) -> None:
    """Every Python example compiles."""
    assert ast.parse(block.text).body


@examples("pycon")
def test_interpreter_examples_give_what_is_shown(block: Block) -> None:
    """Every shown session of the interpreter gives the shown results."""
    check_session(block.text, {})
