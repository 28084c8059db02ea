"""HTTP responses with a limit on the number of lines that a server may send."""

from __future__ import annotations

import http.client
from typing import Any

# Maximum number of interim responses such as `100 Continue`. A request causes at most one such
# response.
INTERIM_LIMIT = 10
# Maximum number of lines after a chunked body. `http.client` has the same limit for headers.
TRAILER_LIMIT = 100


class BoundedResponse(http.client.HTTPResponse):
    """A response that raises HTTPException if the server sends too many lines."""

    # `http.client` skips any number of interim responses and trailers. If a server sends lines
    # faster than this process reads them, no other greenlet runs, and no timeout applies.

    fp: Any
    _interim = -1

    def _read_status(self) -> Any:
        self._interim += 1
        if self._interim > INTERIM_LIMIT:
            raise http.client.HTTPException(f"more than {INTERIM_LIMIT} interim responses")
        return super()._read_status()  # type: ignore[misc]

    def _read_and_discard_trailer(self) -> None:
        for _ in range(TRAILER_LIMIT):
            if self.fp.readline(1 << 16) in (b"\r\n", b"\n", b""):
                return
        raise http.client.HTTPException(f"more than {TRAILER_LIMIT} trailers")
