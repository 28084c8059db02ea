"""Quix Streams on librdkafka's mock broker."""

from __future__ import annotations

import os
from typing import Any

from quixstreams import Application
from quixstreams.models.topics import TopicAdmin, TopicConfig

from bench.peers import common as tally
from bench.peers.with_kafka import PARTITIONS, topics


class MockAdmin(TopicAdmin):  # type: ignore[misc]
    """Supplies a topic's configuration, which the mock broker cannot describe."""

    def inspect_topics(self, topic_names: list[str], timeout: float = 30) -> dict[str, Any]:
        return {
            name: TopicConfig(num_partitions=PARTITIONS, replication_factor=1, extra_config={})
            for name in topic_names
        }


def main() -> None:
    """Run the job for every message, in order within each partition."""
    application = Application(
        broker_address=os.environ["BENCH_KAFKA"],
        consumer_group="bench",
        auto_offset_reset="earliest",
        auto_create_topics=False,
        use_changelog_topics=False,
    )
    application._topic_manager._admin = MockAdmin(os.environ["BENCH_KAFKA"])
    job = tally.from_environment()
    for name in topics():
        frame = application.dataframe(application.topic(name, value_deserializer="json"))
        frame.update(job)
    application.run()


if __name__ == "__main__":
    main()
