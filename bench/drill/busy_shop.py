"""Apps that are healthy and busy: much waits, and no queue is stopped."""

import os
import time

import gevent
import sqlalchemy

import qdo
from qdo.outbox import Outbox

HERE = os.path.dirname(os.environ["QDO_BROKER"].removeprefix("sqlite:"))


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

pool = _app("pool", concurrency=5)
pool.job("thumb", pool=True)(seconds(2))

stream = _app("stream", concurrency=5)
visits = stream.stream("visit", shards=8)
stream.job("visit.*", order="key")(seconds(0.5))

timers = _app("timers", concurrency=5)
timers.job()(seconds(1))
for number in range(30):
    timers.timer(f"tick-{number}", every_seconds=10, queue=f"ticks-{number % 3}")

relayed = _app("relayed")
relayed.job()(seconds(0.2))
engine = sqlalchemy.create_engine(f"sqlite:///{HERE}/orders.db")
outbox = Outbox(relayed, engine)

retries = _app("retries")


@retries.job()
def later(message: qdo.Message, context: object) -> None:
    """Wait for a service that asked for patience."""
    raise qdo.Retry(after=120, counts=False)
