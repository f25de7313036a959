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

__all__ = ["KeptFacts", "ResultInfo", "attach_info", "info_of", "wait_done"]


#: Where a future of ours keeps its record.
_INFO = "_dask_controller_info"


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
    done: ConcurrentFuture[KeptFacts] = field(default_factory=ConcurrentFuture)

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


async def wait_done(future: Future[Any]) -> None:
    """Wait until ``future`` has data. May run on any event loop, also for a future of another client.

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


async def locate(client: Client, key: Key) -> list[str]:
    """Addresses of the hosts that hold ``key``."""
    return list((await scheduler_of(client).who_has(keys=[key])).get(key) or ())
