"""Decisions about failed attempts."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.describe import describe, describe_traceback
from qdo.errors import BodyDecodeError
from qdo.outcomes import DeadLetter, Retry, Skip
from qdo.policy import PassOver, Policy, RetryLater, SetAside, backoff, decide

POLICY = Policy(attempts=10, backoff_seconds=0.5, backoff_max_seconds=60.0, jitter="full")


def test_an_error_is_retried_after_a_back_off() -> None:
    """The first failure waits for at most the first back-off."""
    assert decide(1, ValueError("x"), POLICY, 1.0) == RetryLater(0.5)


def test_the_back_off_doubles_up_to_its_limit() -> None:
    """0.5, 1, 2, ... 32, then 60 s for good."""
    delays = [backoff(attempt, POLICY, 1.0) for attempt in range(1, 10)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_the_last_attempt_leads_to_a_dead_letter() -> None:
    """Attempt 10 of 10 is the last."""
    assert decide(9, ValueError("x"), POLICY, 1.0) == RetryLater(60)
    assert decide(10, ValueError("x"), POLICY, 1.0) == SetAside("ValueError: x")


def test_a_single_attempt_is_never_retried() -> None:
    """With attempts = 1 the first failure is the last."""
    assert isinstance(decide(1, ValueError(), Policy(attempts=1), 0.0), SetAside)


def test_a_job_chooses_its_delay() -> None:
    """Retry(after) takes that time, without jitter."""
    assert decide(1, Retry(after=30), POLICY, 0.1) == RetryLater(30)


def test_a_retry_in_the_past_is_one_at_once() -> None:
    """A negative delay is none."""
    assert decide(1, Retry(after=-5), POLICY, 0.1) == RetryLater(0)


def test_a_retry_without_a_delay_takes_the_policys() -> None:
    """Retry() backs off like an error."""
    assert decide(2, Retry(), POLICY, 0.5) == RetryLater(0.5)


def test_retries_asked_for_are_counted_too() -> None:
    """A job that asks for ever blocks its queue no longer than one that fails for ever."""
    assert isinstance(decide(10, Retry(after=1), POLICY, 0.0), SetAside)


def test_outcomes_that_end_a_message_at_once() -> None:
    """DeadLetter and Skip act at the first attempt, with their reason."""
    assert decide(1, DeadLetter("bad address"), POLICY, 0.0) == SetAside("bad address")
    assert decide(1, Skip("a duplicate"), POLICY, 0.0) == PassOver("a duplicate")


def test_a_reason_may_be_anything() -> None:
    """Above all the error that led to it; a dead letter must be storable as text."""
    assert decide(1, DeadLetter(ValueError("x")), POLICY, 0.0) == SetAside("x")  # type: ignore[arg-type]
    assert decide(1, Skip(None), POLICY, 0.0) == PassOver("None")  # type: ignore[arg-type]
    assert "cannot be shown" in decide(1, DeadLetter(Unspeakable()), POLICY, 0.0).reason  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("after", ["soon", datetime.timedelta(seconds=1), [5]])
def test_a_delay_that_is_no_number_fails_the_attempt(after: object) -> None:
    """With an error of the job's own, which then is retried like any other."""
    with pytest.raises(TypeError, match="takes seconds as a number"):
        Retry(after)  # type: ignore[arg-type]


def test_what_does_not_decode_is_not_retried() -> None:
    """It would not decode the next time either."""
    error = BodyDecodeError(queue="q", id="1", reason="no JSON")
    assert isinstance(decide(1, error, POLICY, 0.0), SetAside)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_even_what_would_end_a_program_is_a_failed_attempt(error: BaseException) -> None:
    """A job that calls sys.exit() fails its message."""
    assert isinstance(decide(1, error, POLICY, 0.0), RetryLater)


@given(
    st.integers(1, 10**9),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["full", "equal"]),
    st.floats(0, 1000),
    st.floats(0, 1000),
)
def test_a_back_off_stays_within_its_limits(
    attempt: int, chance: float, jitter: str, first: float, extra: float
) -> None:
    """No attempt number overflows, no jitter exceeds the limit."""
    policy = Policy(
        backoff_seconds=first,
        backoff_max_seconds=first + extra,
        jitter="full" if jitter == "full" else "equal",
    )
    delay = backoff(attempt, policy, chance)
    lowest = 0.0 if jitter == "full" else min(first, first + extra) / 2
    assert lowest <= delay <= first + extra


class Unspeakable(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_an_error_that_cannot_be_shown_is_described_all_the_same() -> None:
    """An app's __str__ may be broken."""
    with pytest.raises(Unspeakable) as caught:
        raise Unspeakable
    assert describe(caught.value).startswith("Unspeakable: (its text cannot be shown")
    assert "test_policy.py" in describe_traceback(caught.value)


class Stubborn(Exception):
    """Ends the program when it is shown."""

    def __str__(self) -> str:
        raise SystemExit(9)


def test_showing_an_error_ends_no_worker() -> None:
    """Whatever its __str__ raises."""
    assert describe(Stubborn()).startswith("Stubborn: (its text cannot be shown")
    assert "Stubborn" in describe_traceback(Stubborn())


def test_a_description_is_one_line() -> None:
    """Log lines and tables stay whole."""
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(ValueError()) == "ValueError"
