"""aiokafka on librdkafka's mock broker."""

from __future__ import annotations

import asyncio
import os
import sys

import ujson
from aiokafka import AIOKafkaConsumer

from bench.peers import common as tally
from bench.peers.with_kafka import topics


async def main(way: str) -> None:
    """Run the job for every message, in order within each partition.

    :param way: ``many``: in batches; ``one``: as an asynchronous iteration.
    """
    job = tally.from_environment()
    consumer = AIOKafkaConsumer(
        *topics(),
        bootstrap_servers=os.environ["BENCH_KAFKA"],
        group_id="bench",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    if way == "one":
        async for message in consumer:
            job(ujson.loads(message.value))
    while True:
        batch = await consumer.getmany(timeout_ms=1000, max_records=1000)
        for messages in batch.values():
            for message in messages:
                job(ujson.loads(message.value))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
