"""How a group comes to be, and how it ends.

Owns the order of things: choose slots, take leases, make the actors, open channels, agree on a rendezvous, build the
user's objects on all ranks at the same time; and the way back, from any point. Does not own which slots are right
(``pool/``) or what a call is (:mod:`.engine`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Client, Future

from dask_controller.config import get_nbytes, get_port_range, get_route, get_seconds
from dask_controller.errors import (
    GroupStartTimeoutError,
    InsufficientResourcesError,
    PlacementError,
    ProtectedVariableError,
    RankFailedError,
    RankTimeoutError,
    RegistrationError,
)
from dask_controller.group.class_args import DaskClassWithInitArgs
from dask_controller.group.engine import Engine
from dask_controller.pool.hosts import Slot
from dask_controller.pool.lease import hold_slot
from dask_controller.pool.pool import DaskResourcePool
from dask_controller.runtime import pending
from dask_controller.runtime.channel import Channel, call_host, open_channel
from dask_controller.runtime.futures import wait_done
from dask_controller.runtime.probe import check_versions, probe_hosts
from dask_controller.runtime.tasks import thread_released
from dask_controller.worker.context import RankContext, protected_variables
from dask_controller.worker.host import CLOSE, RESERVE_PORT, HostTakenError, LeaseGoneError, RankHost, RankSpec
from dask_controller.worker.runner import CONSTRUCT

__all__ = ["Members", "attach", "check_worker_env", "shut_down", "start_group"]

logger = logging.getLogger(__name__)

#: Pause between two looks for free slots, in seconds.
_PLACEMENT_POLL_S = 0.25
#: How much longer than its time limit the answer of a host may take, in seconds.
_SILENCE_S = 5.0
#: Leases and actors go before waiting tasks: a group that has half its ranks holds slots for nothing.
_PRIORITY = 1_000


@dataclass
class Members:
    """What keeps a group alive on the cluster."""

    engine: Engine
    slots: list[Slot]
    actors: list[Future[Any]] = field(default_factory=list)
    leases: list[Future[Any]] = field(default_factory=list)
    master_addr: str = ""
    master_port: int = 0
    watcher: asyncio.Task[None] | None = None


def check_worker_env(worker_env: Mapping[str, str] | None) -> dict[str, str]:
    """Refuse variables that belong to the group.

    Raises
    ------
    ProtectedVariableError
        Names the protected variables that were given.
    """
    out: dict[str, str] = {}
    taken = sorted(set(worker_env or ()) & set(protected_variables()))
    if taken:
        raise ProtectedVariableError(
            f"worker_env may not set {', '.join(taken)}: the group sets them for each rank. Leave them out; the "
            "rendezvous can be chosen with master_addr= and master_port="
        )
    for name, value in (worker_env or {}).items():
        if not isinstance(name, str) or not name or "=" in name:
            raise RegistrationError(f"worker_env has a variable with the bad name {name!r}")
        out[name] = str(value)
    return out


def start_group(
    client: Client,
    pool: DaskResourcePool,
    cia: DaskClassWithInitArgs,
    *,
    name: str,
    worker_env: Mapping[str, str],
    master_addr: str | None,
    master_port: int | None,
    timeout_s: float,
    placement_timeout_s: float,
) -> Members:
    """Make every rank of a group. Blocks until all ``__init__`` have returned; undoes everything if one fails."""
    deadline = time.monotonic() + timeout_s
    with thread_released():
        pending.install_plugin(client)
        members = _place(client, pool, cia, name, deadline, min(placement_timeout_s, timeout_s))
        try:
            _left(deadline, name, "making its ranks")
            client.sync(_open_channels, members)
            _rendezvous(members, master_addr, master_port, deadline)
            _construct(members, cia, worker_env, deadline)
        except BaseException:
            shut_down(members, wait_s=get_seconds("close-timeout") or 0.0)
            raise
    return members


def _left(deadline: float, name: str, doing: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise GroupStartTimeoutError(
            f"group {name!r} was not up in time; the limit passed while {doing}. Raise start_timeout_s= or "
            "controller.start-timeout, or look at the hosts on the Dask dashboard"
        )
    return left


# ---------------------------------------------------------------------- slots, leases, actors


def _place(
    client: Client, pool: DaskResourcePool, cia: DaskClassWithInitArgs, name: str, deadline: float, patience_s: float
) -> Members:
    give_up = time.monotonic() + patience_s
    while True:
        left = _left(deadline, name, "looking for free slots")
        try:
            slots = _choose(client, pool, left)
            members: Members = client.sync(
                _occupy, client, pool, cia, name, slots, min(left, give_up - time.monotonic())
            )
            return members
        except InsufficientResourcesError as error:
            if not getattr(error, "possible", True) or time.monotonic() >= give_up:
                raise
        except (HostTakenError, LeaseGoneError) as error:
            # Somebody was faster between the look and the claim; look again.
            if time.monotonic() >= give_up:
                raise InsufficientResourcesError(
                    f"group {name!r} found no free slots within {patience_s:g} s: {error}. Close the other group, or "
                    "make one group of both roles with create_colocated_worker_cls",
                    pool.world_size,
                ) from error
        time.sleep(_PLACEMENT_POLL_S)


def _choose(client: Client, pool: DaskResourcePool, timeout_s: float) -> list[Slot]:
    info: dict[str, Any] = client.scheduler_info(n_workers=-1)
    addresses = list(info["workers"])
    if not addresses:
        raise _no_hosts(pool)
    hosts, raw = probe_hosts(client, addresses, min(timeout_s, get_seconds("probe-timeout") or 60.0))
    slots = pool.slots(hosts, slots_per_host="one")
    check_versions(raw, [slot.address for slot in slots])
    return slots


def _no_hosts(pool: DaskResourcePool) -> InsufficientResourcesError:
    return InsufficientResourcesError(
        f"the cluster has no Dask workers, and the pool needs {pool.world_size}; start workers (cluster.scale) and "
        "wait for them (client.wait_for_workers)",
        pool.world_size,
    )


async def _occupy(
    client: Client,
    pool: DaskResourcePool,
    cia: DaskClassWithInitArgs,
    name: str,
    slots: list[Slot],
    timeout_s: float,
) -> Members:
    engine = Engine(client, name, [slot.address for slot in slots])
    members = Members(engine, slots)
    try:
        lease_ids = await _take_leases(client, pool, cia, members, timeout_s)
        members.actors = [
            client.submit(
                RankHost,
                RankSpec(engine.group_id, name, slot.pool_id, rank, slot.index, slot.device, lease_ids.get(rank)),
                actor=True,
                workers=[slot.address],
                allow_other_workers=False,
                pure=False,
                key=f"rank-{engine.group_id}-{rank}",
                priority=_PRIORITY,
                **{k: v for k, v in cia.options.items() if k != "priority"},
            )
            for rank, slot in enumerate(slots)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*(wait_done(f, client) for f in members.actors)), max(timeout_s, 1.0))
        except asyncio.TimeoutError:
            late = [f"{s.address} (rank {r})" for r, s in enumerate(slots) if not members.actors[r].done()]
            raise GroupStartTimeoutError(
                f"group {name!r} could not start ranks on {', '.join(late)} within {timeout_s:.1f} s: those hosts are "
                "paused, stopped, or all their threads run long tasks"
            ) from None
        return members
    except BaseException:
        _release(members)
        raise


async def _take_leases(
    client: Client, pool: DaskResourcePool, cia: DaskClassWithInitArgs, members: Members, timeout_s: float
) -> dict[int, str]:
    resources = dict(cia.additional_resources)
    if pool.use_gpu:
        resources[pool.resource_name] = 1
    if not resources:
        return {}
    ids: dict[int, str] = {}
    for rank, slot in enumerate(members.slots):
        lease_id = f"{slot.pool_id}-{uuid.uuid4().hex[:8]}"
        key = f"slot-{lease_id}"
        ids[rank] = lease_id
        members.leases.append(
            client.submit(
                hold_slot,
                lease_id,
                slot.pool_id,
                key,
                key=key,
                workers=[slot.address],
                allow_other_workers=False,
                resources=resources,
                pure=False,
                priority=_PRIORITY,
            )
        )
    granted = await asyncio.gather(
        *(_wait_lease(client, slot.address, ids[rank], max(timeout_s, 1.0)) for rank, slot in enumerate(members.slots))
    )
    missing = [slot.address for slot, ok in zip(members.slots, granted, strict=True) if not ok]
    if missing:
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in resources.items())
        raise InsufficientResourcesError(
            f"group {members.engine.name!r} waited {timeout_s:.1f} s for {wanted} on {', '.join(missing)}: a task or "
            "another group holds it, or no thread of that host is free",
            len(members.slots),
            len(members.slots),
            len(members.slots) - len(missing),
        )
    return ids


async def _wait_lease(client: Client, address: str, lease_id: str, timeout_s: float) -> bool:
    request = call_host(client, address, "wait_lease", route="scheduler", lease_id=lease_id, timeout_s=timeout_s)
    try:
        # The host keeps the time; the margin is for one that has been stopped and keeps none.
        return bool(await asyncio.wait_for(request, timeout_s + _SILENCE_S))
    except asyncio.TimeoutError:
        raise PlacementError(
            f"host {address} answered when it was asked what it offers, and then no more: it is stopped or overloaded"
        ) from None
    except OSError as error:
        raise PlacementError(f"host {address} was lost while the group was being made: {error}") from error


# ---------------------------------------------------------------------- channels and the ranks' objects


async def _open_channels(members: Members) -> None:
    engine = members.engine
    route = get_route()
    timeout_s = get_seconds("connect-timeout") or 5.0
    addresses = list(dict.fromkeys(engine.hosts))
    try:
        channels: list[Channel] = await asyncio.gather(
            *(
                open_channel(
                    engine.client,
                    address,
                    engine.group_id,
                    engine.on_message,
                    engine.host_lost,
                    route=route,
                    timeout_s=timeout_s,
                    shared_memory_nbytes=get_nbytes("shared-memory-limit"),
                )
                for address in addresses
            )
        )
    except (OSError, asyncio.TimeoutError) as error:
        raise PlacementError(
            f"group {engine.name!r} cannot reach its hosts directly ({error}). Set controller.route to 'auto' or "
            "'scheduler' to go through the scheduler"
        ) from error
    engine.channels = dict(zip(addresses, channels, strict=True))
    routes = {channel.route for channel in channels}
    engine.route = "scheduler" if "scheduler" in routes else "direct"
    logger.info("group %r talks to its %d hosts by route %r", engine.name, len(addresses), engine.route)
    members.watcher = asyncio.ensure_future(_watch(engine, members.actors))


async def _watch(engine: Engine, actors: Sequence[Future[Any]]) -> None:
    """Notice losses that a connection does not show: a cut network, a scheduler that dropped the host."""
    interval_s = get_seconds("watch-interval") or 1.0
    while not engine.closed and not engine.lost:
        await asyncio.sleep(interval_s)
        await engine.watch_paused()
        for rank, actor in enumerate(actors):
            if engine.closed:
                return
            if actor.status in ("error", "lost", "cancelled"):
                engine.host_lost(engine.hosts[rank], f"the scheduler says that its actor is {actor.status}")


def _rendezvous(members: Members, master_addr: str | None, master_port: int | None, deadline: float) -> None:
    engine = members.engine
    if master_addr is None or master_port is None:
        ports = get_port_range()
        call, _ = engine.issue(RESERVE_PORT, [0], [], {}, blocking=True, context=[{"ports": ports}])
        try:
            address, port = engine.wait(call, _left(deadline, engine.name, "agreeing on a port"))[0]
        except RankTimeoutError as error:
            raise GroupStartTimeoutError(
                f"group {engine.name!r} was not up in time: the host of rank 0, {engine.hosts[0]}, did not answer when "
                "asked for a port. It is stopped or overloaded"
            ) from error
        except RankFailedError as error:
            raise PlacementError(
                f"group {engine.name!r} has no rendezvous on the host of rank 0, {engine.hosts[0]}: {error.failures[0]}"
            ) from error
        master_addr = master_addr or address
        master_port = master_port or port
    members.master_addr, members.master_port = str(master_addr), int(master_port)


def _construct(members: Members, cia: DaskClassWithInitArgs, worker_env: Mapping[str, str], deadline: float) -> None:
    engine = members.engine
    ranks = list(range(engine.world_size))
    shared_memory_nbytes = get_nbytes("shared-memory-limit")
    contexts = [
        asdict(
            RankContext(
                rank=rank,
                world_size=engine.world_size,
                local_rank=slot.local_rank,
                local_world_size=slot.local_world_size,
                node_rank=slot.node_rank,
                master_addr=members.master_addr,
                master_port=members.master_port,
                group=engine.name,
                device=slot.device,
                worker_env=dict(worker_env),
            )
        )
        | {"shared_memory_nbytes": shared_memory_nbytes}
        for rank, slot in enumerate(members.slots)
    ]
    n = len(ranks)
    call, _ = engine.issue(
        CONSTRUCT,
        ranks,
        [[cia.cls] * n, [cia.args] * n, [cia.kwargs] * n],
        {},
        blocking=True,
        collect=[False] * n,
        context=contexts,
    )
    limit_s = _left(deadline, engine.name, "building the ranks' objects")
    try:
        engine.wait(call, limit_s)
    except RankTimeoutError as error:
        raise GroupStartTimeoutError(
            f"__init__ of group {engine.name!r} did not return on ranks {list(error.pending)} within {limit_s:.0f} s "
            f"(done on {list(error.finished)}). If it calls init_process_group, all ranks must reach it. Raise "
            "start_timeout_s= or controller.start-timeout"
        ) from error


def attach(
    client: Client, record: Mapping[str, Any], actors: Sequence[Future[Any]], leases: Sequence[Future[Any]]
) -> Members:
    """Talk to the ranks of a group that another program made."""
    with thread_released():
        pending.install_plugin(client)
        slots = [Slot(**slot) for slot in record["slots"]]
        engine = Engine(client, record["name"], [slot.address for slot in slots], group_id=record["group_id"])
        members = Members(engine, slots, list(actors), list(leases), record["master_addr"], record["master_port"])
        # A host that is gone has no service, and probing also makes sure that the others have one.
        known: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
        for rank, address in enumerate(engine.hosts):
            if address not in known:
                engine.lost[rank] = address
                engine.lost_reason = "the host has left the cluster"
        if engine.lost:
            from dask_controller.group.call import lost_error

            raise lost_error("", engine.name, engine.lost, engine.lost_reason)
        try:
            client.sync(_open_channels, members)
        except BaseException:
            shut_down(members, wait_s=0, end_ranks=False)
            raise
    return members


# ---------------------------------------------------------------------- the end


def _release(members: Members) -> None:
    # Dropping the futures is what tells Dask to drop the actors and leases.
    for future in members.actors + members.leases:
        future.release()
    members.actors, members.leases = [], []


def shut_down(members: Members, wait_s: float, end_ranks: bool = True) -> None:
    """End a group, or only this program's connection to it. May be called on any thread, any number of times.

    Parameters
    ----------
    members : Members
        The group.
    wait_s : float
        How long to wait for ranks to finish their current call; 0 returns at once.
    end_ranks : bool
        False leaves the ranks alive (detached groups).
    """
    engine = members.engine
    if engine.closed:
        return
    loop = engine.loop
    client = engine.client
    if client.status not in ("running", "connecting") or loop.is_closed():
        engine.closed = True
        return
    coroutine = _shut_down(members, wait_s, end_ranks)
    try:
        running: Any = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        asyncio.ensure_future(coroutine)
        return
    try:
        finished = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        return
    if wait_s:
        try:
            finished.result(timeout=wait_s + 5)
        except Exception:
            logger.warning("group %r did not close in order", engine.name, exc_info=True)


async def _shut_down(members: Members, wait_s: float, end_ranks: bool) -> None:
    engine = members.engine
    if engine.closed:
        return
    from dask_controller.errors import GroupClosedError

    closing = None
    if end_ranks and engine.channels:
        alive = [rank for rank in range(engine.world_size) if rank not in engine.lost]
        closing = engine.close_ranks(CLOSE, alive)
    engine.closed = True
    if closing is not None and wait_s:
        done, late = await asyncio.wait([asyncio.wrap_future(closing.done)], timeout=wait_s)
        if late:
            logger.warning(
                "ranks %s of group %r still run a call after %.0f s; their slots are freed when it ends",
                sorted(closing.pending),
                engine.name,
                wait_s,
            )
        for task in done | late:
            task.cancel() if not task.done() else task.exception()
    engine.abandon_calls(GroupClosedError(f"group {engine.name!r} was closed while the call was running"))
    if members.watcher is not None:
        members.watcher.cancel()
    _release(members)
    await engine.close_channels()
