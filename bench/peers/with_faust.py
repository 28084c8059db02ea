"""Faust (faust-streaming) on librdkafka's mock broker."""

from __future__ import annotations

import os
import sys
from typing import Any

import faust

from bench.peers import common as tally
from bench.peers.with_kafka import topics

app = faust.App(
    "bench",
    broker=f"aiokafka://{os.environ['BENCH_KAFKA']}",
    topic_allow_declare=False,  # the mock broker cannot create topics on request
    topic_disable_leader=True,
    consumer_auto_offset_reset="earliest",
    value_serializer="json",
    web_enabled=False,
)
job = tally.from_environment()


async def run(stream: Any) -> None:
    """Run the job for every message, in order within each partition."""
    async for value in stream:
        job(value)


app.agent(app.topic(*topics()))(run)

if __name__ == "__main__":
    sys.argv = [sys.argv[0], "worker", "--loglevel=warn", "--without-web"]
    app.main()
