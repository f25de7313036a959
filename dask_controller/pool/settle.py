"""Keeping, or renewing, the slots that pools have chosen.

Owns what happens between two groups on one pool: slots stay as long as they can be used, and are chosen again, for
several pools together if need be, once they cannot. Does not own the rules for a single choice (:mod:`.placement`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dask_controller.errors import PlacementError
from dask_controller.pool.hosts import HostInfo, Slot, SlotsPerHost
from dask_controller.pool.placement import check_slots, choose_slots, give_devices

if TYPE_CHECKING:
    from dask_controller.pool.pool import DaskResourcePool

__all__ = ["Seat", "choose_together", "choosing", "roots_of", "settle"]

#: A slot of a pool: the pool that chooses it, and its place there.
Seat: TypeAlias = "tuple[DaskResourcePool, int]"

#: One lock for all pools: parts and merged pools choose for several pools at once, and choosing is short and local.
choosing = threading.RLock()


def roots_of(seats: Iterable[Seat]) -> list[DaskResourcePool]:
    """The pools that choose.

    Parameters
    ----------
    seats : iterable of (DaskResourcePool, int)
        Slots of a pool.

    Returns
    -------
    list of DaskResourcePool
        Each once, in the order in which they come up.
    """
    return list({root.pool_id: root for root, _ in seats}.values())


def settle(seats: Sequence[Seat], hosts: Sequence[HostInfo], slots_per_host: SlotsPerHost) -> list[Slot]:
    """Slots on which one more group can sit. Changes the pools' choices, or raises and changes nothing.

    Parameters
    ----------
    seats : sequence of (DaskResourcePool, int)
        What the group is to sit on, in rank order.
    hosts : sequence of HostInfo
        All hosts of the cluster.
    slots_per_host : {"one", "resource"}
        See :func:`~dask_controller.pool.placement.choose_slots`.

    Returns
    -------
    list of Slot
        One per seat, numbered as in the pool that chose it.

    Raises
    ------
    PlacementError
        As :meth:`DaskResourcePool.slots`.

    Notes
    -----
    Pools with live groups keep their slots. The others keep theirs if they can; all that cannot choose together,
    because one after the other could leave no room for the last.
    """
    roots = roots_of(seats)
    live = {claim.pool_id for host in hosts for claim in host.claims}
    reserved: set[tuple[str, int]] = set()
    to_choose: list[DaskResourcePool] = []
    for root in sorted(roots, key=lambda root: root._slots is None or root.pool_id not in live):
        if root._slots is None:
            to_choose.append(root)
            continue
        wanted = [root._slots[i] for other, i in seats if other.pool_id == root.pool_id]
        shared = slots_per_host == "resource" and not root.use_gpu
        try:
            check_slots(
                hosts,
                wanted,
                resource_name=root._slot_resource,
                slots_per_host=slots_per_host,
                max_colocate_count=root.max_colocate_count,
                reserved=() if shared else reserved,
            )
        except PlacementError:
            if root.pool_id in live:
                raise
            to_choose.append(root)
        else:
            # Hosts that came since may share the machine, and its devices are dealt out again among slots not in use.
            root._slots = tuple(give_devices(hosts, root._slots, root._slot_resource))
            reserved.update((slot.address, slot.index) for slot in wanted)
    if to_choose:
        # The order of the roots, which sorting by liveness has changed, is the order of ranks.
        choose_together([root for root in roots if root in to_choose], hosts, slots_per_host, reserved)
    chosen = {root.pool_id: root._slots or () for root in roots}
    return [chosen[root.pool_id][i] for root, i in seats]


def choose_together(
    roots: Sequence[DaskResourcePool],
    hosts: Sequence[HostInfo],
    slots_per_host: SlotsPerHost,
    reserved: Iterable[tuple[str, int]] = (),
) -> None:
    """Choose the slots of several pools at once, so that all of them fit or none is changed.

    Parameters
    ----------
    roots : sequence of DaskResourcePool
        Pools that choose their own slots, use the same resource and have no live group.
    hosts : sequence of HostInfo
        All hosts of the cluster.
    slots_per_host : {"one", "resource"}
        See :meth:`DaskResourcePool.slots`.
    reserved : iterable of (str, int)
        ``(address, index)`` of slots to leave alone.

    Raises
    ------
    InsufficientResourcesError
        They do not fit together.
    """
    first = roots[0]
    with choosing:
        chosen = choose_slots(
            hosts,
            [count for root in roots for count in root._store],
            pool_id=first.pool_id if len(roots) == 1 else " + ".join(root.name_prefix for root in roots),
            resource_name=first._slot_resource,
            slots_per_host=slots_per_host,
            max_colocate_count=first.max_colocate_count,
            reserved=() if slots_per_host == "resource" and not first.use_gpu else frozenset(reserved),
        )
        for root in roots:
            mine, chosen = chosen[: root.world_size], chosen[root.world_size :]
            root._slots = tuple(replace(slot, pool_id=root.pool_id) for slot in mine)
