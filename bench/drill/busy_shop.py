"""Ten apps that are healthy and busy: much waits, and no queue is stopped."""

import time

import gevent

import qdo


def _app(name: str, **settings: object) -> qdo.App:
    return qdo.App(name, **settings)


def seconds(duration: float):
    """Return a job that takes this long."""

    def job(message: qdo.Message, context: object) -> None:
        gevent.sleep(duration)

    return job


places = _app("places", concurrency=5)
places.job()(seconds(1))

rate = _app("rate")
rate.job(limits=["crm"])(seconds(0))

permits = _app("permits")
permits.job(limits=["crm"])(seconds(2))

pace = _app("pace")
pace.job(per_queue_rate="1/m")(seconds(0))

long = _app("long", concurrency=400)
long.job()(seconds(100))

turns = _app("turns", concurrency=1)
turns.job()(lambda message, context: time.sleep(0.05))

lanes = _app("lanes", concurrency=3)
lanes.job(order="key", concurrency=8)(seconds(2))

paused = _app("paused")
paused.job()(seconds(0))

batches = _app("batches")
batches.job(batch=500, batch_wait_seconds=300)(lambda batch, context: None)

retries = _app("retries")


@retries.job()
def later(message: qdo.Message, context: object) -> None:
    """Wait for a service that asked for patience."""
    raise qdo.Retry(after=120, counts=False)
