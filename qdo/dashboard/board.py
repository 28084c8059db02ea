"""The dashboard of one app: what its pages share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from flask import current_app

from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.dashboard.options import DashboardOptions
from qdo.dashboard.reading.direct_reads import DirectReads
from qdo.dashboard.reading.fleet_reader import FleetReader, Reading
from qdo.errors import NotFoundError
from qdo.sending.connections import Connections
from qdo.settings.settings import Settings

EXTENSION = "qdo"
PAGE_WAIT_SECONDS = 0.5
"""How long a page waits for a reading: it answers within a second, with whatever there is."""
ANSWER_WAIT_SECONDS = 10.0
"""JSON is for programs, which wait rather than ask again."""


@dataclass(frozen=True, slots=True)
class Board:
    """What all pages share.

    :ivar settings: those in force, with the name of the app.
    :ivar direct: reads that some pages need.
    :ivar asking: questions to workers, which take longer: other pages do not wait for them.
    """

    settings: Settings
    options: DashboardOptions
    reader: FleetReader
    direct: DirectReads
    asking: DirectReads

    @property
    def app(self) -> str:
        """The name of the app."""
        return self.settings.app

    def reading(self, wait_seconds: float = PAGE_WAIT_SECONDS) -> Reading | None:
        """Return the last reading of the app, None if there is none yet."""
        return self.reader.look(wait_seconds)

    @property
    def reading_id(self) -> str:
        """Names what a page shows now. It has a time, so a restart gives other ids."""
        reading = self.reader.look()
        at = 0.0 if reading is None else reading.at
        return f"{at:.3f}{'-fault' if self.reader.fault else ''}"

    def coordinator(self, connections: Connections) -> tuple[Client, Layout]:
        """Return the coordinator of open connections, also in a thread that answers no request.

        :raises NotFoundError: its file does not exist yet.
        """
        if connections.client is None:
            raise NotFoundError(what="coordinator", name=self.settings.coordinator)
        return connections.client, connections.layout

    def close(self) -> None:
        """End the threads."""
        self.reader.close()
        self.direct.close()
        self.asking.close()


def board() -> Board:
    """Return the dashboard that answers the present request."""
    return cast(Board, current_app.extensions[EXTENSION])
