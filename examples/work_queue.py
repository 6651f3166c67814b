"""A work queue: two workers share the jobs; one job keeps failing and becomes a dead letter.

The dead letter is fixed and redriven, and then it is done as well.
`python -m examples.work_queue`
"""

from __future__ import annotations

import asyncio

import millstream
from examples.own_broker import broker_url
from millstream import Mill, SubscriptionSettings, Topic

JOBS = ["grind 4", "grind 7", "grind -1", "grind 2"]
SETTINGS = SubscriptionSettings(max_deliver=2, max_in_flight=1)
PATIENCE = 20.0  # seconds


async def work(name: str, jobs: Topic, done: list[str], enough: int) -> None:
    async with jobs.subscribe("millers", SETTINGS) as mine:
        async for job in mine:
            text = job.value.decode()
            if int(text.split()[1]) < 0:
                print(f"{name}: {text!r} fails, delivery {job.attempt}")
                job.nack()
                continue
            job.ack()
            print(f"{name}: {text!r} done")
            done.append(text)
            if len(done) >= enough:
                return


async def work_until(jobs: Topic, done: list[str], enough: int) -> None:
    names = ("worker 1", "worker 2")
    workers = {asyncio.create_task(work(name, jobs, done, enough)) for name in names}
    _, late = await asyncio.wait(workers, return_when="FIRST_COMPLETED", timeout=PATIENCE)
    for worker in late:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def show(mill: Mill) -> None:
    jobs = await mill.create_topic("jobs")
    for job in JOBS:
        await jobs.publish(job)
    done: list[str] = []
    await work_until(jobs, done, len(JOBS) - 1)
    queue = await jobs.dead_letters("millers")
    while not (letters := await queue.list()):
        await work_until(jobs, done, len(done) + 1)
    print(f"dead letter: {letters[0].value.decode()!r} after {letters[0].attempts} deliveries")
    await queue.edit(letters[0].offset, value=b"grind 1")
    report = await queue.redrive()
    print(f"fixed and redriven: {report.redriven}")
    await work_until(jobs, done, len(JOBS))
    print(f"done: {', '.join(sorted(done))}")


async def main() -> None:
    with broker_url() as url:
        async with millstream.connect(url) as mill:
            await show(mill)


if __name__ == "__main__":
    asyncio.run(main())
