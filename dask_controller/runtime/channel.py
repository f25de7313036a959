"""The controller's end of the conversation with one host.

Owns two ways to carry the same messages: :class:`DirectChannel`, a connection of its own to the host, and
:class:`SchedulerChannel`, for a client that cannot reach hosts, in which the scheduler forwards requests. Both keep
the order of messages and report the loss of the host once. Does not own what messages mean (``group/call.py``).

Everything here runs on the client's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from distributed import Client
from distributed.comm.core import Comm, CommClosedError, connect

from dask_controller.protocol.serialize import Packed
from dask_controller.runtime.clients import scheduler_of
from dask_controller.runtime.service import Outbox, read_batch
from dask_controller.runtime.shm import Link

__all__ = ["Channel", "DirectChannel", "SchedulerChannel", "call_host", "open_channel"]

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """A conversation with one host."""

    address: str
    route: str

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. Messages arrive in the order of this call."""

    @property
    def shares_memory(self) -> bool:
        """Whether received buffers are the host's own memory."""

    def encode(self, packed: Packed) -> Any:
        """The form in which a value travels to this host."""

    def decode(self, value: Any) -> Packed:
        """A value that this host sent."""

    async def close(self) -> None:
        """End the conversation; not a loss."""


class DirectChannel:
    """A comm of its own to the host, with the client's security settings."""

    route = "direct"

    def __init__(
        self,
        address: str,
        comm: Comm,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str, str], None],
        link: Link,
    ) -> None:
        self.address = address
        self.link = link
        link.give_back = self._give_back
        self._comm = comm
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(comm)
        self._on_message = on_message
        self._on_lost = on_lost
        self._closing = False
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def open(
        cls,
        client: Client,
        address: str,
        group_id: str,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str, str], None],
        timeout_s: float,
        shared_memory_nbytes: int,
    ) -> DirectChannel:
        comm = await connect(address, timeout=timeout_s, **client.connection_args)
        link = Link(shared_memory_nbytes)
        try:
            comm.name = "dask-controller"
            await comm.write(
                {
                    "op": "dask_controller_channel",
                    "session_id": uuid.uuid4().hex,
                    "group_id": group_id,
                    "hello": {**link.hello(), "limit": shared_memory_nbytes},
                    "reply": False,
                }
            )
            answer = await asyncio.wait_for(comm.read(), timeout_s)
            if "node" not in answer:
                raise OSError(f"host {address} answered {answer!r}")
            link.meet(answer)
            if answer["reads"] and link.peer is None:
                await comm.write([{"free": [], "off": True}])
            elif not answer["reads"]:
                link.peer = None
        except BaseException:
            comm.abort()
            raise
        return cls(address, comm, on_message, on_lost, link)

    @property
    def shares_memory(self) -> bool:
        return self.address.startswith("inproc://")

    def send(self, message: dict[str, Any]) -> None:
        self._outbox.send(message)

    def encode(self, packed: Packed) -> Any:
        return self.link.encode(packed)

    def decode(self, value: Any) -> Packed:
        return self.link.decode(value)

    def _give_back(self, segment: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the host's memory with its process
            self._loop.call_soon_threadsafe(self._send_free, segment)

    def _send_free(self, segment: int) -> None:
        if not self._closing:
            self.send({"free": [segment]})

    async def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while True:
                for message in read_batch(await self._comm.read()):
                    if "free" in message:
                        self.link.free(message["free"])
                    else:
                        self._on_message(message)
        except (OSError, CommClosedError) as error:
            reason = str(error) or reason
        except asyncio.CancelledError:
            return
        except Exception as error:
            # A message that cannot be read leaves the stream in an unknown state.
            logger.exception("cannot read from %s", self.address)
            reason = f"a message could not be read: {type(error).__name__}: {error}"
            self._comm.abort()
        if not self._closing:
            self.link.close()
            self._on_lost(self.address, reason)

    async def close(self) -> None:
        self._closing = True
        self._reader.cancel()
        try:
            await asyncio.wait_for(self._comm.close(), 1)
        except Exception:
            self._comm.abort()
        self.link.close()


class SchedulerChannel:
    """Requests that the scheduler forwards: slower, for a client that reaches the scheduler only."""

    route = "scheduler"

    def __init__(
        self,
        client: Client,
        address: str,
        group_id: str,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self.address = address
        self._client = client
        self._session = {"session_id": uuid.uuid4().hex, "group_id": group_id}
        self._on_message = on_message
        self._on_lost = on_lost
        self._closing = False
        self._lost = False
        self._number = 0
        self._pending: list[dict[str, Any]] = []
        self._writer: asyncio.Task[None] | None = None
        self._link = Link(0)
        self._poller = asyncio.ensure_future(self._poll())

    @property
    def shares_memory(self) -> bool:
        return self.address.startswith("inproc://")

    def encode(self, packed: Packed) -> Any:
        return self._link.encode(packed)

    def decode(self, value: Any) -> Packed:
        return self._link.decode(value)

    async def _request(self, op: str, **fields: Any) -> Any:
        return await scheduler_of(self._client).proxy(
            worker=self.address, msg={"op": f"dask_controller_{op}", **self._session, **fields}
        )

    def send(self, message: dict[str, Any]) -> None:
        self._pending.append(message)
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                await self._request("submit", number=self._number, messages=batch)
                self._number += 1
        except Exception as error:
            self._report(error)
        finally:
            self._writer = None

    async def _poll(self) -> None:
        try:
            while not self._closing:
                for message in await self._request("poll"):
                    self._on_message(message)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._closing and not self._lost:
            self._lost = True
            self._on_lost(self.address, f"the scheduler could not forward to it: {error}")

    async def close(self) -> None:
        self._closing = True
        self._poller.cancel()
        if not self._lost:
            try:
                await asyncio.wait_for(
                    scheduler_of(self._client).proxy(
                        worker=self.address,
                        msg={"op": "dask_controller_end", "session_id": self._session["session_id"]},
                    ),
                    1,
                )
            except Exception:
                logger.debug("could not end the session with %s", self.address, exc_info=True)


async def open_channel(
    client: Client,
    address: str,
    group_id: str,
    on_message: Callable[[dict[str, Any]], None],
    on_lost: Callable[[str, str], None],
    *,
    route: str,
    timeout_s: float,
    shared_memory_nbytes: int = 0,
) -> Channel:
    """Open a channel by ``route``: ``"direct"``, ``"scheduler"``, or ``"auto"`` (direct where the host answers)."""
    if route == "auto":
        route = "scheduler" if client.direct_to_workers is False else "auto"
    if route != "scheduler":
        try:
            return await DirectChannel.open(
                client, address, group_id, on_message, on_lost, timeout_s, shared_memory_nbytes
            )
        except (OSError, asyncio.TimeoutError) as error:
            if route == "direct":
                raise
            logger.warning("host %s cannot be reached from here (%s); going through the scheduler", address, error)
    return SchedulerChannel(client, address, group_id, on_message, on_lost)


async def call_host(client: Client, address: str, op: str, *, route: str, **fields: Any) -> Any:
    """One request to the service of a host, by the route that the group uses."""
    if route == "direct":
        return await getattr(client.rpc(address), f"dask_controller_{op}")(**fields)
    return await scheduler_of(client).proxy(worker=address, msg={"op": f"dask_controller_{op}", **fields})
