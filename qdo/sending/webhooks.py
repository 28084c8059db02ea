"""Webhooks that an app declares, and the secrets of their senders."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from qdo.encoding import MAX_STORED_BODY_BYTES
from qdo.errors import UsageError
from qdo.queues import check_queue_name
from qdo.signatures import SCHEMES
from qdo.system.files import private_text
from qdo.text import did_you_mean

_is_path = re.compile(r"/(?:(?![?#%])[!-~])*").fullmatch
_is_place = re.compile(r"\s*(env|file):\S.*").fullmatch


@dataclass(frozen=True, slots=True)
class DeclaredWebhook:
    """A webhook of an app, see `App.webhook`."""

    path: str
    queue: str
    verify: str
    secret: str | None
    max_bytes: int

    def check(self) -> None:
        """Raise UsageError if a value is invalid."""
        places = None if self.secret is None else self.secret.split(",")
        if not _is_path(self.path):
            reason = "path must begin with / and be ASCII without spaces, controls, ?, # and %"
            raise self._error(f"{reason}, got {self.path!r:.100}")
        check_queue_name(self.queue)
        if self.verify not in SCHEMES:
            known, hint = ", ".join(SCHEMES), did_you_mean(self.verify, SCHEMES)
            raise self._error(f"verify must be one of {known}, got {self.verify!r}{hint}")
        if (self.verify == "none") != (places is None):
            raise self._error('secret must be given, except with verify="none"')
        if places is not None and not all(map(_is_place, places)):
            reason = "secret must be env:NAME or file:PATH, or several, separated by commas"
            raise self._error(f"{reason}; do not write the secret itself into code")
        if type(self.max_bytes) is not int or not 0 < self.max_bytes <= MAX_STORED_BODY_BYTES:
            reason = f"max_bytes must be a number from 1 to {MAX_STORED_BODY_BYTES}"
            raise self._error(f"{reason}, got {self.max_bytes!r:.60}")

    def _error(self, reason: str) -> UsageError:
        return UsageError(reason=f"webhook {self.path!r:.100}: {reason}")

    def keys(self) -> list[bytes]:
        """Read the secrets; raise UsageError if one is missing, empty or no secret."""
        places = [] if self.secret is None else self.secret.split(",")
        return [self._key(place.strip()) for place in places]

    def _key(self, place: str) -> bytes:
        kind, _, name = place.partition(":")
        text = os.environ.get(name, "") if kind == "env" else private_text(name, "secret file")
        try:
            if not text.strip():
                raise ValueError("must not be empty")
            return SCHEMES[self.verify].key(text.strip())
        except ValueError as error:
            reason = f"the secret of webhook {self.path} in {place} {error}"
            raise UsageError(reason=f"{reason}; set it to the one that the sender has") from error
