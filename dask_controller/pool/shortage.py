"""Why a pool does not fit, in words.

Owns the texts of :class:`~dask_controller.errors.InsufficientResourcesError`. Decides nothing: whether a pool fits is
settled in :mod:`.offers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from dask_controller.errors import InsufficientResourcesError
from dask_controller.pool.hosts import HostInfo, SlotsPerHost, slot_count, whole_slots
from dask_controller.pool.offers import Offer, Request, fits_when_free, groups_on, inline_blockers, make_offers

__all__ = ["explain_held", "explain_shortage", "make_error", "near_names"]

_INLINE_WAYS_OUT = (
    "A host carries one live group. Close that group, start more Dask workers, or make one group of both roles "
    "(create_colocated_worker_cls)"
)
_SHARE_WAYS_OUT = (
    "Close that group or wait for that task, start more Dask workers, or make one group of both roles "
    "(create_colocated_worker_cls)"
)


def make_error(
    message: str, asked: int, present: int, free: int, held: Mapping[str, str], *, possible: bool
) -> InsufficientResourcesError:
    """An error that also tells whether waiting can help.

    Parameters
    ----------
    message : str
        What happened and what to do.
    asked, present, free : int
        Slots asked for, declared and free.
    held : mapping of str to str
        Host address to who holds it.
    possible : bool
        Kept as the attribute ``possible``; it travels with the error.

    Returns
    -------
    InsufficientResourcesError
        Ready to raise.
    """
    error = InsufficientResourcesError(message, asked, present, free, held)
    # In the instance's dict it survives pickling, which fields that __init__ does not take otherwise would not.
    vars(error)["possible"] = possible
    return error


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Names that somebody who wrote ``name`` may have meant.

    Parameters
    ----------
    name : str
        The unknown name.
    known : sequence of str
        Names that exist.

    Returns
    -------
    list of str
        At most three, the nearest first. Upper and lower case count as equal.

    Examples
    --------
    >>> near_names("GPU", ["gpu", "CPU", "disk"])
    ['gpu', 'CPU']
    """
    by_folded: dict[str, list[str]] = {}
    for other in sorted(set(known) - {name}):
        by_folded.setdefault(other.casefold(), []).append(other)
    near = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.6)
    return [other for folded in near for other in by_folded[folded]][:3]


def explain_shortage(
    hosts: Sequence[HostInfo],
    process_on_nodes: Sequence[int],
    *,
    pool_id: str,
    resource_name: str | None,
    slots_per_host: SlotsPerHost,
    max_colocate_count: int,
    reserved: frozenset[tuple[str, int]] = frozenset(),
) -> InsufficientResourcesError:
    """The error for a pool that does not fit.

    Parameters
    ----------
    hosts : sequence of HostInfo
        All hosts of the cluster.
    process_on_nodes : sequence of int
        Slots per logical node.
    pool_id : str
        Id of the pool.
    resource_name : str or None
        The resource that makes slots; None for pools without accelerator.
    slots_per_host : {"one", "resource"}
        See :func:`dask_controller.pool.placement.choose_slots`.
    max_colocate_count : int
        Groups that may share a slot.
    reserved : frozenset of (str, int)
        Slots that are promised to others, as ``(address, index)``.

    Returns
    -------
    InsufficientResourcesError
        Names what is asked, present, free and held by whom. Its attribute ``possible`` is False if the pool would
        not fit on an idle cluster either, so that waiting is of no use.
    """
    request = Request(
        tuple(process_on_nodes), pool_id, resource_name, slots_per_host, max_colocate_count, frozenset(reserved)
    )
    possible = fits_when_free(hosts, process_on_nodes, resource_name, slots_per_host)
    offers = make_offers(hosts, request, max(request.asked, 1))
    present = sum(len(offer.present) for members in offers.values() for offer in members)
    free = sum(len(offer.free) for members in offers.values() for offer in members)
    held = {
        offer.host.address: why
        for members in offers.values()
        for offer in members
        if len(offer.free) < len(offer.present) and (why := _holders(offer, hosts, request))
    }
    text = _why_held(offers, request, hosts) if possible else _why_impossible(hosts, offers, request)
    return make_error(
        f"Pool {pool_id!r} asks {_asked(request)}: {text}", request.asked, present, free, held, possible=possible
    )


def explain_held(
    problem: str, hosts: Mapping[str, str], *, asked: int, inline: bool, what_else: str = ""
) -> InsufficientResourcesError:
    """The error for slots that a pool has, but cannot use now.

    Parameters
    ----------
    problem : str
        What happened.
    hosts : mapping of str to str
        Host address to who holds it.
    asked : int
        Slots that the pool has.
    inline : bool
        Whether the inline executor's rule is what is in the way.
    what_else : str
        Ways out that replace the usual ones.

    Returns
    -------
    InsufficientResourcesError
        With ``possible`` True: waiting can help.
    """
    ways_out = what_else or (_INLINE_WAYS_OUT if inline else _SHARE_WAYS_OUT)
    return make_error(f"{problem}. {ways_out}", asked, asked, max(asked - len(hosts), 0), hosts, possible=True)


def describe_claims(host: HostInfo, hosts: Sequence[HostInfo]) -> str:
    """Who keeps an inline rank off a host.

    Parameters
    ----------
    host : HostInfo
        The host.
    hosts : sequence of HostInfo
        All hosts of the cluster.

    Returns
    -------
    str
        Groups and pools, or ``""`` if nobody does.
    """
    said: dict[str, None] = {}
    for other, claim in inline_blockers(host, hosts):
        where = "" if other.address == host.address else f" on {other.address}, in the same process"
        said[f"group {claim.group!r} of pool {claim.pool_id!r} (rank {claim.rank}{where})"] = None
    return _shorten(list(said))


def describe_holders(host: HostInfo, resource_name: str | None, pool_id: str) -> str:
    """Who holds a resource of a host, as seen by a pool.

    Parameters
    ----------
    host : HostInfo
        The host.
    resource_name : str or None
        The resource.
    pool_id : str
        The pool that asks; its own groups are left out.

    Returns
    -------
    str
        Groups, tasks, or what is known of them.
    """
    groups = {
        f"group {claim.group!r} of pool {claim.pool_id!r}": None for claim in host.claims if claim.pool_id != pool_id
    }
    others = [f"{who} ({what})" if what else who for who, what in sorted(host.holders.items())]
    said = [*groups, *others]
    if not said and resource_name is not None:
        total, left = host.resources.get(resource_name, 0.0), host.available.get(resource_name, 0.0)
        said = [f"a task or a starting group ({left:g} of {total:g} {resource_name} available)"]
    return _shorten(said)


def _holders(offer: Offer, hosts: Sequence[HostInfo], request: Request) -> str:
    host = offer.host
    if request.slots_per_host == "one" and (claims := describe_claims(host, hosts)):
        return claims
    if any(address == host.address for address, _ in request.reserved):
        return "another part of the same request"
    full = {
        f"groups {', '.join(groups)} of this pool (max_colocate_count={request.max_colocate_count})": None
        for index in offer.present
        if len(groups := groups_on(host, request.pool_id, index)) >= request.max_colocate_count
    }
    return _shorten([*full]) if full else describe_holders(host, request.resource_name, request.pool_id)


def _shorten(said: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(said) - limit} more" if len(said) > limit else ""
    return ", ".join(said[:limit]) + more


def _asked(request: Request) -> str:
    sizes = list(request.process_on_nodes)
    what = f"{request.resource_name} slots" if request.resource_name else "hosts"
    if request.unlimited:
        what = "ranks"
    shown = str(sizes) if len(sizes) <= 8 else f"[{', '.join(map(str, sizes[:8]))}, ... {len(sizes)} nodes]"
    return f"{request.asked} {what} as {shown}"


def _why_impossible(hosts: Sequence[HostInfo], offers: Mapping[str, Sequence[Offer]], request: Request) -> str:
    name = request.resource_name
    if not hosts:
        return "the cluster has no Dask workers. Start some (cluster.scale) and wait for them (client.wait_for_workers)"
    if not offers and name is not None:
        return _no_such_resource(hosts, name)
    if request.slots_per_host == "one" and fits_when_free(hosts, request.process_on_nodes, name, "resource"):
        if name is None:
            return (
                f"a host carries one rank, and {len(hosts)} host(s) cannot carry them. Start more Dask workers "
                "(processes, not threads)"
            )
        several = max((slot_count(host, name), host.address) for host in hosts)
        return (
            f"a host carries one rank, however much {name} it declares ({several[1]} declares "
            f'{name}={several[0]}). Start one Dask worker per GPU, each with --resources "{name}=1" (dask-cuda '
            "starts one per GPU)"
        )
    sizes = request.process_on_nodes
    room = {node: sum(len(offer.present) for offer in members) for node, members in offers.items()}
    kind = f"{name} slot(s)" if name else "host(s)"
    shown = _shorten([f"{node} has {count}" for node, count in room.items()], 8)
    total = sum(room.values())
    if total < request.asked:
        more = f' with --resources "{name}=1"' if name else ""
        return (
            f"the whole cluster has {total} {kind} ({shown}). Ask for fewer, or start more Dask workers{more} and wait "
            "for them (client.wait_for_workers)"
        )
    largest = max(room.values())
    too_large = [f"entry {i} ({size})" for i, size in enumerate(sizes) if size > largest]
    if too_large:
        return (
            f"{_shorten(too_large)} is larger than any machine ({shown}); an entry must fit on one machine. Cut it "
            f"into entries of at most {largest}, such as {_cut_sizes(sizes, largest)}"
        )
    return (
        f"each entry must fit on one machine, and these entries cannot be arranged so on {shown}. Choose entries that "
        "follow the sizes of the machines"
    )


def _why_held(offers: Mapping[str, Sequence[Offer]], request: Request, hosts: Sequence[HostInfo]) -> str:
    name = request.resource_name
    free = {node: sum(len(offer.free) for offer in members) for node, members in offers.items()}
    kind = f"{name} slot(s)" if name else "host(s)"
    inline = request.slots_per_host == "one" and any(
        inline_blockers(offer.host, hosts) for members in offers.values() for offer in members
    )
    ways_out = _INLINE_WAYS_OUT if inline else _SHARE_WAYS_OUT
    total = sum(free.values())
    if total < request.asked:
        return f"the cluster has enough, but only {total} {kind} are free now. {ways_out}"
    shown = _shorten([f"{node} has {count} free" for node, count in free.items()], 8)
    return (
        f"{total} {kind} are free, but each entry must fit on one machine and the free ones lie apart ({shown}). "
        f"{ways_out}"
    )


def _no_such_resource(hosts: Sequence[HostInfo], name: str) -> str:
    fractions = {h.address: h.resources[name] for h in hosts if 0 < h.resources.get(name, 0.0)}
    if fractions and not any(whole_slots(amount) for amount in fractions.values()):
        address, amount = next(iter(sorted(fractions.items())))
        return (
            f"no host declares a whole slot of {name!r} ({address} declares {amount:g}). A rank takes 1; declare "
            f'--resources "{name}=1" and let groups share the slot with max_colocate_count'
        )
    declared = sorted({resource for host in hosts for resource in host.resources})
    near = near_names(name, declared)
    found = f"they declare {', '.join(declared)}" if declared else "they declare no resources at all"
    hint = f" Did you mean resource_name={near[0]!r}?" if near else ""
    return (
        f"none of the {len(hosts)} hosts declares the resource {name!r}; {found}.{hint} Start the Dask workers with "
        f'--resources "{name}=1" (dask-cuda too sets none by itself), name another with resource_name=, or set '
        "use_gpu=False"
    )


def _cut_sizes(sizes: Sequence[int], largest: int) -> list[int]:
    out: list[int] = []
    for size in sizes:
        whole, rest = divmod(size, largest)
        out += [largest] * whole + ([rest] if rest else [])
    return out
