"""Webhooks that an app declares, and the secrets of their senders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from qdo.bodies import checked_kind
from qdo.encoding import MAX_STORED_BODY_BYTES
from qdo.errors import UsageError
from qdo.queues import check_queue_name
from qdo.system.files import private_text
from qdo.text import did_you_mean
from qdo.webhook_signatures import SCHEMES

_is_path = re.compile(r"/(?:(?![?#%])[!-~])*").fullmatch
_is_place = re.compile(r"\s*(env|file):\S.*").fullmatch


@dataclass(frozen=True, slots=True)
class DeclaredWebhook:
    """A webhook of an app (see `App.webhook`)."""

    path: str
    queue: str
    verify: str
    secret: str | None
    max_bytes: int
    kind: str | None = None

    def __post_init__(self) -> None:
        check_queue_name(self.queue)
        if self.kind is not None:
            checked_kind(self.kind)
        for reason in self._faults():
            raise UsageError(reason=f"webhook {self.path!r:.100}: {reason}")

    def _faults(self) -> Iterator[str]:
        if not _is_path(self.path):
            yield "path must begin with / and be ASCII without spaces, controls, ?, # and %"
        if self.verify not in SCHEMES:
            hint = did_you_mean(self.verify, SCHEMES)
            yield f"verify must be one of {', '.join(SCHEMES)}, got {self.verify!r}{hint}"
        if self.verify == "none" and self.secret is not None:
            yield 'secret must be left out with verify="none"'
        if self.verify != "none" and not all(map(_is_place, (self.secret or "").split(","))):
            reason = "secret must be env:NAME or file:PATH, or several, separated by commas"
            yield f"{reason}; do not write the secret itself into code"
        if type(self.max_bytes) is not int or not 0 < self.max_bytes <= MAX_STORED_BODY_BYTES:
            most = MAX_STORED_BODY_BYTES
            yield f"max_bytes must be a number from 1 to {most}, got {self.max_bytes!r:.60}"

    def keys(self) -> list[bytes]:
        """Read the secrets; raise UsageError if a secret is missing, empty or invalid."""
        places = [] if self.secret is None else self.secret.split(",")
        return [self._key(place.strip()) for place in places] or [b""]

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
