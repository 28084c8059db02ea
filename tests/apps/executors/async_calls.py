"""A coroutine that uses the fleet, in a web server or in an ``async def`` job."""

from __future__ import annotations

import asyncio
import os
import warnings

import qdo
from qdo.errors import LockTimeoutError

warnings.simplefilter("error", qdo.errors.BlockedLoopWarning)
app = qdo.App("desk", attempts=1)
app.limit("crm", max=8)
COUNT = 12
OWN = f"own-{os.getpid()}"
"""Another process runs the same at once."""


async def use_the_fleet() -> None:
    """Hold locks, permits and sections in turn, and call operators."""
    at_once: set[int] = set()

    async def in_turn(number: int) -> None:
        async with app.lock("report") as lock:
            at_once.add(number)
            await asyncio.sleep(0.001)
            assert at_once == {number}
            lock.check()
            at_once.discard(number)

    await asyncio.gather(*map(in_turn, range(COUNT)))
    async with app.lock("held"):
        try:
            async with app.lock("held", timeout_seconds=0.01):
                raise AssertionError
        except LockTimeoutError:
            pass
        waiting = asyncio.create_task(app.lock("held").__aenter__())
        await asyncio.sleep(0.05)
        waiting.cancel()
    async with app.lock("held", timeout_seconds=30):  # the cancelled one gave it back
        pass
    async with app.limit("crm", timeout_seconds=30) as permit:
        permit.check()
        other = await app.limit("crm").atry_acquire()
        assert other is not None
        await other.arelease()
    async with app.exclusive(f"{OWN}-*") as section:
        section.check()
    plans = app.documents("plans")
    await plans.aput(OWN, 1)
    await plans.achange(OWN, lambda value: value + 1)
    await plans.afresh()
    assert plans[OWN] == 2
    await plans.adelete(OWN)
    await app.apause(f"{OWN}-*", allow_none=True, reason="test")
    await app.aresume(f"{OWN}-*", reason="test")


@app.job("q")
async def job(message: qdo.Message, context: object) -> None:
    await use_the_fleet()
    owner = await app.aowner("q")
    assert owner is not None
    with open("out", "a") as file:
        print(message.queue, 0, message.attempt, os.getpid(), file=file)


async def main() -> None:
    async with app:
        await app.aregister()
        await use_the_fleet()


if __name__ == "__main__":
    asyncio.run(main())
