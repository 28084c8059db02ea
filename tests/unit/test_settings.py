"""Settings: sources, precedence, limits, and the advice given when something is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qdo.errors import SettingsError, UnknownSettingError
from qdo.settings import SPECIAL_VARIABLES, Settings, declarations, load

SAMPLE = Path(__file__).parents[2] / "config" / "qdo.toml"


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


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"QDO_CONCURENCY": "1"},
            "unknown setting 'QDO_CONCURENCY' in the environment (did you mean "
            "'QDO_CONCURRENCY'?); `qdo config` lists every setting",
        ),
        (
            {"QDO_XYZZY": "1"},
            "unknown setting 'QDO_XYZZY' in the environment; `qdo config` lists every setting",
        ),
    ],
)
def test_unknown_variable(environ: dict[str, str], message: str) -> None:
    """An unknown QDO_* variable is an error, and the nearest known one is named."""
    with pytest.raises(UnknownSettingError) as caught:
        load(environ=environ)
    assert str(caught.value) == message


def test_special_and_foreign_variables_are_no_settings() -> None:
    """Variables with other uses, and everybody else's, are left alone."""
    foreign = {"QDO_TEST_AWS": "1", "QDOX": "1", "PATH": "/bin"}
    special = dict.fromkeys(SPECIAL_VARIABLES - {"QDO_CONFIG"}, "x")
    assert load(environ={**foreign, **special}) == Settings()


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
    with pytest.raises(SettingsError, match=r"setting config: .*qdo\.toml is no TOML file: "):
        load(environ={}, config=str(file))


def test_missing_file() -> None:
    """A file that is named must exist."""
    with pytest.raises(SettingsError, match=r"config: /no/such\.toml: No such file"):
        load(environ={}, config="/no/such.toml")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("concurrency", "many", "'many' is no whole number"),
        ("concurrency", "1.5", "'1.5' is no whole number"),
        ("concurrency", 2.0, "2.0 is no whole number"),
        ("concurrency", True, "True is no whole number"),
        ("concurrency", 0, "0 is not from 1 to 100000 jobs"),
        ("checkpoint_seconds", "soon", "'soon' is no number of seconds"),
        ("checkpoint_seconds", "nan", "nan is not from 0.001 to 3600 seconds"),
        ("checkpoint_seconds", float("inf"), "inf is not from 0.001 to 3600 seconds"),
        ("checkpoint_seconds", -1, "-1.0 is not from 0.001 to 3600 seconds"),
        ("burst", "yes", "'yes' is no true or false"),
        ("log_level", "loud", "'loud' is none of debug, info, warning, error"),
        ("app", "a/b", "'a/b' cannot be a znode name: it holds a '/'"),
        ("app", 5, "5 is no text"),
        ("job", "module.function", "'module.function' is not of the form MODULE:NAME"),
        ("queues", "", "there is no glob: * stands for every queue"),
        ("queues", "a,,b", "'a, , b' has an empty glob"),
        ("queues", 3, "3 is no list of globs"),
        ("exclude", ["a", 3], "is no list of globs"),
        ("namespace", "qdo", "'qdo' is no absolute znode path such as /a/b"),
        ("namespace", "/a//b", "'/a//b' is no absolute znode path such as /a/b"),
        ("broker", "redis://localhost", "is no address that is known here: sqlite:PATH"),
        ("broker", "messages.db", "is no address that is known here: sqlite:PATH"),
        ("broker", "sqlite:", "'sqlite:' names no file"),
        ("broker", "sqlite:data/", "'sqlite:data/' names no file"),
        ("broker", "sqlite://messages.db", "is no path of a file"),
        ("broker", "sqlite::memory:", "is no path of a file"),
        ("broker", "sqs://eu-west-1/a-?wait_second=1", "did you mean 'wait_seconds'?"),
        ("broker", "sqs:eu-west-1", "is no region such as eu-west-1"),
        ("broker", "kinesis://eu-west-1/s?reads_per_second=9", "no number from 0.01 to 5"),
        ("broker", "zookeeper://localhost", "is no address that is known here"),
        ("coordinator", "zookeeper://", "'' is no HOST or HOST:PORT"),
        ("coordinator", "zookeeper://a,b:99999", "'b:99999' is no HOST or HOST:PORT"),
        ("coordinator", "zookeeper://a//b", "'//b' is no path for a chroot"),
        ("coordinator", "etcd://a", "is no address that is known here: sqlite:PATH or zookeeper"),
    ],
)
def test_values_that_will_not_do(name: str, value: object, reason: str) -> None:
    """Type, limits and addresses are checked; the message names setting and value."""
    with pytest.raises(SettingsError) as caught:
        Settings(**{name: value})
    assert str(caught.value).startswith(f"setting {name}: ")
    assert reason in str(caught.value)


def test_a_wrong_value_names_its_origin() -> None:
    """Who must act is told where to."""
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
    ],
)
def test_coordinator_addresses(url: str) -> None:
    """Every documented form of an address is taken."""
    assert Settings(coordinator=url).coordinator == url


def test_back_off_limits_must_fit() -> None:
    """The longest pause is not shorter than the first one."""
    with pytest.raises(SettingsError, match=r"backoff_max_seconds: 1 is less than backoff_seconds"):
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
    """What an app sets in code gives way to file, environment and flags."""
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


@pytest.mark.parametrize(
    ("queues", "exclude"), [("*", "*"), ("a*", "x,*"), ("a*,b", "b,a*"), ("a*", "a*")]
)
def test_a_worker_that_takes_nothing_is_refused(queues: str, exclude: str) -> None:
    """It would register, wait, and process nothing."""
    with pytest.raises(SettingsError, match="this worker would take no queue"):
        Settings(queues=queues, exclude=exclude)  # type: ignore[arg-type]


def test_sample_file_holds_every_setting_at_its_default() -> None:
    """config/qdo.toml is complete, in the order of declaration, and changes nothing."""
    lines = SAMPLE.read_text().splitlines()
    names = [line.partition(" = ")[0] for line in lines if line and not line.startswith("#")]
    assert names == [each.name for each in declarations()]
    assert load(environ={}, config=str(SAMPLE)) == Settings()


def test_sample_file_explains_every_setting() -> None:
    """Above each setting stands what it means, in the words of its declaration."""
    words = " ".join(SAMPLE.read_text().replace("\n# ", " ").split()).lower()
    for each in declarations():
        assert each.help.lower() in words, each.name


def test_every_setting_has_a_unit_or_needs_none() -> None:
    """Numbers say what they count; durations end in _seconds."""
    numbers = [each for each in declarations() if each.kind in ("int", "float")]
    assert numbers
    for each in numbers:
        assert each.unit, each.name
        assert each.name.endswith("_seconds") == (each.unit == "seconds"), each.name
