"""A client's event loop and its connection to the scheduler, as definite objects.

distributed types both as optional, since a client that is not started has neither; a group is only ever given a
client that runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Client

__all__ = ["client_loop", "scheduler_of"]


def client_loop(client: Client) -> asyncio.AbstractEventLoop:
    """The event loop that ``client`` lives on."""
    loop: Any = client.loop
    if loop is None:
        raise RuntimeError("the Dask client is not started")
    out: asyncio.AbstractEventLoop = loop.asyncio_loop
    return out


def scheduler_of(client: Client) -> Any:
    """The remote scheduler: every attribute is a coroutine function that asks it."""
    return client.scheduler
