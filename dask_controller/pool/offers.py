"""What hosts offer to a pool, and whether the pool fits.

Owns the rules by which a host is usable and the arrangement of a pool's entries on machines. Does not own the texts
for pools that do not fit (:mod:`.shortage`) or the finished slots (:mod:`.placement`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dask_controller.pool.hosts import (
    Claim,
    HostInfo,
    SlotsPerHost,
    hosts_by_node,
    natural_key,
    slot_count,
    whole_slots,
)
from dask_controller.pool.packing import assign_entries

__all__ = ["Offer", "Request", "fits_when_free", "free_by_count", "groups_on", "inline_blockers", "make_offers", "plan"]


@dataclass(frozen=True)
class Request:
    """A pool, as far as placing it goes."""

    #: Slots per logical node.
    process_on_nodes: tuple[int, ...]
    pool_id: str
    #: None for pools that take no accelerator.
    resource_name: str | None
    slots_per_host: SlotsPerHost
    max_colocate_count: int
    #: ``(address, slot index)`` pairs that are promised to others, though no claim shows it yet.
    reserved: frozenset[tuple[str, int]] = frozenset()

    @property
    def asked(self) -> int:
        """Slots in all."""
        return sum(self.process_on_nodes)

    @property
    def unlimited(self) -> bool:
        """Whether a host takes any number of ranks: child processes that need no accelerator."""
        return self.resource_name is None and self.slots_per_host == "resource"


@dataclass(frozen=True)
class Offer:
    """The slots of one host, seen by one pool."""

    host: HostInfo
    #: Slot indices that the host has.
    present: tuple[int, ...]
    #: Those of them that the pool may use now.
    free: tuple[int, ...]


def groups_on(host: HostInfo, pool_id: str, index: int) -> list[str]:
    """Names of the groups of one pool on one slot.

    Parameters
    ----------
    host : HostInfo
        The host.
    pool_id : str
        Id of the pool.
    index : int
        Number of the slot on the host.

    Returns
    -------
    list of str
        Each name once, sorted.
    """
    return sorted({c.group for c in host.claims if c.pool_id == pool_id and c.slot == index})


def _promised(host: HostInfo, reserved: Collection[tuple[str, int]]) -> list[int]:
    """Reserved slots of a host that do not yet count in what Dask calls available.

    Parameters
    ----------
    host : HostInfo
        The host.
    reserved : collection of (str, int)
        ``(address, index)`` of reserved slots.

    Returns
    -------
    list of int
        Indices of those on which nobody sits yet: a rank that sits there holds a lease, which Dask has counted.
    """
    claimed = {claim.slot for claim in host.claims}
    return sorted({index for address, index in reserved if address == host.address} - claimed)


def inline_blockers(host: HostInfo, hosts: Sequence[HostInfo]) -> list[tuple[HostInfo, Claim]]:
    """Claims that keep an inline rank off a host.

    Parameters
    ----------
    host : HostInfo
        The host.
    hosts : sequence of HostInfo
        All hosts of the cluster.

    Returns
    -------
    list of (HostInfo, Claim)
        Every claim on the host itself and on hosts in the same process: a process has one environment, so it carries
        one live group.
    """
    peers = [h for h in hosts if h.claims and (h.address == host.address or h.process == host.process)]
    peers.sort(key=lambda h: (h.address != host.address, natural_key(h.address)))
    return [(h, claim) for h in peers for claim in h.claims]


def make_offers(hosts: Sequence[HostInfo], request: Request, ranks_per_host: int = 1) -> dict[str, list[Offer]]:
    """What each host offers.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster.
    request : Request
        Who asks.
    ranks_per_host : int
        How many ranks a host takes where nothing else limits it.

    Returns
    -------
    dict of str to list of Offer
        By machine, in placement order. Hosts that have no slot of this kind are left out.
    """
    taken_processes = {host.process for host in hosts if host.claims}
    out: dict[str, list[Offer]] = {}
    for node, members in hosts_by_node(hosts).items():
        for host in members:
            slots = ranks_per_host if request.unlimited else slot_count(host, request.resource_name)
            present = tuple(range(slots if request.slots_per_host == "resource" else min(slots, 1)))
            if not present:
                continue
            if request.slots_per_host == "one":
                free = _free_inline(host, request, host.process in taken_processes)
            else:
                free = free_by_count(host, present, request)
            out.setdefault(node, []).append(Offer(host, present, free))
    return out


def _free_inline(host: HostInfo, request: Request, process_taken: bool) -> tuple[int, ...]:
    if process_taken or any(address == host.address for address, _ in request.reserved):
        return ()
    name = request.resource_name
    return (0,) if name is None or whole_slots(host.available.get(name, 0.0)) else ()


def free_by_count(host: HostInfo, present: Sequence[int], request: Request) -> tuple[int, ...]:
    """Slots of a host that a child process of it may use.

    Parameters
    ----------
    host : HostInfo
        The host.
    present : sequence of int
        Indices of the slots that it has.
    request : Request
        Who asks.

    Returns
    -------
    tuple of int
        Those on which groups of the pool sit with room for one more, and as many others as Dask says are available.
    """
    own, other = [], []
    for index in present:
        if (host.address, index) in request.reserved:
            continue
        groups = groups_on(host, request.pool_id, index)
        if not groups:
            other.append(index)
        elif len(groups) < request.max_colocate_count:
            own.append(index)
    if request.resource_name is not None:
        available = whole_slots(host.available.get(request.resource_name, 0.0))
        available -= len(_promised(host, request.reserved))
        other = sorted(other, key=lambda i: _suspicion(host, i))[: max(available, 0)]
    return tuple(sorted(own + other))


def _suspicion(host: HostInfo, index: int) -> int:
    """How likely another pool sits on a slot of this resource: 0 no, 1 perhaps, 2 surely.

    Dask says how many slots are free, but not which. A claim without a device may be that of a pool without
    accelerators, whose slot numbers mean nothing here.
    """
    claims = [claim for claim in host.claims if claim.slot == index]
    return 2 if any(claim.device is not None for claim in claims) else min(len(claims), 1)


def plan(hosts: Sequence[HostInfo], request: Request) -> list[list[tuple[HostInfo, int]]] | None:
    """Arrange a pool on the hosts.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster, in any order.
    request : Request
        The pool.

    Returns
    -------
    list of list of (HostInfo, int), or None
        For each entry of ``process_on_nodes`` its hosts with slot indices; None if it does not fit now.

    Notes
    -----
    Every entry lies on one machine, and entries on machines of their own if there are enough, else several on one.
    Pools without accelerator first try the hosts that declare no resource at all, so that they leave the others to
    pools that need them. Unlimited hosts get the smallest number of ranks per host that does.
    """
    if not request.process_on_nodes:
        return []
    plain = [host for host in hosts if not any(host.resources.values())] if request.resource_name is None else []
    candidates = [plain, hosts] if 0 < len(plain) < len(hosts) else [hosts]
    for share in (False, True):
        for part in candidates:
            # Blockers are looked for among all hosts: a process may be shared with one that is left out.
            arranged = _arrange(part, hosts, request, share)
            if arranged is not None:
                return arranged
    return None


def _arrange(
    part: Sequence[HostInfo], hosts: Sequence[HostInfo], request: Request, share: bool
) -> list[list[tuple[HostInfo, int]]] | None:
    sizes = request.process_on_nodes
    wanted = {host.address for host in part}

    def attempt(ranks_per_host: int) -> list[list[tuple[HostInfo, int]]] | None:
        machines = [
            kept
            for offers in make_offers(hosts, request, ranks_per_host).values()
            if (kept := [offer for offer in offers if offer.host.address in wanted and offer.free])
        ]
        where = assign_entries(
            sizes,
            [sum(len(offer.free) for offer in offers) for offers in machines],
            share=share,
            load=[sum(len(offer.host.claims) for offer in offers) for offers in machines],
        )
        return None if where is None else _cut(sizes, where, machines, spread=request.unlimited)

    if not request.unlimited:
        return attempt(1)
    most = sum(sizes)
    if not part or attempt(most) is None:
        return None
    return next(filter(None, map(attempt, range(-(-most // len(part)), most + 1))))


def _cut(
    sizes: Sequence[int], where: Sequence[int], machines: Sequence[Sequence[Offer]], *, spread: bool
) -> list[list[tuple[HostInfo, int]]]:
    """Hand out the seats of each machine to its entries, in order."""
    seats: dict[int, list[tuple[HostInfo, int]]] = {}
    for b in set(where):
        offers = machines[b]
        total = sum(size for size, other in zip(sizes, where, strict=True) if other == b)
        counts = _even(total, offers) if spread else [len(offer.free) for offer in offers]
        seats[b] = [(o.host, index) for o, count in zip(offers, counts, strict=True) for index in o.free[:count]]
    out: list[list[tuple[HostInfo, int]]] = []
    for size, b in zip(sizes, where, strict=True):
        out.append(seats[b][:size])
        seats[b] = seats[b][size:]
    return out


def _even(total: int, offers: Sequence[Offer]) -> list[int]:
    """Ranks per host, level, the idler hosts first."""
    counts = [0] * len(offers)
    order = sorted(range(len(offers)), key=lambda i: (len(offers[i].host.claims), i))
    while sum(counts) < total:
        for i in order:
            if counts[i] < len(offers[i].free) and sum(counts) < total:
                counts[i] += 1
    return counts


def fits_when_free(
    hosts: Sequence[HostInfo],
    process_on_nodes: Sequence[int],
    resource_name: str | None,
    slots_per_host: SlotsPerHost,
) -> bool:
    """Whether a pool would fit if nothing else ran.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster.
    process_on_nodes : sequence of int
        Slots per logical node.
    resource_name : str or None
        The resource that makes slots.
    slots_per_host : {"one", "resource"}
        See :func:`dask_controller.pool.placement.choose_slots`.

    Returns
    -------
    bool
        False means that waiting cannot help.
    """
    freed = [replace(host, available=host.resources, claims=(), holders={}) for host in hosts]
    return plan(freed, Request(tuple(process_on_nodes), "", resource_name, slots_per_host, 1)) is not None
