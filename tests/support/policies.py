"""Failure policies with all values."""

from __future__ import annotations

from typing import Any

from qdo.jobs.retry import Policy, PolicyInForce
from qdo.settings.settings import Settings


def in_force(**options: Any) -> PolicyInForce:
    """Return a policy, with the default settings for the values that it does not give."""
    return Policy(**options).over(Settings().default_policy)
