"""Cutting pools into parts and joining them.

Owns :func:`split_resource_pool`, :func:`merge_resource_pool` and :func:`extract_from_existing`. All three only
rearrange which slots of which pool a pool stands for; nothing is chosen, held or freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_controller.errors import PlacementError
from dask_controller.pool.packing import assign_entries
from dask_controller.pool.pool import DaskResourcePool, ResourcePool, SubDaskResourcePool, _positive
from dask_controller.pool.shortage import near_names

__all__ = ["extract_from_existing", "merge_resource_pool", "split_resource_pool"]


def split_resource_pool(resource_pool: DaskResourcePool, split_size: int | Sequence[int]) -> list[SubDaskResourcePool]:
    """Cut a pool into contiguous parts.

    Parameters
    ----------
    resource_pool : DaskResourcePool
        The pool; may itself be a part, or merged.
    split_size : int or sequence of int
        Ranks of every part, which must divide the number of ranks; or the ranks of each part, which must sum to it.

    Returns
    -------
    list of SubDaskResourcePool
        The parts in rank order. Groups on different parts use different slots.

    Raises
    ------
    TypeError, ValueError
        A size is not an int, is below 1, does not divide, or the sizes do not sum to the number of ranks.

    Examples
    --------
    >>> [part.store for part in split_resource_pool(DaskResourcePool([2, 1]), [1, 2])]
    [[1], [1, 1]]
    """
    world_size = resource_pool.world_size
    if isinstance(split_size, Sequence) and not isinstance(split_size, str):
        sizes = [_positive(size, f"split_size[{i}]") for i, size in enumerate(split_size)]
        if sum(sizes) != world_size:
            raise ValueError(
                f"split_size {sizes} sums to {sum(sizes)}, but {resource_pool!r} has {world_size} ranks; give sizes "
                f"that sum to {world_size}"
            )
    else:
        size = _positive(split_size, "split_size")
        if not world_size or world_size % size:
            raise ValueError(
                f"split_size {size} does not divide the {world_size} ranks of {resource_pool!r}; give a divisor, or a "
                f"list of sizes that sum to {world_size}"
            )
        sizes = [size] * (world_size // size)
    return [
        SubDaskResourcePool(resource_pool, sum(sizes[:i]), size, f"{resource_pool.name_prefix}_split_{i}")
        for i, size in enumerate(sizes)
    ]


def merge_resource_pool(rp1: DaskResourcePool, rp2: DaskResourcePool) -> DaskResourcePool:
    """Join two pools.

    Parameters
    ----------
    rp1, rp2 : DaskResourcePool
        Pools without a slot in common; may be parts, also of one pool, or merged themselves.

    Returns
    -------
    DaskResourcePool
        Its ranks are those of ``rp1``, then those of ``rp2``, on the same slots; each slot keeps the ``pool_id`` that
        it has there.

    Raises
    ------
    PlacementError
        The pools share slots, or differ in a setting; the message names them.

    Examples
    --------
    >>> merge_resource_pool(DaskResourcePool([2]), DaskResourcePool([1])).store
    [2, 1]
    """
    for name in ("use_gpu", "resource_name", "max_colocate_count", "n_gpus_per_node", "detached"):
        if name == "resource_name" and not rp1.use_gpu:
            continue
        ours, theirs = getattr(rp1, name), getattr(rp2, name)
        if ours != theirs:
            raise PlacementError(
                f"cannot merge {rp1!r} and {rp2!r}: {name} is {ours!r} in one and {theirs!r} in the other; make both "
                "pools with the same value"
            )
    if rp1.client is not None and rp2.client is not None and rp1.client is not rp2.client:
        raise PlacementError(f"cannot merge {rp1!r} and {rp2!r}: they belong to different clients")
    if not rp1.world_size or not rp2.world_size:
        raise PlacementError(f"cannot merge {rp1!r} and {rp2!r}: one of them has no ranks")
    both = {(root.pool_id, i) for root, i in rp1.seats} & {(root.pool_id, i) for root, i in rp2.seats}
    if both:
        shown = ", ".join(f"{i} of {pool_id}" for pool_id, i in sorted(both)[:4])
        raise PlacementError(
            f"cannot merge {rp1!r} and {rp2!r}: they share {len(both)} slot(s) (ranks {shown}); merge parts that do "
            "not overlap"
        )
    merged = DaskResourcePool(
        rp1.store + rp2.store,
        use_gpu=rp1.use_gpu,
        name_prefix=f"{rp1.name_prefix}_{rp2.name_prefix}",
        max_colocate_count=rp1.max_colocate_count,
        detached=rp1.detached,
        resource_name=rp1.resource_name,
        client=rp1.client or rp2.client,
        n_gpus_per_node=rp1.n_gpus_per_node,
    )
    merged._seats = rp1.seats + rp2.seats
    return merged


def extract_from_existing(
    resource_pools: Mapping[str, DaskResourcePool], src_role_names: Sequence[str], resource_pool: ResourcePool
) -> list[SubDaskResourcePool]:
    """Take parts out of the pools of named roles, one for each node of another pool.

    Parameters
    ----------
    resource_pools : mapping of str to DaskResourcePool
        Pool of each role.
    src_role_names : sequence of str
        Roles whose pools may be taken from. A pool that several of them share counts once.
    resource_pool : ResourcePool
        Its ``store`` says how many ranks each part has. It is not changed.

    Returns
    -------
    list of SubDaskResourcePool
        In the order of ``resource_pool.store``. Each part lies inside one node of one source pool, as tight as it
        fits; parts share a node only if there are not enough nodes.

    Raises
    ------
    PlacementError
        A role is unknown, the kinds of slot differ, or the pools have no room; names what is missing.
    """
    if isinstance(src_role_names, str):
        raise TypeError(f"src_role_names must be a list of role names, got the str {src_role_names!r}")
    for role in src_role_names:
        if role not in resource_pools:
            near = near_names(str(role), [str(name) for name in resource_pools])
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(map(repr, resource_pools)) or "no role"
            raise PlacementError(f"no resource pool for role {role!r}; there are pools for {known}{hint}")
    nodes: list[tuple[DaskResourcePool, int, int]] = []
    taken: set[tuple[str, int]] = set()
    for role, pool in resource_pools.items():
        if role not in src_role_names:
            continue
        _check_same_kind(role, pool, resource_pool)
        first = 0
        for count in pool.store:
            seats = {(root.pool_id, i) for root, i in pool.seats[first : first + count]}
            if not seats & taken:
                taken |= seats
                nodes.append((pool, first, count))
            first += count
    sizes = resource_pool.store
    room = [count for _, _, count in nodes]
    where = assign_entries(sizes, room, share=False) or assign_entries(sizes, room, share=True)
    if where is None or not sizes:
        roles = ", ".join(map(repr, src_role_names)) or "no role"
        raise PlacementError(
            f"cannot take {sizes or 'nothing'} out of the pools of {roles}: their nodes have {room} slots ({sum(room)} "
            f"in all, {sum(sizes)} asked), and each part must lie inside one node. Ask for smaller parts or name more "
            "roles"
        )
    out: list[SubDaskResourcePool] = []
    used = [0] * len(nodes)
    for i, (size, b) in enumerate(zip(sizes, where, strict=True)):
        pool, first, _ = nodes[b]
        prefix = getattr(resource_pool, "name_prefix", pool.name_prefix)
        out.append(SubDaskResourcePool(pool, first + used[b], size, f"{prefix}_{i}"))
        used[b] += size
    return out


def _check_same_kind(role: str, pool: DaskResourcePool, wanted: ResourcePool) -> None:
    if not isinstance(wanted, DaskResourcePool):
        return
    if pool._slot_resource != wanted._slot_resource:
        raise PlacementError(
            f"{wanted!r} cannot be taken out of the pool of role {role!r}, {pool!r}: they use different kinds of slot"
        )
