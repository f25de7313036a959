"""Resource pools: how many ranks go where, and which slots they got.

Owns :class:`ResourcePool` (sizes only), :class:`DaskResourcePool` (sizes, a kind of slot, and the slots once they are
chosen) and :class:`SubDaskResourcePool` (a contiguous part of another pool). Does not own the choice itself
(:mod:`.placement`), cutting and joining (:mod:`.split`), or the hold on a slot (:mod:`.lease`).
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dask_controller.errors import PlacementError
from dask_controller.pool.hosts import HostInfo, Slot, SlotsPerHost
from dask_controller.pool.placement import is_possible
from dask_controller.pool.settle import Seat, choosing, roots_of, settle

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["DaskResourcePool", "ResourcePool", "SubDaskResourcePool"]


def _positive(value: Any, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {type(value).__name__} ({value!r})") from None
    if number < 1:
        raise ValueError(f"{what} must be at least 1, got {number}")
    return number


def _sizes(process_on_nodes: Iterable[int] | None) -> list[int]:
    if process_on_nodes is None:
        return []
    if isinstance(process_on_nodes, str | bytes) or not isinstance(process_on_nodes, Iterable):
        raise TypeError(
            f"process_on_nodes must be a list with the number of ranks on each node, such as [8, 8], got "
            f"{process_on_nodes!r}"
        )
    return [_positive(count, f"process_on_nodes[{i}]") for i, count in enumerate(process_on_nodes)]


class ResourcePool:
    """A number of ranks on each of several nodes.

    Parameters
    ----------
    process_on_nodes : list of int, optional
        Ranks per node, each at least 1. Copied.
    max_colocate_count : int
        How many groups may share the slots of the pool.
    n_gpus_per_node : int
        Accelerators of a machine. Kept for programs that read it; placement asks the hosts instead.

    Raises
    ------
    TypeError, ValueError
        A count is not an int, or below 1; the message names which.

    Examples
    --------
    >>> pool = ResourcePool([2, 1])
    >>> pool.world_size, pool.local_rank_list(), pool.local_world_size_list()
    (3, [0, 1, 0], [2, 2, 1])
    """

    def __init__(
        self,
        process_on_nodes: Iterable[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        self._store = _sizes(process_on_nodes)
        self.max_colocate_count = _positive(max_colocate_count, "max_colocate_count")
        self.n_gpus_per_node = _positive(n_gpus_per_node, "n_gpus_per_node")

    def add_node(self, process_count: int) -> None:
        """Append a node.

        Parameters
        ----------
        process_count : int
            Its number of ranks, at least 1.
        """
        self._store.append(_positive(process_count, "process_count"))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        """Ranks per node. A copy: :meth:`add_node` is the way to change a pool."""
        return list(self._store)

    def __call__(self) -> list[int]:
        """The same as :attr:`store`."""
        return self.store

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node.

        Returns
        -------
        list of int
            In rank order.
        """
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node.

        Returns
        -------
        list of int
            In rank order.
        """
        return [local_rank for count in self._store for local_rank in range(count)]

    def __repr__(self) -> str:
        return f"dask_controller.{type(self).__name__}({self._store}, max_colocate_count={self.max_colocate_count})"


class DaskResourcePool(ResourcePool):
    """Slots on the hosts of a Dask cluster.

    Making a pool neither talks to the cluster nor holds anything. Slots are chosen when the first group is made on
    the pool, stay the same for later groups, and are held only while a group lives there.

    Parameters
    ----------
    process_on_nodes : list of int, optional
        Ranks per logical node; the ranks of one entry live on one machine.
    use_gpu : bool
        Whether each rank takes one unit of ``resource_name``. Without it, ranks take a host each (or, with the
        process executor, share hosts evenly) and no accelerator.
    name_prefix : str, optional
        For names and messages; made up if not given.
    max_colocate_count : int
        How many groups may share a slot, each then holding that fraction of the accelerator.
    detached : bool
        Whether groups made on the pool outlive their controller.
    resource_name : str
        The Dask resource (``dask worker --resources "GPU=1"``) that makes slots.
    client : distributed.Client, optional
        Handed to the groups made on the pool; not used here.
    accelerator_type : None
        Refused if given. Give hosts with a special accelerator a resource of its own and name it in
        ``resource_name``.
    n_gpus_per_node : int
        See :class:`ResourcePool`.

    Attributes
    ----------
    pool_id : str
        Unique name, also in the claims and leases of ranks. The parts of a split pool share it.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type or out of range; the message names it.

    Notes
    -----
    Thread-safe. A pool can be pickled; the copy has the same id and the same slots, and no client.
    """

    def __init__(
        self,
        process_on_nodes: Iterable[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        resource_name: str = "GPU",
        client: Client | None = None,
        *,
        accelerator_type: None = None,
        n_gpus_per_node: int = 8,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count, n_gpus_per_node)
        if accelerator_type is not None:
            raise ValueError(
                f"accelerator_type={accelerator_type!r} is not used here: start the hosts that have it with "
                f'--resources "{accelerator_type}=1" and give resource_name={accelerator_type!r} instead'
            )
        if name_prefix is not None and not isinstance(name_prefix, str):
            raise TypeError(f"name_prefix must be a str, got {type(name_prefix).__name__} ({name_prefix!r})")
        if not isinstance(resource_name, str):
            raise TypeError(f"resource_name must be a str, got {type(resource_name).__name__} ({resource_name!r})")
        if not resource_name:
            raise ValueError('resource_name is empty; name the Dask resource, such as "GPU", or set use_gpu=False')
        self.use_gpu = bool(use_gpu)
        self.detached = bool(detached)
        self.resource_name = resource_name
        self.client = client
        unique = uuid.uuid4().hex
        self.name_prefix = name_prefix or f"pool-{unique[:6]}"
        self.pool_id = f"{self.name_prefix}-{unique[:12]}" if name_prefix else f"pool-{unique[:12]}"
        #: Slots in other pools that this pool stands for; None for a pool that chooses its own.
        self._seats: tuple[Seat, ...] | None = None
        #: What was chosen; only ever set on a pool that chooses its own.
        self._slots: tuple[Slot, ...] | None = None

    def add_node(self, process_count: int) -> None:
        """Append a node.

        Parameters
        ----------
        process_count : int
            Its number of ranks, at least 1.

        Raises
        ------
        PlacementError
            The pool is a part or a merger of others, or its slots are chosen already.
        """
        with choosing:
            if self._seats is not None:
                raise PlacementError(f"{self!r} stands for slots of other pools and cannot grow; add to those first")
            if self._slots is not None:
                raise PlacementError(
                    f"the slots of {self!r} are chosen; make another pool and join the two with merge_resource_pool"
                )
            super().add_node(process_count)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """For each rank, the pool that chooses its slot and the place there."""
        return self._seats if self._seats is not None else tuple((self, i) for i in range(self.world_size))

    def slots(self, hosts: Sequence[HostInfo], slots_per_host: SlotsPerHost = "one") -> list[Slot]:
        """The slots for one more group.

        Parameters
        ----------
        hosts : sequence of HostInfo
            All hosts of the cluster as they are now, in any order.
        slots_per_host : {"one", "resource"}
            ``"one"`` for the inline executor, ``"resource"`` for the process executor.

        Returns
        -------
        list of Slot
            In rank order. Chosen on the first use. Later calls return the same ones; they are chosen again only if
            they cannot be used any more and no live group sits on the pool.

        Raises
        ------
        InsufficientResourcesError
            The pool does not fit, its slots are held, or they carry ``max_colocate_count`` groups. The attribute
            ``possible`` of the error says whether waiting can help.
        PlacementError
            The pool has no ranks; or a host is gone while other groups still live on the pool.
        """
        if slots_per_host not in ("one", "resource"):
            raise ValueError(f"slots_per_host must be 'one' or 'resource', got {slots_per_host!r}")
        if not self.world_size:
            raise PlacementError(f"{self!r} has no ranks; give process_on_nodes, or call add_node first")
        with choosing:
            chosen = settle(self.seats, hosts, slots_per_host)
            layout = [(node, local, count) for node, count in enumerate(self._store) for local in range(count)]
            return [
                replace(slot, node_rank=node, local_rank=local, local_world_size=count)
                for slot, (node, local, count) in zip(chosen, layout, strict=True)
            ]

    def is_possible(self, hosts: Sequence[HostInfo], slots_per_host: SlotsPerHost = "one") -> bool:
        """Whether the pool would fit if nothing else ran on the cluster.

        Parameters
        ----------
        hosts : sequence of HostInfo
            All hosts of the cluster.
        slots_per_host : {"one", "resource"}
            See :meth:`slots`.

        Returns
        -------
        bool
            False means that waiting cannot help.
        """
        sizes = [count for root in roots_of(self.seats) for count in root._store]
        return is_possible(hosts, sizes, resource_name=self._slot_resource, slots_per_host=slots_per_host)

    @property
    def _slot_resource(self) -> str | None:
        return self.resource_name if self.use_gpu else None

    def __getstate__(self) -> dict[str, Any]:
        # A client belongs to its process.
        return {**self.__dict__, "client": None}

    def __repr__(self) -> str:
        kind = f"resource {self.resource_name!r}" if self.use_gpu else "no accelerator"
        return f"<dask_controller.{type(self).__name__} {self.name_prefix!r}: {self._store}, {kind}>"


class SubDaskResourcePool(DaskResourcePool):
    """A contiguous part of another pool.

    It takes no slots of its own: its ranks live on the parent's, so parent and part share ``pool_id``, leases and
    ``max_colocate_count``. Made by :func:`~dask_controller.pool.split.split_resource_pool`.

    Parameters
    ----------
    parent : DaskResourcePool
        The pool to take from; may be a part itself, or merged.
    start : int
        First rank of the parent that belongs to the part.
    size : int
        Number of ranks, at least 1.
    name_prefix : str, optional
        Made from the parent's and ``start`` if not given.

    Attributes
    ----------
    parent : DaskResourcePool
        As given.
    start_bundle_index : int
        First rank, counted in the pool that was split first.
    subgroup_world_size : int
        Number of ranks.

    Raises
    ------
    ValueError
        The part reaches beyond the parent.

    Notes
    -----
    Nodes of the parent may be cut: ``local_rank``, ``local_world_size`` and ``node_rank`` count inside the part.
    """

    parent: DaskResourcePool
    start_bundle_index: int
    subgroup_world_size: int

    def __init__(self, parent: DaskResourcePool, start: int, size: int, name_prefix: str | None = None) -> None:
        size = _positive(size, "size")
        begin = operator.index(start)
        if begin < 0 or begin + size > parent.world_size:
            raise ValueError(
                f"ranks {begin} to {begin + size - 1} are not all in {parent!r}, which has {parent.world_size}"
            )
        super().__init__(
            _cut_nodes(parent.store, begin, size),
            use_gpu=parent.use_gpu,
            name_prefix=name_prefix or f"{parent.name_prefix}_{begin}",
            max_colocate_count=parent.max_colocate_count,
            detached=parent.detached,
            resource_name=parent.resource_name,
            client=parent.client,
            n_gpus_per_node=parent.n_gpus_per_node,
        )
        self.parent = parent
        self._seats = parent.seats[begin : begin + size]
        roots = roots_of(self._seats)
        self.pool_id = roots[0].pool_id if len(roots) == 1 else self.pool_id
        outer = parent.start_bundle_index if isinstance(parent, SubDaskResourcePool) else 0
        self.start_bundle_index = outer + begin
        self.subgroup_world_size = size


def _cut_nodes(store: Sequence[int], start: int, size: int) -> list[int]:
    """Node sizes of the ranks ``start`` to ``start + size`` of a pool."""
    out: list[int] = []
    first = 0
    for count in store:
        overlap = min(first + count, start + size) - max(first, start)
        if overlap > 0:
            out.append(overlap)
        first += count
    return out
