"""Settings: sources, precedence, limits, and the advice given when something is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.errors import PolicyError, SettingsError, UnknownSettingError, UsageError
from qdo.settings.settings import Declaration, Settings, declarations
from qdo.settings.sources import (
    SPECIAL_PREFIXES,
    SPECIAL_VARIABLES,
    is_service_variable,
    load,
)
from tests.support.paths import ROOT

SAMPLE = ROOT / "config" / "qdo.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "qdo.toml"


def test_defaults_need_no_server() -> None:
    """Without any source, broker and coordinator are files below the current folder."""
    settings = load(environ={})
    assert settings.broker == "sqlite:qdo-data/messages.db"
    assert settings.coordinator == "sqlite:qdo-data/coordination.db"
    assert settings.origin("broker") == "default"
    assert settings == Settings()


def test_each_source_wins_over_the_one_before(file: Path) -> None:
    """Flags win over the environment, that over the file, that over code, that over defaults."""
    file.write_text('app = "file"\nconcurrency = 2\nfetch = 2\nattempts = 2\n')
    settings = load(
        flags={"fetch": "4", "job": None},
        environ={"QDO_CONCURRENCY": "3", "QDO_FETCH": "3"},
        config=str(file),
        defaults={"attempts": 1, "processes": 1, "app": "code"},
        defaults_origin="App('code')",
    )
    assert (settings.app, settings.attempts, settings.processes) == ("file", 2, 1)
    assert (settings.concurrency, settings.fetch) == (3, 4)
    assert settings.origin("app") == str(file)
    assert settings.origin("processes") == "App('code')"
    assert settings.origin("concurrency") == "QDO_CONCURRENCY"
    assert settings.origin("fetch") == "--fetch"
    assert settings.origin("job") == "default"


def test_the_environment_can_name_the_file(file: Path) -> None:
    """QDO_CONFIG names the file; a flag names another one."""
    file.write_text("fetch = 7")
    assert load(environ={"QDO_CONFIG": str(file)}).fetch == 7
    other = file.with_name("other.toml")
    other.write_text("fetch = 8")
    assert load(environ={"QDO_CONFIG": str(file)}, config=str(other)).fetch == 8


def test_unknown_variable() -> None:
    """An unknown QDO_* variable is an error, and the nearest known one is named."""
    for name, hint in (("QDO_CONCURENCY", " (did you mean 'QDO_CONCURRENCY'?)"), ("QDO_XYZZY", "")):
        with pytest.raises(UnknownSettingError) as caught:
            load(environ={name: "1"})
        head = f"unknown setting {name!r} in the environment{hint}; "
        assert str(caught.value) == head + "`qdo config` lists every setting"


def test_special_and_foreign_variables_are_no_settings() -> None:
    """Variables with other uses, and everybody else's, are left alone."""
    foreign = {"QDOX": "1", "PATH": "/bin"}
    special = dict.fromkeys(SPECIAL_VARIABLES - {"QDO_CONFIG"}, "x")
    assert load(environ={**foreign, **special}) == Settings()


def service_variables(service: str) -> dict[str, str]:
    """Return what Kubernetes sets for a service with a named port."""
    name = service.upper().replace("-", "_")
    address = {"PROTO": "tcp", "PORT": "80", "ADDR": "10.0.0.1"}
    return {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": "80",
        f"{name}_SERVICE_PORT_HTTP": "80",
        f"{name}_PORT": "tcp://10.0.0.1:80",
        f"{name}_PORT_80_TCP": "tcp://10.0.0.1:80",
        **{f"{name}_PORT_80_TCP_{part}": text for part, text in address.items()},
        f"{name}_PORT_53_UDP": "udp://10.0.0.1:53",
    }


@pytest.mark.parametrize("service", ["qdo", "qdo-web", "qdo-broker", "qdo-7-eu-west"])
def test_variables_of_a_kubernetes_service_are_ignored(service: str) -> None:
    """They are in every pod beside a service whose name begins with qdo."""
    assert load(environ=service_variables(service)) == Settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("QDO_PORT", "8080"),
        ("QDO_SERVICE_HOSTS", "10.0.0.1"),
        ("QDO_SERVICE", "x"),
        ("QDO_PORT_80", "80"),
        ("QDO_SERVICE_PORT", "http"),
        ("QDO_BURTS", "1"),
        ("QDO_BROKERS", "tcp://10.0.0.1:80"),
    ],
)
def test_typos_beside_kubernetes_variables_are_found(variable: str, value: str) -> None:
    """A variable is ignored only if its whole form is that of Kubernetes."""
    with pytest.raises(UnknownSettingError) as caught:
        load(environ={**service_variables("qdo"), variable: value})
    assert caught.value.details["name"] == variable


def test_no_setting_looks_like_a_variable_of_kubernetes() -> None:
    """Otherwise a service could set it."""
    assert declarations()
    for each in declarations():
        for value in ("1", "tcp://10.0.0.1:80"):
            assert not is_service_variable(each.variable, value)


def test_unknown_name_in_file(file: Path) -> None:
    """The file and the nearest setting are named."""
    file.write_text("[worker]\nfetch = 1")
    with pytest.raises(UnknownSettingError, match=r"'worker' in .*qdo.toml"):
        load(environ={}, config=str(file))
    file.write_text("concurency = 1")
    with pytest.raises(UnknownSettingError, match="did you mean 'concurrency'"):
        load(environ={}, config=str(file))


@pytest.mark.parametrize("content", [b"app = ", b'app = "a"\napp = "b"', b'app = "\xff"'])
def test_file_that_is_no_toml(file: Path, content: bytes) -> None:
    """A broken file is an error that names the file."""
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"qdo\.toml must be TOML"):
        load(environ={}, config=str(file))


def test_missing_file() -> None:
    """A file that is named must exist."""
    with pytest.raises(SettingsError, match=r"config: /no/such\.toml: No such file"):
        load(environ={}, config="/no/such.toml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("concurrency", "many"),
        ("concurrency", "1.5"),
        ("concurrency", 2.0),
        ("concurrency", True),
        ("concurrency", 0),
        ("checkpoint_seconds", "soon"),
        ("checkpoint_seconds", "nan"),
        ("checkpoint_seconds", float("inf")),
        ("checkpoint_seconds", -1),
        ("burst", "yes"),
        ("log_level", "loud"),
        ("app", "a/b"),
        ("app", 5),
        ("job", "module.function"),
        ("queues", ""),
        ("queues", "a,,b"),
        ("queues", 3),
        ("exclude", ["a", 3]),
        ("namespace", "qdo"),
        ("namespace", "/a//b"),
        ("broker", "redis://localhost"),
        ("broker", "messages.db"),
        ("broker", "sqlite:"),
        ("broker", "sqlite:data/"),
        ("broker", "sqlite://messages.db"),
        ("broker", "sqlite::memory:"),
        ("broker", "sqs://eu-west-1/a-?wait_second=1"),
        ("broker", "sqs:eu-west-1"),
        ("broker", "kinesis://eu-west-1/s?reads_per_second=9"),
        ("broker", "zookeeper://localhost"),
        ("coordinator", "zookeeper://"),
        ("coordinator", "zookeeper://a,b:99999"),
        ("coordinator", "zookeeper://a//b"),
        ("coordinator", "etcd://a"),
        ("coordinator", "postgresql://user:secret@host/db"),
        ("coordinator", "postgresql://host/db?chrot=/a"),
        ("coordinator", "zookeeper://a/x?tls=1"),
        *(("zone", bad) for bad in ("a b", "a/b", "x" * 101, "\x1b[31m", "zone\n")),
        *(("address", bad) for bad in ("a b", "x" * 201, "\x1b[31m", "zone\n")),
        ("http", "127.0.0.1:65536"),
        ("http", "9180"),
        ("http", "localhost"),
        ("http", "[::1]"),
        ("http", "::1:80"),
    ],
)
def test_rejects_invalid_values(name: str, value: object) -> None:
    """Types, limits and addresses are checked; the error names the setting."""
    with pytest.raises(SettingsError) as caught:
        Settings(**{name: value})
    assert caught.value.details["name"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("coordinator", "zookeeper://user:secret@zk1:2181"),
        ("coordinator", "zookeeper://zk1,user:secret@zk2/x"),
        ("coordinator", "zookeeper://user:/secret?,@zk1"),
        ("coordinator", "etcd://user:secret@host"),
        ("broker", "redis://user:secret@host"),
        ("broker", "sqs://KEY:/secret@eu-west-1/a-"),
        ("broker", "sqs://KEY:secret@eu-west-1/a-"),
        ("broker", "kinesis://eu-west-1/s?endpoint=http://user:secret@host"),
        ("broker", "sqs://eu-west-1/a-?endpoint=http://user:secret@host#x"),
    ],
)
def test_errors_do_not_show_passwords(name: str, value: str) -> None:
    """They end in logs and bug reports."""
    with pytest.raises(SettingsError) as caught:
        Settings(**{name: value})
    assert caught.value.details["name"] == name
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "address", "correction"),
    [
        ("broker", "postgres://web:secret@db/shop", "; write postgresql://***@db/shop"),
        ("broker", "sqlite3:/var/lib/qdo.db", "; write sqlite:/var/lib/qdo.db"),
        ("history", "postgres://db/shop", "; write postgresql://db/shop"),
        ("coordinator", "Zookeeper://zk1", "; write zookeeper://zk1"),
        ("broker", "redis://host", "; for another kind of broker, install its package"),
    ],
)
def test_a_similar_scheme_is_corrected(name: str, address: str, correction: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**{name: address})
    assert caught.value.details["reason"].endswith(correction)


def test_a_wrong_value_names_its_origin() -> None:
    """The error names the place where the setting was made."""
    with pytest.raises(SettingsError, match=r"from 1 to 100000 jobs \(from QDO_CONCURRENCY\)$"):
        load(environ={"QDO_CONCURRENCY": "0"})


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://zk1",
        "zookeeper://zk1:2181,zk2:2181,10.0.0.3:2181/some/chroot",
        "zookeeper://[::1]:2181",
        "sqlite:coordination.db",
        "sqlite:/var/lib/qdo/coordination.db",
        "postgresql://user@one,two/db?schema=own&chroot=/a/b&sslmode=verify-full",
    ],
)
def test_coordinator_addresses(url: str) -> None:
    """Every documented form of an address is taken."""
    assert Settings(coordinator=url).coordinator == url


def test_the_coordinator_is_in_the_database_of_the_broker() -> None:
    """Unless it is set, whatever it is set to, and whatever overrides the broker."""
    one, two = "postgresql://one/db", "postgresql://two/db"
    settings = load(environ={"QDO_BROKER": one})
    assert settings.coordinator == one
    assert settings.origin("coordinator") == "default"
    assert settings.merged({"attempts": 2}, "test").coordinator == one
    assert settings.merged({"broker": two}, "test").coordinator == two
    assert settings.merged({"broker": "sqlite:m.db"}, "test").coordinator == Settings().coordinator
    assert settings.merged({"coordinator": two}, "test").coordinator == two
    file = "sqlite:qdo-data/coordination.db"
    for given in (file, two):
        settings = load(environ={"QDO_BROKER": one, "QDO_COORDINATOR": given})
        assert settings.coordinator == given
        assert settings.merged({"broker": two}, "test").coordinator == given


def test_back_off_limits_must_fit() -> None:
    """The longest pause is not shorter than the first one."""
    with pytest.raises(SettingsError, match="backoff_max_seconds"):
        Settings(backoff_seconds=5, backoff_max_seconds=1)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("False", False)])
def test_booleans_from_the_environment(text: str, value: bool) -> None:
    """true, false, 1 and 0 are understood."""
    assert load(environ={"QDO_BURST": text}).burst is value


def test_settings_survive_being_handed_over() -> None:
    """A child process gets the same settings, and still knows where each came from."""
    settings = load(flags={"fetch": 5}, environ={"QDO_APP": "a"})
    again = Settings(**json.loads(json.dumps(dataclasses.asdict(settings))))
    assert again == settings
    assert again.origins == settings.origins


def test_underlaid_values_hold_where_nobody_set_anything() -> None:
    """Values of an app in code give way to file, environment and flags."""
    settings = load(environ={"QDO_FETCH": "1000"})
    laid = settings.underlaid({"fetch": 5, "attempts": 5}, "App('a')")
    assert (laid.fetch, laid.attempts) == (1000, 5)


def test_globs_are_a_list_or_a_text_with_commas(file: Path) -> None:
    """Files and flags have lists, the environment has only text."""
    file.write_text('queues = ["mail-*", "a,b"]')
    settings = load(environ={"QDO_EXCLUDE": "x*, y*"}, config=str(file))
    assert settings.queues == ("mail-*", "a,b")
    assert settings.exclude == ("x*", "y*")
    assert Settings(**json.loads(json.dumps(dataclasses.asdict(settings)))) == settings


@pytest.mark.parametrize("name", ["queues", "exclude"])
def test_too_many_globs_are_refused(name: str) -> None:
    """Other workers would take a longer list for every queue."""
    globs = tuple(f"{number:014}-*" for number in range(1024))
    Settings(**{name: globs})
    with pytest.raises(SettingsError, match=f"setting {name}"):
        Settings(**{name: (*globs, "x")})


@pytest.mark.parametrize(
    ("queues", "exclude"), [("*", "*"), ("a*", "x,*"), ("a*,b", "b,a*"), ("a*", "a*")]
)
def test_a_worker_that_takes_nothing_is_refused(queues: str, exclude: str) -> None:
    """It would register, wait, and process nothing."""
    with pytest.raises(SettingsError, match="setting exclude"):
        Settings(queues=queues, exclude=exclude)  # type: ignore[arg-type]


def test_sample_file_holds_every_setting_at_its_default(file: Path) -> None:
    """config/qdo.toml is complete, in the order of declaration, when its settings are set."""
    lines = SAMPLE.read_text().splitlines()
    found = [line.removeprefix("# ") for line in lines if re.match(r"# [a-z_]+ = ", line)]
    assert [line.partition(" = ")[0] for line in found] == [each.name for each in declarations()]
    file.write_text("\n".join(found))
    assert load(environ={}, config=str(file)) == Settings()


def test_sample_file_overrides_nothing_in_the_code() -> None:
    """Used as it is, it leaves the app's own settings in force."""
    app = App("welcome", attempts=2, backoff_seconds=0.05)
    used = app.use(load(environ={}, config=str(SAMPLE)))
    assert (used.attempts, used.backoff_seconds) == (2, 0.05)


def test_sample_file_explains_every_setting() -> None:
    """Above each setting is its description, in the words of its declaration."""
    words = " ".join(SAMPLE.read_text().replace("\n# ", " ").split()).lower()
    assert declarations()
    for each in declarations():
        assert each.help.lower() in words, each.name


def test_every_setting_has_a_unit_or_needs_none() -> None:
    """Numbers state their unit; durations end in _seconds."""
    numbers = [each for each in declarations() if each.kind in ("int", "float")]
    assert numbers
    for each in numbers:
        assert each.unit, each.name
        assert each.name.endswith("_seconds") == (each.unit == "seconds"), each.name


@pytest.mark.parametrize("broker", ["sqs://eu-west-1/a-", "kinesis://eu-west-1/stream"])
@pytest.mark.parametrize("name", ["dead_letter_limit", "dead_letter_retention_seconds"])
def test_dead_letters_that_qdo_cannot_limit(broker: str, name: str) -> None:
    """Their stores delete by age, which the error says."""
    with pytest.raises(SettingsError) as caught:
        Settings(broker=broker, **{name: 5})
    assert caught.value.details["name"] == name
    assert Settings(**{name: 5}).values()[name] == 5


TEXTS = (
    *("7", "true", "x", "x:y", "sqlite:x.db", "/x", "127.0.0.1:1", "digest:x", "sasl:x"),
    *("ca", "account", "bodies", "errors", "thread", "debug", "json"),
)
"""Of these each variable takes one."""


@pytest.mark.parametrize("setting", declarations(), ids=lambda setting: setting.name)
def test_a_variable_sets_its_setting_and_nothing_else(setting: Declaration) -> None:
    accepted = []
    for text in TEXTS:
        with contextlib.suppress(SettingsError):
            accepted.append(load(environ={"QDO_KEYS": "keys", setting.variable: text}))
    if setting.name == "policies":  # tables
        assert not accepted
        return
    found = next(each for each in accepted if getattr(each, setting.name) != setting.default)
    assert found.origin(setting.name) == setting.variable
    others = Settings(keys="keys").values() | {setting.name: getattr(found, setting.name)}
    assert found.values() == others


def test_no_code_reads_the_variable_of_a_setting() -> None:
    """A variable with another purpose has a name that no setting has."""
    files = [*(ROOT / "qdo").rglob("*.py"), *(ROOT / "workers").glob("*.py")]
    named = {
        name
        for path in files
        for name in re.findall(r"""["'](QDO_[A-Z_]+)["']""", path.read_text())
    }
    others = {name for name in named if not name.startswith(SPECIAL_PREFIXES)}
    assert others - {"QDO_APP"} == SPECIAL_VARIABLES  # the example of a docstring
    assert not SPECIAL_VARIABLES & {each.variable for each in declarations()}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"attempts": 3}, "queues"),
        ({"queues": "q"}, "attempts"),
        ({"queues": "q", "then": "blok"}, "did you mean 'block'"),
        ({"queues": "q", "atempts": 3}, "did you mean 'attempts'"),
        ({"queues": "q", "attempts": 0}, "attempts"),
        ({"queues": "q", "rules": [{"exception": "ValueError"}]}, "attempts"),
        ({"queues": "q", "rules": [{"attempts": 1}]}, "MODULE:NAME"),
        ({"queues": "q", "rules": 3}, "rules"),
        ({"queues": "q", "backoff_seconds": 9, "backoff_max_seconds": 3}, "backoff_max_seconds"),
    ],
)
def test_a_wrong_table_is_refused_when_settings_are_read(table: dict[str, Any], words: str) -> None:
    """By the parent too, which imports nothing of the app."""
    with pytest.raises(UsageError, match=words):
        Settings(app="a", policies=[table])  # type: ignore[arg-type]


def test_tables_of_the_same_glob_are_refused() -> None:
    """Neither of them could take precedence."""
    table = {"queues": "q", "attempts": 3}
    with pytest.raises(PolicyError, match="'q'"):
        Settings(app="a", policies=[table, table])  # type: ignore[arg-type]


def test_the_environment_cannot_express_policies() -> None:
    """The error names the place for them."""
    with pytest.raises(UsageError, match=r"\[\[policies\]\]"):
        load(environ={"QDO_POLICIES": "pay-*"})


def test_equal_settings_have_one_digest() -> None:
    digest = Settings(app="shop").digest()
    assert Settings(app="shop", origins={"app": "QDO_APP"}).digest() == digest
    assert Settings(app="shop", attempts=3).digest() != digest


def test_a_process_may_say_where_it_is() -> None:
    settings = Settings(zone="eu-west_1.a", address="[::1]:80/questions")
    assert (settings.zone, settings.address) == ("eu-west_1.a", "[::1]:80/questions")
