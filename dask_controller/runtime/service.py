"""What this package adds to a Dask worker: one :class:`HostService` per host.

Owns the message handlers on the host, the table of ranks that live there, the leases that hold its slots, and the
values that non-blocking calls leave behind. It moves messages and data; it never runs user code, and nothing in it
blocks the host's event loop. Does not own what a rank does with a call (``worker/host.py``).

The handlers are installed by :func:`ensure_service`, which any code running on the host may call.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgpack
import numpy as np
from dask.sizeof import sizeof
from distributed import Worker as DaskWorker
from distributed import get_worker
from distributed.comm.core import Comm, CommClosedError
from distributed.comm.tcp import TCP
from distributed.core import Status
from distributed.worker import _worker_cvar
from distributed.worker_state_machine import FreeKeysEvent

from dask_controller.errors import ControllerError
from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.plan import choose_columns, take_rows
from dask_controller.protocol.serialize import pack
from dask_controller.runtime.shm import Link, own_pool

__all__ = [
    "HostService",
    "Lease",
    "Outbox",
    "RankLike",
    "Session",
    "adopt_worker",
    "ensure_service",
    "install_service",
    "pick_rows",
    "read_batch",
    "row_count",
    "services_in_process",
]

logger = logging.getLogger(__name__)

#: Above this size, slicing and packing for a fetch leaves the event loop for a thread.
_OFFLOAD_BYTES = 1 << 20

#: Messages up to this size are written without a task: far below what Dask serialises in a thread.
_AT_ONCE_BYTES = 64 << 10

#: How long a poll through the scheduler is held open on the host, in seconds.
_POLL_S = 10.0

#: Pause between the end of a conversation and the look for values it left behind, in seconds.
_SWEEP_S = 2.0

#: Bound of the table of kept keys before the ones that are gone are taken out.
_MAX_KEPT = 4096

_services: weakref.WeakKeyDictionary[DaskWorker, HostService] = weakref.WeakKeyDictionary()
_services_lock = threading.Lock()


class RankLike(Protocol):
    """What the service needs to know of a rank."""

    group_id: str
    rank: int

    def receive(self, call: dict[str, Any], session: Session) -> None: ...

    def status(self) -> dict[str, Any]: ...


def row_count(value: Any) -> int | None:
    """Rows of a value that can be cut by rows, else None."""
    try:
        return len(value) if BatchData(value).is_chunkable() else None
    except Exception:
        return None


def pick_rows(
    value: Any, start: int | None, stop: int | None, index: bytes | None, columns: Sequence[Sequence[Any]]
) -> Any:
    """Some rows and columns of a batch, as views where rows are a range; the value itself where nothing is chosen."""
    if columns:
        value = choose_columns(value, [tuple(step) for step in columns])
    if index is not None:
        return take_rows(value, np.frombuffer(index, dtype=np.int64))
    return value if start is None else value[start:stop]


def adopt_worker(worker: DaskWorker) -> None:
    """Make ``get_worker()`` and ``get_client()`` work in the calling thread's context, as in a Dask task."""
    _worker_cvar.set(worker)


class Outbox:
    """Writes messages to a comm in order, several at once where they pile up.

    A comm allows one write at a time; :meth:`send` may be called at any time from the comm's event loop.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._pending: list[Any] = []
        self._writer: asyncio.Task[None] | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message."""
        try:
            # Dask walks every message for its size and for objects to serialise; one without buffers is spared that.
            packed: Any = msgpack.packb(message)
        except TypeError:
            packed = message
        if self._writer is None and isinstance(packed, bytes) and self._write_at_once(packed):
            return
        self._pending.append(packed)
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._drain())

    def _write_at_once(self, packed: bytes) -> bool:
        """Write a small message without a task of its own: TCP only puts it into the socket's buffer."""
        if len(packed) > _AT_ONCE_BYTES or not isinstance(self.comm, TCP):
            return False
        step = self.comm.write([packed])
        try:
            step.send(None)
        except StopIteration:
            return True
        except (OSError, CommClosedError):
            self.comm.abort()
            return True
        step.close()
        raise RuntimeError("Dask's TCP connection waited while it wrote a small message")

    async def _drain(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                await self.comm.write(batch)
        except (OSError, CommClosedError):
            # The reader of the same comm sees the closing too and reports it.
            self.comm.abort()
        finally:
            self._writer = None


def read_batch(batch: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as they were given to :meth:`Outbox.send`, with tuples for lists: keys of Dask may be tuples."""
    return [
        msgpack.unpackb(item, strict_map_key=False, use_list=False) if isinstance(item, bytes) else item
        for item in batch
    ]


class Session:
    """One controller's conversation with the ranks of one group on this host.

    Messages arrive either over a comm of their own (:meth:`run`) or in requests that the scheduler forwards
    (:meth:`submit` and :meth:`poll`); the ranks do not see the difference.
    """

    def __init__(self, service: HostService, session_id: str, group_id: str) -> None:
        self.service = service
        self.session_id = session_id
        self.group_id = group_id
        self.closed = False
        #: Hand-over by memory; without effect until the controller turns out to share this machine.
        self.link = Link(0, self._give_back)
        self._outbox: Outbox | None = None
        self._mailbox: deque[Any] = deque()
        self._mail = asyncio.Event()
        self._next_batch = 0
        self._early: dict[int, Sequence[dict[str, Any]]] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether buffers in messages are the sender's own memory (controller and host in one process)."""
        return self._outbox is not None and self._outbox.comm.peer_address.startswith("inproc://")

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message to the controller. Call on the event loop."""
        if self.closed:
            return
        if self._outbox is not None:
            self._outbox.send(message)
        else:
            self._mailbox.append(message)
            self._mail.set()

    def _give_back(self, segment: int) -> None:
        self.send_threadsafe({"free": [segment]})

    def send_threadsafe(self, message: dict[str, Any]) -> None:
        """Queue a message to the controller from any thread."""
        self.service.call_soon(self.send, message)

    def deliver(self, messages: Sequence[dict[str, Any]]) -> None:
        for message in messages:
            self.service.deliver(self, message)

    async def run(self, comm: Comm, hello: dict[str, Any]) -> None:
        self._outbox = Outbox(comm)
        self.link = Link(hello["limit"], self._give_back)
        self.link.meet(hello)
        try:
            await comm.write({**self.link.hello(), "reads": self.link.peer is not None})
            while True:
                self.deliver(read_batch(await comm.read()))
        except (OSError, CommClosedError):
            pass
        finally:
            self.close()

    def submit(self, number: int, messages: Sequence[dict[str, Any]]) -> None:
        # Requests through the scheduler travel over pooled connections and can overtake each other.
        self._early[number] = messages
        while self._next_batch in self._early:
            batch = self._early.pop(self._next_batch)
            self._next_batch += 1
            self.deliver(batch)

    async def poll(self) -> list[dict[str, Any]]:
        if not self._mailbox:
            self._mail.clear()
            try:
                await asyncio.wait_for(self._mail.wait(), _POLL_S)
            except asyncio.TimeoutError:
                pass
        out = list(self._mailbox)
        self._mailbox.clear()
        return out

    def close(self) -> None:
        self.closed = True
        self._mail.set()
        self.link.close()
        self.service.sessions.pop(self.session_id, None)
        # Whatever the controller announced in its last moments has reached the scheduler by then.
        self.service.loop.call_later(_SWEEP_S, lambda: self.service.run_coroutine(self.service.sweep(self.group_id)))


class Lease:
    """A slot of this host, taken for a pool for as long as ranks use it."""

    def __init__(self, lease_id: str, pool_id: str, key: str) -> None:
        self.lease_id = lease_id
        self.pool_id = pool_id
        self.key = key
        self.ranks: set[str] = set()
        self.ended = threading.Event()

    def release(self, rank_id: str) -> None:
        """A rank is gone; call with the service's lock held."""
        self.ranks.discard(rank_id)
        if not self.ranks:
            self.ended.set()


class HostService:
    """The part of this package that lives in a Dask worker for as long as the worker does."""

    def __init__(self, worker: DaskWorker) -> None:
        self._worker = weakref.ref(worker)
        self.loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
        self.sessions: dict[str, Session] = {}
        self.ranks: dict[tuple[str, int], RankLike] = {}
        self.leases: dict[str, Lease] = {}
        #: Keys that ranks keep here, with their group, until the scheduler is known to look after them.
        self._kept: dict[str, str] = {}
        self.lock = threading.Lock()
        self._lease_waiters: dict[str, asyncio.Event] = {}
        worker.handlers.update(
            {
                "dask_controller_channel": self.handle_channel,
                "dask_controller_submit": self.handle_submit,
                "dask_controller_poll": self.handle_poll,
                "dask_controller_end": self.handle_end,
                "dask_controller_fetch": self.handle_fetch,
                "dask_controller_rows": self.handle_rows,
                "dask_controller_release": self.handle_release,
                "dask_controller_free": self.handle_free,
                "dask_controller_status": self.handle_status,
                "dask_controller_paused": self.handle_paused,
                "dask_controller_wait_lease": self.handle_wait_lease,
            }
        )

    @property
    def worker(self) -> DaskWorker:
        worker = self._worker()
        if worker is None:
            raise RuntimeError("the Dask worker of this rank is gone")
        return worker

    @property
    def address(self) -> str:
        return str(self.worker.contact_address or self.worker.address)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function`` on the host's event loop; silently dropped once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the event loop of the host is closed; dropped %r", function)

    def run_coroutine(self, coroutine: Awaitable[Any]) -> asyncio.Future[Any]:
        """Start a coroutine on the host's event loop. Call on that loop."""
        return asyncio.ensure_future(coroutine)

    # ------------------------------------------------------------------ messages

    def deliver(self, session: Session, message: dict[str, Any]) -> None:
        if "free" in message:
            session.link.free(message["free"])
            if message.get("off"):
                session.link.peer = None
            return
        if message.get("ack"):
            session.send({"id": message["id"], "ack": True, "rank": message["calls"][0]["rank"]})
        for call in message["calls"]:
            rank = self.ranks.get((session.group_id, call["rank"]))
            call["values"] = message["values"]
            call["id"] = message["id"]
            if rank is None:
                session.send({"id": message["id"], "rank": call["rank"], "gone": True})
            else:
                rank.receive(call, session)

    async def handle_channel(self, comm: Comm, session_id: str, group_id: str, hello: dict[str, Any]) -> Status:
        session = Session(self, session_id, group_id)
        self.sessions[session_id] = session
        await session.run(comm, hello)
        return Status.dont_reply

    async def handle_submit(
        self, session_id: str, group_id: str, number: int, messages: Sequence[dict[str, Any]]
    ) -> str:
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = Session(self, session_id, group_id)
        session.submit(number, messages)
        return "OK"

    async def handle_poll(self, session_id: str, group_id: str) -> list[dict[str, Any]]:
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = Session(self, session_id, group_id)
        return await session.poll()

    async def handle_end(self, session_id: str) -> str:
        session = self.sessions.get(session_id)
        if session is not None:
            session.close()
        return "OK"

    async def handle_status(self, group_id: str | None = None) -> list[dict[str, Any]]:
        return [rank.status() for rank in list(self.ranks.values()) if group_id in (None, rank.group_id)]

    @property
    def is_paused(self) -> bool:
        """Whether Dask has paused this host because its memory is nearly full."""
        return bool(self.worker.status == Status.paused)

    async def handle_paused(self) -> bool:
        return self.is_paused

    # ------------------------------------------------------------------ data

    def store(self, key: str, value: Any, group_id: str) -> int:
        """Keep ``value`` under a Dask key on this host; returns its size in bytes. Call on the event loop."""
        self.worker.update_data({key: value})
        self._kept[key] = group_id
        if len(self._kept) > _MAX_KEPT:
            data = self.worker.data
            self._kept = {key: group for key, group in self._kept.items() if key in data}
        return int(sizeof(value))

    async def sweep(self, group_id: str) -> None:
        """Free values of a group that no controller told the scheduler about, because it died before it could."""
        data = self.worker.data
        keys = [key for key, group in self._kept.items() if group == group_id and key in data]
        for key in [key for key, group in self._kept.items() if group == group_id]:
            del self._kept[key]
        if not keys:
            return
        try:
            known = await self.worker.scheduler.who_has(keys=keys)
        except OSError:
            return  # without a scheduler the host ends too
        self.free([key for key in keys if not known.get(key)])

    def free(self, keys: Sequence[str]) -> None:
        """Let go of keys that the scheduler never heard of. Call on the event loop."""
        self.worker.handle_stimulus(FreeKeysEvent(keys=list(keys), stimulus_id="dask-controller-free"))

    async def handle_free(self, keys: Sequence[str]) -> str:
        self.free(keys)
        return "OK"

    async def handle_release(self, segments: Sequence[int], limit: int) -> str:
        """A process that fetched by memory has let go of it."""
        own_pool(limit).release(segments)
        return "OK"

    async def handle_rows(self, keys: Sequence[str]) -> dict[str, int | None]:
        """Rows of each key that is here; keys that are not here are left out."""
        data = self.worker.data
        return {key: row_count(data[key]) for key in keys if key in data}

    async def handle_fetch(
        self,
        key: str,
        start: int | None = None,
        stop: int | None = None,
        index: bytes | None = None,
        columns: Sequence[Sequence[Any]] = (),
        hello: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The value of ``key``, or some of its rows and columns, packed; by memory where ``hello`` allows it."""
        link = Link(0 if hello is None else hello["limit"])
        if hello is not None:
            link.meet(hello)
        data = self.worker.data
        if key not in data:
            return {"missing": True}
        value: Any = data[key]

        def prepare() -> dict[str, Any]:
            try:
                return {"value": link.encode(pack(pick_rows(value, start, stop, index, columns)))}
            except ControllerError as error:
                return {"raise": pickle.dumps(error)}
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"}

        if sizeof(value) > _OFFLOAD_BYTES:
            return await asyncio.get_running_loop().run_in_executor(None, prepare)
        return prepare()

    # ------------------------------------------------------------------ leases

    def add_lease(self, lease: Lease) -> None:
        with self.lock:
            self.leases[lease.lease_id] = lease
        self.call_soon(self._lease_event, lease.lease_id)

    def _lease_event(self, lease_id: str) -> None:
        self._lease_waiters.setdefault(lease_id, asyncio.Event()).set()

    def drop_lease(self, lease: Lease) -> None:
        with self.lock:
            self.leases.pop(lease.lease_id, None)
        self.call_soon(self._lease_waiters.pop, lease.lease_id, None)

    async def handle_wait_lease(self, lease_id: str, timeout_s: float) -> bool:
        event = self._lease_waiters.setdefault(lease_id, asyncio.Event())
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except asyncio.TimeoutError:
            self._lease_waiters.pop(lease_id, None)
            return False
        return True

    def task_is_wanted(self, key: str) -> bool:
        """Whether the running task ``key`` has not been cancelled."""
        ts = self.worker.state.tasks.get(key)
        return ts is not None and ts.state not in ("cancelled", "released", "forgotten")


def ensure_service(worker: DaskWorker | None = None) -> HostService:
    """The service of this host; made, and its handlers installed, on first use."""
    worker = worker or get_worker()
    with _services_lock:
        service = _services.get(worker)
        if service is None:
            service = _services[worker] = HostService(worker)
        return service


def install_service(dask_worker: DaskWorker) -> None:
    """Runs on a host, through ``client.run``: makes sure that it can be asked for data."""
    ensure_service(dask_worker)


def services_in_process() -> list[HostService]:
    """Every service of this process: more than one where hosts share a process."""
    with _services_lock:
        return list(_services.values())
