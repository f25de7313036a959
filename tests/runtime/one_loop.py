"""Clusters on one event loop, for tests that look at the scheduler's and the hosts' own state.

As ``distributed.utils_test.gen_cluster``, which cannot be used here: it kills every child process that it did not
start, and so the cluster that the run shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import dask
from distributed import Client, Scheduler, Worker

__all__ = ["LIMIT_S", "one_loop", "until"]

#: Nothing in these tests takes long; a wait that lasts this long hangs.
LIMIT_S = 30.0

_Test = Callable[[Client, Scheduler, Worker, Worker], Awaitable[None]]


def one_loop(test: _Test) -> Callable[[], None]:
    """Run a test with a client, a scheduler and two hosts, whose own consistency checks are on, also at its end."""

    async def run() -> None:
        settings = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
        with dask.config.set(settings), tempfile.TemporaryDirectory() as folder:
            async with contextlib.AsyncExitStack() as stack:
                scheduler = await stack.enter_async_context(
                    Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0")
                )
                a, b = [
                    await stack.enter_async_context(
                        Worker(
                            scheduler.address,
                            name=name,
                            nthreads=1,
                            local_directory=folder,
                            dashboard=False,
                            resources={"GPU": 2},
                        )
                    )
                    for name in "ab"
                ]
                client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
                await asyncio.wait_for(test(client, scheduler, a, b), 2 * LIMIT_S)
                scheduler.validate_state()
                for host in (a, b):
                    host.validate_state()

    def wrapper() -> None:
        asyncio.run(run())

    wrapper.__name__, wrapper.__doc__, wrapper.__module__ = test.__name__, test.__doc__, test.__module__  # type: ignore[attr-defined]
    return wrapper


async def until(condition: Callable[[], Any], what: str) -> None:
    """Let the event loop run until the condition holds."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.005)
