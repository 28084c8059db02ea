"""Live settings: their text, their precedence, and their use by one process."""

from __future__ import annotations

import sys

import pytest

from qdo.errors import (
    QdoError,
    SettingsError,
    SettingsSyntaxError,
    UnknownSettingError,
    UsageError,
)
from qdo.fleet.settings_machine import MAX_WHY_CHARACTERS, SettingsReport, SettingsVersion
from qdo.settings.live import (
    LiveSettings,
    LogLevelFollower,
    differences,
    live_names,
    overlaid,
    pinned,
    read_live,
)
from qdo.settings.settings import Settings
from qdo.settings.sources import load

CODE = "App('test')"


def version(text: str, number: int = 1) -> SettingsVersion:
    return SettingsVersion("0123456789", number, text)


def rule_of(exception: str) -> str:
    """Return live settings with a rule for an exception."""
    rule = f'[[policies.rules]]\nexception = "{exception}"\nattempts = 1'
    return f'[[policies]]\nqueues = "*"\n{rule}'


def test_values_are_converted_and_checked() -> None:
    live = read_live("attempts = 3\nbackoff_seconds = 2\n[[policies]]\nqueues = 'a*'\nattempts = 4")
    assert live["attempts"] == 3
    assert live["backoff_seconds"] == 2.0
    assert live["policies"][0].queues == "a*"


@pytest.mark.parametrize(
    "text",
    [
        "attempts = 0",
        "attempts = true",
        "attempts = 2020-01-01",
        "attempts = nan",
        "turn_seconds = -1",
        "log_level = 'loud'",
        "concurrency = 5",
        "coordinator = 'zookeeper://other'",
        "attempts 5",
        "[[policies]]\nqueues = 7",
        "a = " + "[" * 5000,
        "\x00",
    ],
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises((SettingsError, UsageError)):
        read_live(text)


def test_unknown_name_has_a_hint() -> None:
    with pytest.raises(UnknownSettingError) as caught:
        read_live("atempts = 5")
    assert "attempts" in caught.value.details["hint"]


def test_sources_override_live_settings_and_these_override_code() -> None:
    own = load(flags={"fetch": 7}, environ={"QDO_ATTEMPTS": "6"}).underlaid(
        {"backoff_seconds": 0.3, "turn_seconds": 0.5}, CODE
    )
    pins = pinned(own, CODE)
    assert pins == {"attempts": "QDO_ATTEMPTS", "fetch": "--fetch"}
    live = read_live("attempts = 2\nfetch = 3\nbackoff_seconds = 0.1")
    found = overlaid(own, live, pins, "live 4")
    assert (found.attempts, found.fetch, found.backoff_seconds) == (6, 7, 0.1)
    assert found.turn_seconds == 0.5
    assert found.origin("backoff_seconds") == "live 4"


def test_process_uses_what_it_accepts_and_returns_to_its_own() -> None:
    own = Settings(attempts=7, origins={"attempts": CODE})
    published: list[SettingsReport] = []
    live = LiveSettings(own, CODE, publish=lambda: published.append(live.report))
    seen: list[int] = []
    live.in_force.on_change(lambda settings: seen.append(settings.attempts))
    assert live.check(version("attempts = 3")) is None
    live.use(version("attempts = 3"))
    live.use(None)
    assert seen == [3, 7]
    assert live.in_use is None
    live.answer(SettingsReport(1))
    assert published == [SettingsReport(1)]


def test_contradiction_with_own_settings_is_refused() -> None:
    live = LiveSettings(Settings(backoff_max_seconds=1.0), CODE)
    reason = live.check(version("backoff_seconds = 5"))
    assert reason is not None
    assert "backoff" in reason


def test_process_can_refuse_settings_for_its_jobs() -> None:
    def check(settings: Settings) -> None:
        raise UsageError(reason="no such job")

    live = LiveSettings(Settings(), CODE, check=check)
    assert live.check(version("attempts = 5"))
    assert live.check(version("attempts = "))


def test_pins_are_published() -> None:
    live = LiveSettings(Settings(fetch=3, origins={"fetch": "QDO_FETCH"}), CODE)
    assert live.dump() == {"uses": 0, "pins": {"fetch": "QDO_FETCH"}}


def test_differences_name_both_values() -> None:
    found = differences("attempts = 5\nfetch = 1\nat = 2020-01-01", "attempts = 6\nfetch = 1")
    assert found == {"attempts": (5, 6), "at": ("2020-01-01", None)}


def test_a_damaged_text_before_counts_as_empty() -> None:
    assert differences("=", "attempts = 6") == {"attempts": (None, 6)}
    with pytest.raises(SettingsError):
        differences("", "=")


def test_what_needs_a_restart_is_not_live() -> None:
    assert not {"concurrency", "broker", "executor", "session_timeout_seconds"} & set(live_names())


def test_only_a_change_of_the_level_changes_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may have asked for another level for a while."""
    levels: list[str] = []
    monkeypatch.setattr("qdo.system.logs.set_level", levels.append)
    follower = LogLevelFollower(Settings())
    follower.changed(Settings(fetch=5))
    follower.changed(Settings(log_level="debug"))
    follower.changed(Settings(log_level="debug", fetch=5))
    follower.changed(Settings())
    follower.changed(Settings(log_level="error", log_config="log.json"))
    assert levels == ["debug", "info"]


HOSTILE = {
    "a deep setting": "attempts" + ".a" * 1500 + " = 1",
    "a deep setting within the bounds of a line": "attempts" + ".a" * 150 + " = 1",
    "a key of many parts": ".".join(["a"] * 30_000) + " = 1",
    "a table of many parts": f"[{'.'.join(['a'] * 30_000)}]",
    "deep arrays": "attempts = " + "[" * 500 + "]" * 500,
    "deeper arrays": "attempts = " + "[" * 30_000 + "]" * 30_000,
    "a module that ends the process": rule_of("tests.unit.settings.ends_the_process:Error"),
    "a module that is not imported": rule_of("lib2to3.main:StdoutRefactoringTool"),
    "a package that imports on demand": rule_of("qdo:testing.TestKit"),
    "no exception": rule_of("os:path"),
    "an attribute of an attribute": rule_of("os:path.os.system"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_refused_and_nothing_else_happens(text: str) -> None:
    """A worker reads what others have written, in the loop that keeps its session."""
    before = {*sys.modules}
    live = LiveSettings(Settings(), CODE, check=check_rules)
    why = live.check(version(text))
    assert why is not None
    assert len(why) <= MAX_WHY_CHARACTERS
    assert {*sys.modules} == before
    assert differences(text, "attempts = 3") == {"attempts": (None, 3)} or "rules" in text


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029"])
def test_the_parts_of_a_key_are_bounded_before_parsing(separator: str) -> None:
    """Python ends a line at more characters than TOML does."""
    part = ".".join(["a"] * 100)
    with pytest.raises(SettingsSyntaxError) as refused:
        read_live(f'."{separator}".'.join([part] * 10) + " = 1")
    assert isinstance(refused.value.__cause__, ValueError)


def check_rules(settings: Settings) -> None:
    """Check policies as a worker does."""
    settings.policy_of("q", None)


def test_any_error_of_a_check_refuses_the_version() -> None:
    def check(settings: Settings) -> None:
        raise RecursionError

    assert LiveSettings(Settings(), CODE, check=check).check(version("attempts = 3"))


def test_rules_may_name_what_the_app_has_imported() -> None:
    live = LiveSettings(Settings(), CODE, check=check_rules)
    assert live.check(version(rule_of("qdo.errors:QdoError"))) is None
    assert live.check(version(rule_of("LookupError"))) is None
    live.use(version(rule_of("qdo.errors:QdoError")))
    (found,) = live.in_force.now.policy_of("q", None).rules
    assert found.exception is QdoError
