"""Which slots a pool gets.

Owns :func:`choose_slots`, :func:`give_devices` and :func:`check_slots`: pure functions from plain facts about hosts to
slots, the same for the same facts in any order. Does not gather the facts (``runtime/probe.py``), does not hold the
slots (:mod:`.lease`), and keeps no memory of earlier choices (:mod:`.settle`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from dask_controller.errors import InsufficientResourcesError, PlacementError
from dask_controller.pool.devices import assign_devices
from dask_controller.pool.hosts import Claim, HostInfo, Slot, SlotsPerHost, hosts_by_node, slot_count, whole_slots
from dask_controller.pool.offers import Request, fits_when_free, free_by_count, groups_on, plan
from dask_controller.pool.shortage import describe_claims, describe_holders, explain_held, explain_shortage

__all__ = [
    "Claim",
    "HostInfo",
    "Slot",
    "SlotsPerHost",
    "check_slots",
    "choose_slots",
    "explain_shortage",
    "give_devices",
    "is_possible",
]


def choose_slots(
    hosts: Sequence[HostInfo],
    process_on_nodes: Sequence[int],
    *,
    pool_id: str,
    resource_name: str | None,
    slots_per_host: SlotsPerHost,
    max_colocate_count: int,
    reserved: Collection[tuple[str, int]] = (),
) -> list[Slot]:
    """Choose a slot for every rank of a pool.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster, in any order; addresses are unique.
    process_on_nodes : sequence of int
        Slots per logical node, each at least 1.
    pool_id : str
        Id of the pool. Slots that its own groups sit on stay usable up to ``max_colocate_count``.
    resource_name : str or None
        The Dask resource that makes slots, one for each whole unit. None for pools without accelerator.
    slots_per_host : {"one", "resource"}
        ``"one"``: a host carries one rank, and none while a live group sits on it or in its process (inline
        executor). ``"resource"``: as many as it declares, or any number without ``resource_name``, spread evenly
        (process executor).
    max_colocate_count : int
        Groups that may share a slot.
    reserved : collection of (str, int)
        ``(address, index)`` of slots that are promised to others, though no claim shows it yet.

    Returns
    -------
    list of Slot
        In rank order: by entry, inside an entry by device, then host. An entry lies on one machine. Entries lie on
        machines of their own where there are enough, else several share one.

    Raises
    ------
    InsufficientResourcesError
        The pool does not fit; names what is asked, present, free and held by whom. Its attribute ``possible`` says
        whether it would fit once everything is free.

    Notes
    -----
    Machines are taken tightest fit first and then put in order, so a pool leaves room for larger ones and its ranks
    follow the natural order of machine, device and host name. Nothing is sent and nothing is held: two pools that
    choose at the same time can choose the same slot, and the lease decides.
    """
    entries = plan(
        hosts,
        Request(
            tuple(process_on_nodes), pool_id, resource_name, slots_per_host, max_colocate_count, frozenset(reserved)
        ),
    )
    if entries is None:
        raise explain_shortage(
            hosts,
            process_on_nodes,
            pool_id=pool_id,
            resource_name=resource_name,
            slots_per_host=slots_per_host,
            max_colocate_count=max_colocate_count,
            reserved=frozenset(reserved),
        )
    slots = [
        Slot(
            address=host.address,
            node=host.node,
            pool_id=pool_id,
            node_rank=node_rank,
            local_rank=local_rank,
            local_world_size=len(entry),
            index=index,
        )
        for node_rank, entry in enumerate(entries)
        for local_rank, (host, index) in enumerate(entry)
    ]
    return give_devices(hosts, slots, resource_name)


def give_devices(hosts: Sequence[HostInfo], slots: Sequence[Slot], resource_name: str | None) -> list[Slot]:
    """Say which device each slot uses, as the hosts are now.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster.
    slots : sequence of Slot
        Slots on some of them.
    resource_name : str or None
        See :func:`choose_slots`; without it no slot has a device.

    Returns
    -------
    list of Slot
        The same slots with ``device`` set. A slot on which a group of its own pool sits, or whose host is gone, is
        left as it is.
    """
    if resource_name is None:
        return list(slots)
    known = {host.address: host for host in hosts}
    machines = hosts_by_node(hosts)
    devices: dict[tuple[str, int], int | None] = {}
    for node in dict.fromkeys(slot.node for slot in slots if slot.address in known):
        devices.update(assign_devices(machines[node], resource_name))

    def in_use(slot: Slot) -> bool:
        return slot.device is not None and bool(groups_on(known[slot.address], slot.pool_id, slot.index))

    return [
        slot
        if slot.address not in known or in_use(slot)
        else replace(slot, device=devices.get((slot.address, slot.index), slot.device))
        for slot in slots
    ]


def is_possible(
    hosts: Sequence[HostInfo],
    process_on_nodes: Sequence[int],
    *,
    resource_name: str | None,
    slots_per_host: SlotsPerHost,
) -> bool:
    """Whether a pool would fit if nothing else ran on the cluster.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster.
    process_on_nodes : sequence of int
        Slots per logical node.
    resource_name : str or None
        See :func:`choose_slots`.
    slots_per_host : {"one", "resource"}
        See :func:`choose_slots`.

    Returns
    -------
    bool
        False means that waiting for others to finish cannot help.
    """
    return fits_when_free(hosts, process_on_nodes, resource_name, slots_per_host)


def check_slots(
    hosts: Sequence[HostInfo],
    slots: Sequence[Slot],
    *,
    resource_name: str | None,
    slots_per_host: SlotsPerHost,
    max_colocate_count: int,
    reserved: Collection[tuple[str, int]] = (),
) -> None:
    """Check that one more group can sit on slots that were chosen earlier.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster, as they are now.
    slots : sequence of Slot
        The slots that the group would take, at least one, all of one pool.
    resource_name : str or None
        See :func:`choose_slots`.
    slots_per_host : {"one", "resource"}
        See :func:`choose_slots`.
    max_colocate_count : int
        Groups that may share a slot.
    reserved : collection of (str, int)
        See :func:`choose_slots`.

    Raises
    ------
    PlacementError
        A host is gone; the message names it.
    InsufficientResourcesError
        A slot is held, or carries as many groups as may share it; the message names them.
    """
    known = {host.address: host for host in hosts}
    gone = sorted({slot.address for slot in slots} - set(known))
    if gone:
        raise PlacementError(
            f"{', '.join(gone)} left the cluster, and pool {slots[0].pool_id!r} has slots there. Close the groups that "
            "still live on this pool; the next group then chooses new slots"
        )
    pairs = [(known[slot.address], slot) for slot in slots]
    request = Request(
        (len(slots),), slots[0].pool_id, resource_name, slots_per_host, max_colocate_count, frozenset(reserved)
    )
    if slots_per_host == "one":
        _check_inline(hosts, pairs, reserved)
    else:
        _check_colocation(pairs, max_colocate_count)
    _check_available(pairs, request)


def _check_inline(
    hosts: Sequence[HostInfo], pairs: Sequence[tuple[HostInfo, Slot]], reserved: Collection[tuple[str, int]]
) -> None:
    held = {host.address: who for host, _ in pairs if (who := describe_claims(host, hosts))}
    taken = {address for address, _ in reserved}
    held.update({host.address: "another part of the same request" for host, _ in pairs if host.address in taken})
    if held:
        problem = f"{len(held)} host(s) of pool {pairs[0][1].pool_id!r} already carry a live group"
        raise _held(problem, held, pairs, inline=True)
    crowded = {address: f"{n} ranks" for address, n in Counter(h.address for h, _ in pairs).items() if n > 1}
    if crowded:
        problem = f"pool {pairs[0][1].pool_id!r} has several slots on one host, where the inline executor puts one rank"
        raise _held(problem, crowded, pairs, inline=True)


def _check_colocation(pairs: Sequence[tuple[HostInfo, Slot]], max_colocate_count: int) -> None:
    full = {
        host.address: f"groups {', '.join(map(repr, groups))}"
        for host, slot in pairs
        if len(groups := groups_on(host, slot.pool_id, slot.index)) >= max_colocate_count
    }
    if full:
        raise explain_held(
            f"pool {pairs[0][1].pool_id!r} already carries as many groups as may share its slots "
            f"(max_colocate_count={max_colocate_count})",
            full,
            asked=len(pairs),
            inline=False,
            what_else="Close one of them, make the pool with a larger max_colocate_count, or make one group of several "
            "roles (create_colocated_worker_cls)",
        )


def _check_available(pairs: Sequence[tuple[HostInfo, Slot]], request: Request) -> None:
    name = request.resource_name
    if name is None:
        return
    held: dict[str, str] = {}
    for host, slot in pairs:
        if request.slots_per_host == "one":
            usable = whole_slots(host.available.get(name, 0.0)) > 0
        else:
            usable = slot.index in free_by_count(host, range(slot_count(host, name)), request)
        if not usable:
            held[host.address] = describe_holders(host, name, slot.pool_id)
    if held:
        raise _held(f"{name} of pool {request.pool_id!r} is taken", held, pairs, inline=False)


def _held(
    problem: str, held: dict[str, str], pairs: Sequence[tuple[HostInfo, Slot]], *, inline: bool
) -> InsufficientResourcesError:
    return explain_held(problem, held, asked=len(pairs), inline=inline)
