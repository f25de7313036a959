"""A client's event loop and its connection to the scheduler, as definite objects.

distributed types both as optional, since a client that is not started has neither; a group is only ever given a
client that runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as ConcurrentCancelledError
from concurrent.futures import TimeoutError as ConcurrentTimeoutError
from typing import Any, TypeVar

from distributed import Client, default_client, get_client, get_worker
from distributed.comm.core import CommClosedError

from dask_controller.errors import GroupClosedError, PlacementError

__all__ = [
    "CLIENT_CHECK_S",
    "client_loop",
    "current_client",
    "is_open",
    "run_on_client",
    "scheduler_of",
    "while_host_lives",
]

_T = TypeVar("_T")

#: A thread that waits looks this often whether the client is still there, in seconds.
CLIENT_CHECK_S = 1.0
#: A request that gets no answer looks this often whether the host is still there, in seconds.
_HOST_CHECK_S = 1.0


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


def is_open(client: Client) -> bool:
    """Whether ``client`` talks to its scheduler, or tries to."""
    return client.status in ("running", "connecting")


def run_on_client(
    client: Client, function: Callable[..., Coroutine[Any, Any, _T]], *args: Any, timeout_s: float | None = None
) -> _T:
    """Run a coroutine function on the client's event loop and wait for its result.

    Unlike ``client.sync`` this ends also when the client is closed meanwhile, whose loop then answers nobody.

    Raises
    ------
    TimeoutError
        ``timeout_s`` seconds went by.
    GroupClosedError
        The client is closed.
    """
    loop = client_loop(client)
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        raise RuntimeError("this call blocks and would stop the event loop of the Dask client; await it instead")
    if not is_open(client):
        raise GroupClosedError(f"the Dask client is {client.status}: keep it open for as long as its groups are used")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    coroutine = function(*args)
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise GroupClosedError("the event loop of the Dask client is closed") from None
    try:
        while True:
            left = CLIENT_CHECK_S if deadline is None else min(CLIENT_CHECK_S, max(deadline - time.monotonic(), 0.0))
            try:
                return future.result(timeout=left)
            except (TimeoutError, ConcurrentTimeoutError):
                if future.done():
                    return future.result()  # it failed with a TimeoutError of its own
            except ConcurrentCancelledError:
                # The loop cancels what runs on it when it stops.
                raise GroupClosedError("the Dask client was closed while a result was waited for") from None
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no result within {timeout_s:g} s")
            if not is_open(client):
                raise GroupClosedError("the Dask client was closed while a result was waited for")
    finally:
        if not future.done() and not loop.is_closed():
            future.cancel()


async def while_host_lives(request: Awaitable[_T], scheduler: Any, address: str) -> _T:
    """Wait for the answer of the host at ``address``, but not longer than the scheduler knows that host.

    A connection to an address where nobody listens any more is tried again and again until Dask's own time limit,
    half a minute.

    Raises
    ------
    OSError
        The host is gone.
    """
    task = asyncio.ensure_future(request)
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=_HOST_CHECK_S)
            if done:
                return task.result()
            if address not in await scheduler.ncores(workers=[address]):
                raise CommClosedError(f"host {address} has left the cluster")
    finally:
        task.cancel()


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
