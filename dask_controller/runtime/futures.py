"""What is known of a ``distributed.Future``, and waiting for one from any event loop.

Owns :class:`ResultInfo`, the facts of a result that a rank keeps on its host: who made it, where it lies, how many
rows it has. Results of other origin (``client.scatter``, dataframe partitions) have no such record and are asked for.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass, field
from typing import Any

from dask.typing import Key
from distributed import Client, Future

from dask_controller.errors import ChunkLostError, RemoteError
from dask_controller.runtime.clients import scheduler_of

__all__ = ["KeptFacts", "ResultInfo", "adopt", "attach_info", "info_of", "wait_done"]


#: Where a future of ours keeps its record.
_INFO = "_dask_controller_info"
#: Set on a future that was unpickled and bound to a client here, of which the scheduler tells that client nothing.
_ADOPTED = "_dask_controller_adopted"
#: While an adopted future is waited for the scheduler is asked so often whether it still knows the key, in seconds.
_ASK_AGAIN_S = 1.0
#: An adopted key may be here before its announcement is with the scheduler; time for that, in seconds.
_ANNOUNCEMENT_S = 3.0


def _uncancellable() -> ConcurrentFuture[Any]:
    # Everybody who waits shares it. Who gives up waiting must not cancel it for the others.
    future: ConcurrentFuture[Any] = ConcurrentFuture()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True)
class KeptFacts:
    """What a host said of a value that it keeps."""

    nbytes: int
    rows: int | None
    type_name: str


@dataclass
class ResultInfo:
    """Origin and whereabouts of a result that a rank keeps."""

    key: str
    rank: int
    host: str
    method: str
    group: str
    route: str
    #: Set once the rank has answered; holds the rank's error if it failed.
    done: ConcurrentFuture[KeptFacts] = field(default_factory=_uncancellable)

    @property
    def origin(self) -> str:
        """Who made it, for messages."""
        return f"the result of {self.method}() from rank {self.rank} of group {self.group!r}"


def attach_info(future: Future[Any], info: ResultInfo) -> None:
    """Remember ``info`` on the future itself, for as long as that lives."""
    vars(future)[_INFO] = info


def info_of(future: Future[Any]) -> ResultInfo | None:
    """The record of a result that a rank keeps; None for futures of other origin."""
    return vars(future).get(_INFO)


def adopt(future: Future[Any], client: Client) -> None:
    """Bind a future that was unpickled here to ``client``; one that has a client is left as it is."""
    if future.client is None:
        future.bind_client(client)
        vars(future)[_ADOPTED] = True


async def wait_done(future: Future[Any], client: Client) -> None:
    """Wait until ``future`` has data.

    Parameters
    ----------
    future : Future
        May be one of another client.
    client : Client
        The client whose event loop this runs on.

    Raises
    ------
    Exception
        What the future failed with.
    ChunkLostError
        It was cancelled, or its data were lost.
    """
    info = info_of(future)
    if info is not None:
        await asyncio.wrap_future(info.done)
        return
    if not future.done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        def wake(_: Future[Any]) -> None:
            loop.call_soon_threadsafe(finish)

        future.add_done_callback(wake)
        if _ADOPTED in vars(future):
            await _wait_adopted(future, client, done)
        else:
            await done
    if future.status == "error":
        state: Any = future._state
        error: BaseException = state.exception
        if not isinstance(error, Exception):
            # A task's own CancelledError or GeneratorExit must not pass for that of the coroutine which waits here.
            kind = type(error)
            raise RemoteError(f"{kind.__module__}.{kind.__qualname__}", str(error)) from error
        raise error
    if future.status != "finished":
        raise ChunkLostError(
            f"the data of future {future.key!r} are gone ({future.status}): it was cancelled or its host was lost",
            "",
            str(future.key),
        )


async def _wait_adopted(future: Future[Any], client: Client, done: asyncio.Future[None]) -> None:
    """Have the scheduler tell the future's client of its key, and wait for that for as long as the key is known."""
    key = future.key
    patience_s = _ANNOUNCEMENT_S
    pause_s = 0.01
    asked = False
    while not done.done():
        known = (await scheduler_of(client).get_task_status(keys=[key])).get(key) is not None
        if known and not asked:
            owner: Any = future.client
            owner._send_to_scheduler({"op": "client-desires-keys", "keys": [key]})
            asked = True
        elif not known:
            patience_s -= pause_s
            if asked or patience_s < 0:
                raise ChunkLostError(
                    f"the data of future {key!r} are gone: the scheduler does not know it. It came inside another "
                    "object, and whoever sent it has let go of it since: keep it until the receiver is done",
                    "",
                    str(key),
                )
        await asyncio.wait([done], timeout=_ASK_AGAIN_S if asked else pause_s)
        pause_s = min(2 * pause_s, 0.5)


async def locate(client: Client, key: Key) -> list[str]:
    """Addresses of the hosts that hold ``key``."""
    return list((await scheduler_of(client).who_has(keys=[key])).get(key) or ())
