"""A local clock that is ahead of the clock of Kinesis.

Kinesis dates records by its own clock and rejects AT_TIMESTAMP with a time in its future.
"""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from typing import Any

SLACK_SECONDS = 5.0
"""Assumed skew at first: no shard is read from a more recent time than this."""
SKEW_SECONDS = 300.0
"""Largest possible skew: AWS rejects requests whose signature is further ahead."""


class ClockSkew:
    """The skew that the poller of one shard assumes.

    :ivar slack_seconds: how far before the present a read by time must begin.
    """

    def __init__(self) -> None:
        self.slack_seconds = SLACK_SECONDS

    def timestamp_rejected(self) -> bool:
        """Assume the largest skew; return whether that may help, which it does only once."""
        helps = self.slack_seconds < SKEW_SECONDS
        self.slack_seconds = SKEW_SECONDS
        return helps

    @staticmethod
    def complete_until(read_at: float) -> float:
        """Return the time at Kinesis before which no more records can arrive.

        If the local clock is ahead, future records have earlier times than the read.

        :param read_at: Unix time, by the local clock, of a read that reached the tip.
        """
        return read_at - SKEW_SECONDS

    @staticmethod
    def ahead_seconds(response: Mapping[str, Any], sent_at: float) -> float:
        """Return the least skew that the date of a response proves; 0 if it proves none.

        :param response: of boto3.
        :param sent_at: Unix time of the request.
        """
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        try:
            date = email.utils.parsedate_to_datetime(headers.get("date", ""))
        except (TypeError, ValueError):
            return 0.0
        return max(0.0, sent_at - (date.timestamp() + 1.0))  # the date has no fractions
