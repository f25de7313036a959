"""The actor that ties a rank to its host.

Owns the life of one rank on one host: it claims the host (and its slot) when Dask makes the actor, hands calls to an
executor in the order they come, answers with outcomes, and gives everything back when the actor goes: because the
group closed, was dropped, or its controller died. Does not own message transport (``runtime/service.py``) or user
code (:mod:`.runner`).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass, replace
from typing import Any

from dask.typing import Key
from distributed import get_worker

from dask_controller.errors import ChunkLostError, PlacementError
from dask_controller.pool.devices import get_device
from dask_controller.runtime.clients import while_host_lives
from dask_controller.runtime.service import (
    HostService,
    Lease,
    Session,
    adopt_worker,
    ensure_service,
    pick_rows,
    row_count,
    services_in_process,
)
from dask_controller.runtime.shm import Link, fetch_link
from dask_controller.worker.context import EnvironmentPatch, RankContext
from dask_controller.worker.executor import InlineExecutor
from dask_controller.worker.failure import describe_failure
from dask_controller.worker.runner import CONSTRUCT, Outcome, ResolvedRef, Work

__all__ = ["CLOSE", "RESERVE_PORT", "HostTakenError", "LeaseGoneError", "RankHost", "RankSpec"]

logger = logging.getLogger(__name__)

#: Calls that the rank itself answers; no user method can have these names.
RESERVE_PORT = "<reserve port>"
CLOSE = "<close>"


class HostTakenError(PlacementError):
    """Another group's rank lives in this process already."""


class LeaseGoneError(PlacementError):
    """The lease of the slot ended before the rank could claim it."""


@dataclass(frozen=True)
class RankSpec:
    """What a host must know to make a rank, before any user code."""

    group_id: str
    group: str
    pool_id: str
    rank: int
    slot: int
    device: int | None = None
    lease_id: str | None = None

    @property
    def rank_id(self) -> str:
        return f"{self.group_id}-{self.rank}"


class RankHost:
    """The Dask actor of one rank. Made by Dask on the rank's host; it lives as long as its future does."""

    def __init__(self, spec: RankSpec) -> None:
        # The service must not refer to this object: Dask dropping the actor is what ends the rank.
        self._rank = Rank(ensure_service(get_worker()), spec)
        self._finalizer = weakref.finalize(self, Rank.close, self._rank)

    def __repr__(self) -> str:
        return f"<rank {self._rank.rank} of group {self._rank.spec.group!r}>"


class Rank:
    """One rank as the host sees it."""

    def __init__(self, service: HostService, spec: RankSpec) -> None:
        self.spec = spec
        self.group_id = spec.group_id
        self.rank = spec.rank
        self.service = service
        self._context: RankContext | None = None
        self._environment: EnvironmentPatch | None = None
        self._port_guard: PortGuard | None = None
        self._state = "made"
        #: The controller's setting; 0 for one on another machine, which says nothing about other hosts on this one.
        self.shared_memory_nbytes = 0
        self._closers: list[tuple[Session, int]] = []
        self._ended = False
        self._lock = threading.Lock()
        self._had_process_group = False
        self._was_daemon = False
        self._lease: Lease | None = None
        self._claim()
        try:
            self._executor = InlineExecutor(f"dask-controller-rank-{spec.rank}", self._prepare, self._on_end)
        except BaseException:
            self._unclaim()
            raise

    # ------------------------------------------------------------------ claiming the host

    def _claim(self) -> None:
        with _claims:
            for service in services_in_process():
                for other in service.ranks.values():
                    same_group = other.group_id == self.group_id
                    if service is self.service or not same_group:
                        spec: RankSpec = other.spec  # type: ignore[attr-defined]
                        raise HostTakenError(
                            f"host {self.service.address} (pid {os.getpid()}) already carries rank {spec.rank} of "
                            f"group {spec.group!r}; the inline executor puts one rank of one group in a process"
                        )
            if self.spec.lease_id is not None:
                with self.service.lock:
                    lease = self.service.leases.get(self.spec.lease_id)
                    if lease is None or lease.ended.is_set():
                        raise LeaseGoneError(f"the lease of a slot on {self.service.address} ended before it was used")
                    lease.ranks.add(self.spec.rank_id)
                self._lease = lease
            self.service.ranks[(self.group_id, self.rank)] = self

    def _unclaim(self) -> None:
        with _claims:
            self.service.ranks.pop((self.group_id, self.rank), None)
            if self._lease is not None:
                with self.service.lock:
                    self._lease.release(self.spec.rank_id)

    # ------------------------------------------------------------------ on the rank's thread

    def _prepare(self) -> None:
        adopt_worker(self.service.worker)
        self._had_process_group = _process_group_exists()
        self._was_daemon = _set_daemon(False)

    def _on_end(self) -> None:
        try:
            if not self._had_process_group and _process_group_exists():
                # The next group in this process must be able to call init_process_group.
                import torch.distributed as dist

                dist.destroy_process_group()
        except Exception:
            logger.warning("could not destroy the process group of rank %d", self.rank, exc_info=True)
        finally:
            if self._was_daemon:
                _set_daemon(True)
            if self._environment is not None:
                self._environment.restore()
            if self._port_guard is not None:
                self._port_guard.close()
            self._state = "closed"
            self._unclaim()
            self.service.call_soon(self._report_closed)

    def _report_closed(self) -> None:
        for session, call_id in self._closers:
            session.send({"id": call_id, "rank": self.rank, "value": encode_none()})
        self._closers.clear()

    # ------------------------------------------------------------------ on the host's event loop

    def receive(self, call: dict[str, Any], session: Session) -> None:
        """Take a call off the wire. Calls are carried out in the order of this method."""
        method = call["method"]
        call_id = call["id"]
        if method == RESERVE_PORT:
            self._reserve_port(call, session)
            return
        if method == CLOSE:
            if self._state == "closed":
                session.send({"id": call_id, "rank": self.rank, "value": encode_none()})
            else:
                self._closers.append((session, call_id))
                self.close()
            return
        if method == CONSTRUCT:
            self._configure(call["context"])
        values = call["values"]
        refs: ConcurrentFuture[list[list[ResolvedRef]]] | None = None
        if any(value.get("refs") for value in values):
            refs = ConcurrentFuture()
            self.service.run_coroutine(self._bring(call, values, refs))
        packed = [session.link.decode(value["value"]) for value in values]
        work = Work(
            call_id=call_id,
            method=method,
            values=packed,
            refs=[()] * len(packed),
            args=call["args"],
            kwargs=call["kwargs"],
            out=call["out"],
            borrowed=session.shares_memory,
            context=self._context,
        )
        key = call.get("key")
        work.reply = lambda outcome: self._answer(session, call_id, key, outcome)
        self._executor.submit(work, refs)

    def _configure(self, context: dict[str, Any]) -> None:
        self.shared_memory_nbytes = context.pop("shared_memory_nbytes")
        self._context = replace(RankContext(**context), host=self.service.address)
        self._state = "ready"
        if len(services_in_process()) == 1:
            self._environment = EnvironmentPatch(self._context.environment())
            self._environment.apply()
        device = get_device(self._context.device)
        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)

    def _reserve_port(self, call: dict[str, Any], session: Session) -> None:
        from dask_controller.protocol.serialize import pack

        try:
            self._port_guard, port = reserve_port(call["context"].get("ports"))
            answer: dict[str, Any] = {"value": session.link.encode(pack((_host_ip(self.service.address), port)))}
        except OSError as error:
            answer = {"failure": describe_failure(error)}
        session.send({"id": call["id"], "rank": self.rank, **answer})

    def _answer(self, session: Session, call_id: int, key: str | None, outcome: Outcome) -> None:
        """Take an outcome from the thread that ran the call."""
        value = None
        if outcome.packed is not None and not session.closed:
            # Here, for a hand-over by memory copies: the host's event loop has better things to do.
            packed = outcome.packed.copied() if session.shares_memory else outcome.packed
            value = session.link.encode(packed)
        self.service.call_soon(self._reply, session, call_id, key, outcome, value)

    def _reply(self, session: Session, call_id: int, key: str | None, outcome: Outcome, value: Any) -> None:
        message: dict[str, Any] = {"id": call_id, "rank": self.rank}
        if self.service.is_paused:
            message["paused"] = True
        if outcome.failure is not None:
            message["failure"] = outcome.failure
        elif outcome.is_kept and session.closed:
            return  # nobody is left to tell the scheduler about it
        elif outcome.is_kept:
            assert key is not None
            kept = outcome.kept
            kind = type(kept)
            message["kept"] = {
                "nbytes": self.service.store(key, kept, self.group_id),
                "rows": row_count(kept),
                "type": f"{kind.__module__}.{kind.__qualname__}",
            }
        elif value is not None:
            message["value"] = value
        session.send(message)

    async def _bring(
        self, call: dict[str, Any], values: Sequence[Any], refs: ConcurrentFuture[list[list[ResolvedRef]]]
    ) -> None:
        try:
            plans = [value.get("refs") or () for value in values]
            resolved = [[await self._bring_ref(plan, call["method"]) for plan in of_value] for of_value in plans]
            refs.set_result(resolved)
        except BaseException as error:
            refs.set_exception(error)
            if not isinstance(error, Exception):
                raise

    async def _bring_ref(self, plan: dict[str, Any], method: str) -> ResolvedRef:
        async def strand(description: dict[str, Any]) -> tuple[tuple[Any, ...], bytes | None]:
            columns = description["columns"]
            pieces = await asyncio.gather(
                *(self._bring_piece(*piece, columns=columns, method=method) for piece in description["pieces"])
            )
            return tuple(pieces), description["order"]

        strands = await asyncio.gather(*(strand(description) for description in plan["strands"]))
        return ResolvedRef(tuple(strands), plan["is_batch"])

    async def _bring_piece(
        self,
        key: Key,
        address: str,
        start: int | None,
        stop: int | None,
        index: bytes | None,
        origin: str,
        producer: int,
        *,
        columns: Sequence[Sequence[Any]],
        method: str,
    ) -> Any:
        worker = self.service.worker
        tried = []
        for attempt in range(3):
            if key in worker.data:
                return pick_rows(worker.data[key], start, stop, index, columns)
            if address != self.service.address:
                tried.append(address)
                try:
                    answer = await while_host_lives(
                        worker.rpc(address).dask_controller_fetch(
                            key=key, start=start, stop=stop, index=index, columns=columns, hello=self._hello()
                        ),
                        worker.scheduler,
                        address,
                    )
                except OSError as error:
                    logger.info("fetching %s from %s failed: %s", key, address, error)
                    answer = {"missing": True}
                if answer is not None and "value" in answer:
                    try:
                        return self._fetched(address, answer["value"])
                    except OSError:
                        # That host's memory cannot be opened from here; ask again for the bytes.
                        self.shared_memory_nbytes = 0
                        tried.pop()
                        continue
                if answer is not None and "raise" in answer:
                    raise pickle.loads(answer["raise"])
                if answer is not None and "error" in answer:
                    raise ChunkLostError(
                        f"rank {self.rank} on {self.service.address} could not get {origin} for {method}(): its host "
                        f"{address} cannot send it ({answer['error']})",
                        method,
                        str(key),
                        producer,
                        address,
                    )
            if attempt < 2:
                # Dask may have moved the key (rebalance, a retiring host).
                who_has = await worker.scheduler.who_has(keys=[key])
                address = next((a for a in who_has.get(key, ()) if a not in tried), address)
        raise ChunkLostError(
            f"rank {self.rank} on {self.service.address} could not get {origin} for {method}(): host {address} does "
            "not have it any more. The host was lost or the future was released; run the producing call again",
            method,
            str(key),
            producer,
            address,
        )

    def _hello(self) -> dict[str, Any]:
        limit = self.shared_memory_nbytes
        return {**Link(limit).hello(), "limit": limit}

    def _fetched(self, address: str, value: Any) -> Any:
        worker, limit = self.service.worker, self.shared_memory_nbytes

        async def release(segment: int) -> None:
            await worker.rpc(address).dask_controller_release(segments=[segment], limit=limit)

        return fetch_link(limit, self.service.loop, release).decode(value)

    # ------------------------------------------------------------------ end and state

    def close(self) -> None:
        """Begin to end. Returns at once, from any thread; the slot is given back when the current call is over."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if self._state != "closed":
            self._state = "closing"
        self._executor.stop()

    def status(self) -> dict[str, Any]:
        """Plain facts about the rank, without waiting for it."""
        now = time.monotonic()
        return {
            "group_id": self.group_id,
            "group": self.spec.group,
            "pool_id": self.spec.pool_id,
            "rank": self.rank,
            "slot": self.spec.slot,
            "device": self.spec.device,
            "host": self.service.address,
            "pid": os.getpid(),
            "state": self._state,
            "running": [{"method": r.method, "seconds": now - r.since} for r in self._executor.running()],
            "queued": self._executor.queued(),
        }


_claims = threading.Lock()


def encode_none() -> Any:
    from dask_controller.protocol.serialize import pack

    return pack(None).header


def _set_daemon(daemon: bool) -> bool:
    """Say whether this process counts as a daemon; returns whether it did.

    Nannies start hosts as daemons, which multiprocessing forbids children of their own: a DataLoader with workers would
    fail on a rank. The flag has no other use in the process itself, and the public setter refuses once it has started.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = bool(config.get("daemon"))
    if before != daemon:
        config["daemon"] = daemon
    return before


def _process_group_exists() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _host_ip(address: str) -> str:
    if "://" not in address or address.startswith("inproc"):
        return "127.0.0.1"
    return address.split("://", 1)[1].rsplit(":", 1)[0].strip("[]")


@dataclass(frozen=True)
class PortGuard:
    """Sockets that keep a port for a group until it closes."""

    guard: socket.socket
    mark: socket.socket | None

    def close(self) -> None:
        self.guard.close()
        if self.mark is not None:
            self.mark.close()


def _port_mark(port: int) -> socket.socket | None:
    """Tell other groups of this node that ``port`` is taken; OSError where one of them has it.

    Two guard sockets may be bound to one port, for both allow reuse. A name in the abstract socket namespace can
    be bound once only, and the kernel drops it with the process.
    """
    if not sys.platform.startswith("linux"):
        return None
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(f"\0dask-controller-port-{port}")
    except OSError:
        mark.close()
        raise
    return mark


def reserve_port(ports: Sequence[int] | None) -> tuple[PortGuard, int]:
    """Bind a port for a later ``init_process_group`` and hold it until then.

    The guard socket has ``SO_REUSEADDR`` and never listens: the kernel gives the port to nobody who asks for any
    free one, while torch's store, which asks for this one with ``SO_REUSEADDR``, may still listen on it.

    Parameters
    ----------
    ports : (int, int), optional
        First and last port to try; any free port if None.

    Raises
    ------
    OSError
        No port of the range is free.
    """
    for candidate in [0] * 20 if ports is None else range(ports[0], ports[1] + 1):
        guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            guard.bind(("", candidate))
            port = guard.getsockname()[1]
            return PortGuard(guard, _port_mark(port)), port
        except OSError:
            guard.close()
    raise OSError(
        f"no free port for the rendezvous in {ports}: widen controller.master-port-range in dask's configuration, or "
        "free a port on this node"
    )
