"""A client's event loop and its connection to the scheduler, as definite objects.

distributed types both as optional, since a client that is not started has neither; a group is only ever given a
client that runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Client, default_client, get_client, get_worker

from dask_controller.errors import PlacementError

__all__ = ["client_loop", "current_client", "scheduler_of"]


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


def current_client() -> Client:
    """The client of this place: the worker's own inside Dask tasks and ranks, else the default one.

    Raises
    ------
    PlacementError
        There is none.
    """
    try:
        get_worker()
    except ValueError:
        try:
            client: Client = default_client()
            return client
        except ValueError:
            raise PlacementError(
                "there is no Dask client: make one first (client = Client(address), or Client() for a cluster on this "
                "machine), or pass client=. Groups never start a cluster by themselves"
            ) from None
    client = get_client()
    return client
