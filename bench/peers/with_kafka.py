"""librdkafka's mock broker with messages, and a confluent-kafka consumer in batches.

The mock broker runs inside a producer process and keeps 5 MiB per partition in memory. It has
four partitions per topic, so sixteen ordered queues are four topics here.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ujson
from confluent_kafka import Consumer, Producer

from bench.peers import common as tally

PARTITIONS = 4


def topics() -> list[str]:
    """Return the topics that make up the compared number of queues."""
    return [f"bench-{number}" for number in range(int(os.environ["BENCH_QUEUES"]) // PARTITIONS)]


def serve(count: int) -> None:
    """Run the mock broker with `count` messages until standard input ends.

    Prints one line: the address and the number of stored messages.
    """
    producer = Producer(
        {
            "bootstrap.servers": "mock:1",  # replaced by the mock broker's address
            "test.mock.num.brokers": 1,
            "log_level": 0,
            "linger.ms": 20,
            "batch.num.messages": 5000,
            "queue.buffering.max.messages": 200_000,
        }
    )
    brokers = producer.list_topics(timeout=30).brokers.values()
    address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    places = [(topic, partition) for topic in topics() for partition in range(PARTITIONS)]
    for number in range(count):
        topic, partition = places[number % len(places)]
        body = tally.encoded(number)
        while True:
            try:
                producer.produce(topic, body, partition=partition)
                break
            except BufferError:  # the producer's buffer is full: let it send
                producer.poll(0.1)
    unsent = producer.flush(60)
    print(json.dumps({"address": address, "stored": count - unsent}), flush=True)
    sys.stdin.read()


def consume(settings: list[str]) -> None:
    """Run the job for every message, in order within each partition.

    :param settings: of the consumer, each NAME=VALUE.
    """
    job = tally.from_environment()
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ["BENCH_KAFKA"],
            "group.id": "bench",
            "auto.offset.reset": "earliest",
            **dict(setting.split("=", 1) for setting in settings),
        }
    )
    consumer.subscribe(topics())
    while True:
        for message in consumer.consume(1000, 1.0):
            if message.error() is None:
                job(_decoded(message))


def _decoded(message: Any) -> Any:
    return ujson.loads(message.value())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        consume(sys.argv[2:])
