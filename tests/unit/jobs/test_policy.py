"""Decisions about failed attempts."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.errors import BodyDecodeError, PolicyError, WorkerCrashedError
from qdo.jobs.policy_tables import read_tables
from qdo.jobs.retry import (
    ENDS,
    LONGEST_SECONDS,
    BlockQueue,
    DeadLetterMessage,
    Decision,
    Policy,
    PolicyInForce,
    RetryMessage,
    Rule,
    SkipMessage,
    StopWorker,
    decide,
    decide_crashed,
)
from qdo.outcomes import DeadLetter, FailedAt, Retry, Skip, Stop
from qdo.text import describe, describe_traceback
from tests.support.policies import in_force

POLICY = in_force(attempts=10, backoff_seconds=0.5, backoff_max_seconds=60.0, jitter="full")


def broken_body() -> BodyDecodeError:
    return BodyDecodeError(queue="q", id="1", reason="no JSON")


@pytest.mark.parametrize(
    ("attempt", "error", "decision"),
    [
        (1, ValueError("x"), RetryMessage(0.5)),
        (9, ValueError("x"), RetryMessage(60)),
        (10, ValueError("x"), DeadLetterMessage("ValueError: x")),
        (1, SystemExit(3), RetryMessage(0.5)),  # a job that calls sys.exit() fails its message
        (1, KeyboardInterrupt(), RetryMessage(0.5)),
        (1, Retry(after=30), RetryMessage(30)),  # without jitter
        (1, Retry(after=-5), RetryMessage(0)),
        (2, Retry(), RetryMessage(1.0)),
        (10, Retry(after=1), DeadLetterMessage("Retry: retry after 1 s")),  # it counts, too
    ],
)
def test_attempts_are_decided_by_the_policy(
    attempt: int, error: BaseException, decision: Decision
) -> None:
    """An error backs off until the last attempt; a job may choose its delay."""
    assert decide(attempt, error, POLICY, 1.0) == decision


def test_the_back_off_doubles_up_to_its_limit() -> None:
    """0.5, 1, 2, ... 32, then 60 s for good."""
    delays = [POLICY.backoff.delay(attempt, 1.0) for attempt in range(1, 10)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_the_default_waits_for_a_service_that_is_down() -> None:
    """Half an hour costs no message its place, with any jitter; a day does."""
    attempts = range(1, in_force().attempts)
    shortest, longest = (
        sum(in_force().backoff.delay(n, chance) for n in attempts) for chance in (0.0, 1.0)
    )
    assert shortest > 45 * 60
    assert longest < 2 * 3600


def test_a_reason_may_be_anything() -> None:
    """Above all the error that led to it; a dead letter must be storable as text."""
    assert decide(1, DeadLetter(ValueError("x")), POLICY, 0.0) == DeadLetterMessage("x")  # type: ignore[arg-type]
    assert decide(1, Skip(None), POLICY, 0.0) == SkipMessage("None")  # type: ignore[arg-type]
    assert "cannot be shown" in decide(1, DeadLetter(UnspeakableError()), POLICY, 0.0).reason  # type: ignore[arg-type, union-attr]


class UnspeakableError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class Stubborn(Exception):
    """Ends the program when it is shown."""

    def __str__(self) -> str:
        raise SystemExit(9)


@pytest.mark.parametrize("kind", [UnspeakableError, Stubborn])
def test_an_error_that_cannot_be_shown_is_described_all_the_same(kind: type[Exception]) -> None:
    """An app's __str__ may be broken, and ends no worker."""
    with pytest.raises(kind) as caught:
        raise kind
    assert describe(caught.value).startswith(f"{kind.__name__}: (its text cannot be shown")
    trace = describe_traceback(caught.value)
    assert "test_policy.py" in trace
    assert kind.__name__ in trace


def test_a_description_is_one_line() -> None:
    """Log lines and tables stay whole."""
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(ValueError()) == "ValueError"


# --- rules ----------------------------------------------------------------------------


class AppError(Exception):
    """An app's own."""


class NarrowError(AppError):
    """A kind of it."""


RULES = in_force(
    attempts=5,
    backoff_seconds=1.0,
    backoff_max_seconds=8.0,
    rules=(
        Rule(NarrowError, then="skip", attempts=1),
        Rule((AppError, KeyError), attempts=2, backoff_seconds=4.0),
        Rule(TimeoutError, attempts=100),
        Rule(WorkerCrashedError, attempts=2, then="block"),
    ),
    then="block",
)


@pytest.mark.parametrize(
    ("attempt", "error", "decision"),
    [
        (1, NarrowError("n"), SkipMessage("NarrowError: n")),
        (1, AppError(), RetryMessage(4.0)),
        (2, AppError("a"), BlockQueue("AppError: a")),
        (2, KeyError("k"), BlockQueue("KeyError: 'k'")),
        (99, TimeoutError(), RetryMessage(8.0)),
        (100, TimeoutError(), BlockQueue("TimeoutError")),
        (4, ValueError(), RetryMessage(8.0)),
        (5, ValueError(), BlockQueue("ValueError")),
        (5, Retry(after=1), BlockQueue("Retry: retry after 1 s")),
    ],
)
def test_the_first_rule_that_fits_changes_its_policy(
    attempt: int, error: Exception, decision: Decision
) -> None:
    """The policy supplies the values that a rule leaves out; subclasses match too."""
    assert decide(attempt, error, RULES, 1.0) == decision


def test_a_crash_is_counted_like_a_failure() -> None:
    """And rules may name it."""
    assert decide_crashed(1, "died", POLICY, 1.0) == RetryMessage(0.5)
    assert decide_crashed(10, "died", POLICY, 1.0) == DeadLetterMessage("died")
    assert decide_crashed(1, "died", RULES, 1.0) == RetryMessage(1.0)
    assert decide_crashed(2, "died", RULES, 1.0) == BlockQueue("died")


@pytest.mark.parametrize(
    ("then", "end"),
    [("dead-letter", DeadLetterMessage), ("block", BlockQueue), ("skip", SkipMessage)],
)
def test_each_end_of_a_policy(then: Any, end: type) -> None:
    """After the last attempt, and at once for an undecodable message."""
    policy = in_force(attempts=3, then=then)
    assert isinstance(decide(2, ValueError(), policy, 0.5), RetryMessage)
    assert isinstance(decide(3, ValueError(), policy, 0.5), end)
    assert isinstance(decide(1, broken_body(), policy, 0.5), end)


def test_a_rule_may_say_that_an_error_does_not_count() -> None:
    """However often; any other error still ends by the policy."""
    policy = in_force(attempts=2, rules=(Rule(OSError, counts=False, backoff_seconds=3),))
    assert decide(50, ConnectionError(), policy, 1.0) == RetryMessage(600.0, counts=False)
    assert decide(1, OSError(), policy, 1.0) == RetryMessage(3, counts=False)
    assert isinstance(decide(2, KeyError(), policy, 1.0), DeadLetterMessage)


def test_a_table_may_say_that_an_error_does_not_count() -> None:
    rule = {"exception": "OSError", "counts": False}
    (table,) = read_tables([{"queues": "*", "rules": [rule]}])
    assert decide(99, OSError(), table.override(in_force(attempts=1)), 0.5).counts is False  # type: ignore[union-attr]
    for counts in ("no", 0):
        with pytest.raises(PolicyError):
            read_tables([{"queues": "*", "rules": [{**rule, "counts": counts}]}])


@pytest.mark.parametrize("then", ["dead-letter", "block", "skip"])
def test_a_jobs_own_word_counts_whatever_the_policy(then: Any) -> None:
    """DeadLetter, Skip and Stop act at once."""
    policy = in_force(attempts=3, then=then)
    assert decide(1, DeadLetter("d"), policy, 0.0) == DeadLetterMessage("d")
    assert decide(1, Skip("s"), policy, 0.0) == SkipMessage("s")
    assert decide(1, Stop("the disk is full"), policy, 0.0) == StopWorker("the disk is full")


class Liar(Exception):
    """An error that fails on everything, even on its class."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class LyingRetry(Retry):
    """A retry whose delay cannot be asked."""

    def __init__(self) -> None:
        Exception.__init__(self)

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit("no delay")


class LyingSkip(Skip):
    """A skip whose reason cannot be shown."""

    def __init__(self) -> None:
        Exception.__init__(self)
        self.reason = UnspeakableError()  # type: ignore[assignment]


ERRORS: list[BaseException] = [
    ValueError("x"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    UnspeakableError(),
    Liar(),
    LyingRetry(),
    LyingSkip(),
    Retry(),
    Retry(after=3),
    Retry(after=1e300),
    Retry(after=-1),
    DeadLetter("d"),
    Skip("s"),
    Stop("s"),
    NarrowError(),
    broken_body(),
]


@st.composite
def policies(draw: st.DrawFn) -> PolicyInForce:
    """Give any policy that is accepted."""
    first = draw(st.floats(0, 1000))
    return in_force(
        attempts=draw(st.integers(1, 50)),
        backoff_seconds=first,
        backoff_max_seconds=first + draw(st.floats(0, 1000)),
        rules=draw(st.sampled_from([(), (Rule(ValueError, attempts=2), Rule(Retry, attempts=4))])),
        then=draw(st.sampled_from(ENDS)),
        jitter=draw(st.sampled_from(["full", "equal"])),
    )


@given(
    policies(),
    st.integers(1, 10**6),
    st.integers(0, len(ERRORS) - 1),  # not the errors: their methods return false values
    st.floats(0, 1, exclude_max=True),
)
def test_a_decision_is_made_on_any_error(
    policy: PolicyInForce, attempt: int, number: int, chance: float
) -> None:
    """No error ends a decision with another, no message gets more attempts than it may have, and
    delays stay within their limits."""
    error = ERRORS[number]
    decision = decide(attempt, error, policy, chance)
    terms = policy.terms(error)
    if isinstance(decision, RetryMessage):
        assert attempt < terms.attempts
        chosen = type(error) is Retry
        limit = max(LONGEST_SECONDS if chosen else 0.0, terms.backoff_max_seconds)
        least = 0.0 if chosen or policy.jitter == "full" else policy.backoff_seconds / 2
        assert least <= decision.after_seconds <= limit
    else:
        assert isinstance(decision.reason, str)
        assert "\n" not in decision.reason
    if attempt >= terms.attempts:
        assert not isinstance(decision, RetryMessage)


@given(policies(), st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_crashes_end_as_failures_do(policy: PolicyInForce, attempts: int, chance: float) -> None:
    """A crash loop ends after as many attempts as a loop of errors."""
    decision = decide_crashed(attempts, "died", policy, chance)
    assert isinstance(decision, RetryMessage) == (attempts < policy.attempts)


@given(st.permutations([Exception, AppError, NarrowError, LookupError, KeyError]))
def test_rules_count_in_their_order(kinds: list[type[Exception]]) -> None:
    """A list with a rule that could never match is rejected; otherwise the first match counts."""
    hidden = any(
        issubclass(later, earlier)
        for index, earlier in enumerate(kinds)
        for later in kinds[index + 1 :]
    )
    rules = tuple(Rule(kind, attempts=number) for number, kind in enumerate(kinds, start=1))
    if hidden:
        with pytest.raises(PolicyError, match="earlier rule"):
            Policy(rules=rules)
        return
    policy = in_force(rules=rules)
    for number, kind in enumerate(kinds, start=1):
        assert policy.terms(kind()).attempts == number


# --- bad use --------------------------------------------------------------------------

AnyPolicy: Any = Policy
AnyRule: Any = Rule


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AnyPolicy(then="dead_letter"), "did you mean 'dead-letter'"),
        (lambda: AnyPolicy(then="blok"), "did you mean 'block'"),
        (lambda: AnyPolicy(then=None), "then"),
        (lambda: AnyPolicy(attempts=0), "attempts"),
        (lambda: AnyPolicy(attempts=True), "attempts"),
        (lambda: AnyPolicy(attempts=2.5), "attempts"),
        (lambda: AnyPolicy(backoff_seconds=-1), "backoff_seconds"),
        (lambda: AnyPolicy(backoff_seconds=float("nan")), "backoff_seconds"),
        (lambda: AnyPolicy(backoff_seconds=601, backoff_max_seconds=600), "backoff_max_seconds"),
        (lambda: AnyPolicy(jitter="some"), "jitter"),
        (lambda: AnyPolicy(rules=(ValueError,)), "qdo.Rule"),
        (lambda: AnyRule(ValueError), "attempts"),
        (lambda: AnyRule((), attempts=1), "exception"),
        (lambda: AnyRule(ValueError(), attempts=1), "exception class"),
        (lambda: AnyRule("ValueError", attempts=1), "exception class"),
        (lambda: AnyRule(Skip, attempts=1), "Skip"),
        (lambda: AnyRule(ValueError, then="ignore"), "then"),
        (lambda: AnyRule(ValueError, counts=0), "counts"),
        (lambda: AnyRule(ValueError, counts=False, attempts=3), "omit attempts"),
        (lambda: AnyRule(ValueError, counts=False, then="skip"), "omit attempts"),
        (
            lambda: AnyPolicy(
                backoff_max_seconds=600, rules=(AnyRule(ValueError, backoff_seconds=1000),)
            ),
            "backoff_max_seconds",
        ),
    ],
)
def test_bad_use_is_refused_with_the_remedy(make: Any, words: str) -> None:
    """When the module is imported, not when a message fails."""
    with pytest.raises(PolicyError, match=words):
        make()


@pytest.mark.parametrize(
    "after", ["soon", float("inf"), float("nan"), [1], datetime.timedelta(seconds=1)]
)
def test_a_retry_takes_only_numbers(after: Any) -> None:
    """Any other value is an error of the job, and the error states this."""
    with pytest.raises(TypeError, match="after"):
        Retry(after=after)


@pytest.mark.parametrize(
    "outcome", [Retry(after=3), Retry(), DeadLetter("d"), Skip("s"), Stop("x")], ids=repr
)
def test_outcomes_go_from_process_to_process(outcome: Exception) -> None:
    """They arrive with their texts."""
    again = pickle.loads(pickle.dumps(outcome))
    assert (type(again), vars(again), str(again)) == (type(outcome), vars(outcome), str(outcome))


@pytest.mark.parametrize("index", ["1", 1.0, None])
def test_a_batch_fails_at_a_whole_number(index: Any) -> None:
    """Another value is an error of the job, as any other."""
    with pytest.raises(TypeError):
        FailedAt(index)
