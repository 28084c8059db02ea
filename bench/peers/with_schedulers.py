"""Schedulers with a thousand entries a minute: ``python -m bench.peers.with_schedulers NAME N``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

TIMERS = 1000
FOLDER = Path(os.environ["BENCH_FOLDER"])


def note(number: int | str) -> None:
    """Write down that an entry was sent, or run."""
    with (FOLDER / f"sent-{os.getpid()}").open("a") as file:
        file.write(f"{number} {time.time()}\n")


def celery(place: str) -> None:
    """Run a beat of its own, with the default scheduler."""
    from celery import Celery
    from celery.beat import PersistentScheduler
    from celery.schedules import crontab

    app = Celery("bench", broker=os.environ["BENCH_REDIS"])
    app.conf.beat_schedule = {
        f"t{number}": {"task": "t", "schedule": crontab()} for number in range(TIMERS)
    }

    class Noting(PersistentScheduler):  # type: ignore[misc]
        def apply_async(self, entry: Any, *arguments: Any, **options: Any) -> Any:
            sent = super().apply_async(entry, *arguments, **options)
            note(entry.name)
            return sent

    app.Beat(scheduler=Noting, schedule=str(FOLDER / f"schedule-{place}"), quiet=True).run()


def apscheduler(place: str) -> None:
    """Run a scheduler on the store that both processes share."""
    from apscheduler.schedulers.blocking import BlockingScheduler

    scheduler = BlockingScheduler()
    scheduler.add_jobstore("sqlalchemy", url=f"sqlite:///{FOLDER / 'jobs.db'}?timeout=30")
    for number in range(TIMERS):
        scheduler.add_job(
            note,
            "cron",
            (number,),
            minute="*",
            id=f"t{number}",
            replace_existing=True,
            misfire_grace_time=60,
        )
    scheduler.start()


if __name__ == "__main__":
    {"celery": celery, "apscheduler": apscheduler}[sys.argv[1]](sys.argv[2])
