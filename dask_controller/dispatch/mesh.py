"""Dispatch over device meshes: ranks that work on the same data share one chunk.

A group of, say, 4 ranks may form a mesh of 2 data-parallel indices with 2 tensor-parallel peers each. Batches are then
cut into 2 chunks, and rank r receives chunk ``dp_rank_mapping[r]``, the very same object as its peers, so that the
group serialises and sends it once per host. Only the ranks of the collect mask give results.

Owns the mapping from chunks to ranks and back. The ranks tell their place in the mesh
(``Worker._register_dispatch_collect_info``); the answers are asked for once per mesh and kept on the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dask_controller.dispatch._batches import PaddingView, join_batches, labelled, split_batches
from dask_controller.dispatch._types import Dispatched, DispatchPair, WorkerGroupLike
from dask_controller.dispatch.functions import check_per_rank, collect_dp_compute
from dask_controller.errors import DispatchError
from dask_controller.protocol.batching import Padding, PerRank

__all__ = [
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "make_nd_compute_dataproto_dispatch_fn",
]


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any
) -> Dispatched:
    """Give each rank the element of its data-parallel index.

    Parameters
    ----------
    dp_rank_mapping : sequence of int
        Data-parallel index of every rank, each in ``range(dp_size)``, each present.
    dp_size : int
        Number of data-parallel indices.
    worker_group : WorkerGroupLike
        The group that is called.
    *args, **kwargs
        Lists or tuples of `dp_size` elements.

    Returns
    -------
    (tuple of PerRank, dict of PerRank)
        One element per rank; ranks of one index hold the same object.

    Raises
    ------
    DispatchError
        The mapping does not fit the group, or an argument does not fit `dp_size`.
    """
    mapping = _checked_mapping(dp_rank_mapping, dp_size, worker_group.world_size)
    for label, value in labelled(args, kwargs):
        check_per_rank(label, value, dp_size, "data-parallel index")

    def spread(chunks: Sequence[Any]) -> PerRank:
        padding = getattr(chunks, "padding", None)
        return PerRank([chunks[index] for index in mapping], padding and _MeshPadding(padding, mapping))

    return tuple(spread(value) for value in args), {name: spread(value) for name, value in kwargs.items()}


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: WorkerGroupLike, output: Sequence[Any]) -> list[Any]:
    """Return the results of the ranks in the mask, in the order of their ranks.

    Raises
    ------
    DispatchError
        The mask does not fit the group.
    BatchMismatchError
        More or fewer results than ranks.
    """
    ranks = _collected_ranks(collect_mask, worker_group, output)
    return [output[rank] for rank in ranks]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any
) -> Dispatched:
    """Cut every batch into `dp_size` chunks and give each rank that of its data-parallel index.

    What may be given, and when rows are added so that every index gets some, is as in
    :func:`~dask_controller.dispatch.functions.dispatch_dp_compute_data_proto`.

    Raises
    ------
    DispatchError
        The mapping does not fit the group; a batch cannot be split, or not evenly while padding is off; two batches
        differ in length.
    """
    mapping = _checked_mapping(dp_rank_mapping, dp_size, worker_group.world_size)
    split_args, split_kwargs = split_batches(dp_size, args, kwargs, receivers="data-parallel groups of ranks")
    return dispatch_nd_compute(mapping, dp_size, worker_group, *split_args, **split_kwargs)


def collect_nd_compute_dataproto(
    collect_mask: Sequence[bool], worker_group: WorkerGroupLike, output: Sequence[Any]
) -> Any:
    """Join the results of the ranks in the mask, without the rows that come from padding.

    Parameters
    ----------
    collect_mask : sequence of bool
        Whether the result of a rank counts.
    worker_group : WorkerGroupLike
        The group that was called.
    output : RankOutputs or sequence
        One element per rank, None allowed outside the mask.

    Returns
    -------
    DataProto, TensorDict or DataProtoFuture
        The results in one piece; a DataProtoFuture where futures came in.

    Raises
    ------
    DispatchError
        The mask does not fit the group.
    UnsupportedTypeError
        A rank of the mask returned something that cannot be joined; the message names it.
    BatchMismatchError
        More or fewer results than ranks, or rows of padding cannot be told from real ones.

    Notes
    -----
    Results stand in the order of the chunks they were made from, so that rows come back in the order in which they went
    out, whatever the numbering of the ranks: `output` of a group remembers that of a call made by
    :func:`dispatch_nd_compute_dataproto`. With a plain list they stand in the order of the ranks.
    """
    return _join(_collected_ranks(collect_mask, worker_group, output), None, output)


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any
) -> Dispatched:
    """As :func:`dispatch_nd_compute_dataproto`, with the mapping that the ranks have registered for a mesh.

    Blocks at the first call over a mesh, while the ranks are asked.
    """
    mapping = _mesh_mapping(mesh_name, worker_group)
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: WorkerGroupLike, output: Sequence[Any]) -> Any:
    """As :func:`collect_nd_compute_dataproto`, with the mask that the ranks have registered for a mesh.

    Results always stand in the order of the data-parallel indices. Where two ranks of one index are in the mask, the
    rows of both are there, the lower rank first.
    """
    mask = _mesh_mask(mesh_name, worker_group)
    return _join(_collected_ranks(mask, worker_group, output), _mesh_mapping(mesh_name, worker_group), output)


@dataclass(frozen=True)
class _MeshDispatch:
    """The dispatch function of one mesh. A class, so that it pickles and shows the mesh in its repr."""

    mesh_name: str

    def __call__(self, worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
        return dispatch_lazy_compute_data_proto(self.mesh_name, worker_group, *args, **kwargs)


@dataclass(frozen=True)
class _MeshCollect:
    """The collect function of one mesh."""

    mesh_name: str

    def __call__(self, worker_group: WorkerGroupLike, output: Sequence[Any]) -> Any:
        return collect_lazy_compute_data_proto(self.mesh_name, worker_group, output)

    def collect_mask(self, worker_group: WorkerGroupLike) -> list[bool]:
        """Whether the result of a rank is needed; the group asks the others for none."""
        return list(_mesh_mask(self.mesh_name, worker_group))


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchPair:
    """Make a dispatch mode for the methods of one mesh.

    Parameters
    ----------
    mesh_name : str
        The name under which the ranks register (``Worker._register_dispatch_collect_info``).

    Returns
    -------
    dict
        ``{"dispatch_fn": ..., "collect_fn": ...}``, for ``register(dispatch_mode=...)``.
    """
    if not isinstance(mesh_name, str) or not mesh_name:
        raise DispatchError(f"mesh_name is {mesh_name!r}. Expected the name of a mesh that the ranks register.")
    return {"dispatch_fn": _MeshDispatch(mesh_name), "collect_fn": _MeshCollect(mesh_name)}


class _MeshPadding(PaddingView):
    """The cut of a call over a mesh. It takes the mapping along to the collect side."""

    __slots__ = ("dp_rank_mapping",)

    def __init__(self, cut: Padding, dp_rank_mapping: Sequence[int]) -> None:
        super().__init__(cut, range(max(dp_rank_mapping) + 1))
        self.dp_rank_mapping = tuple(dp_rank_mapping)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cut, self.dp_rank_mapping)


def _join(ranks: list[int], mapping: Sequence[int] | None, output: Sequence[Any]) -> Any:
    padding: Padding | None = getattr(output, "padding", None)
    if isinstance(padding, _MeshPadding):
        mapping = padding.dp_rank_mapping
    elif padding is not None:
        # Another dispatch function has cut the batch: one chunk per rank, unless the numbers say otherwise.
        if padding.padded is None or len(padding.padded) == len(output):
            padding = PaddingView(padding, ranks)
        mapping = None
    if mapping is not None:
        ranks = sorted(ranks, key=lambda rank: (mapping[rank], rank))
        padding = padding and PaddingView(padding, [mapping[rank] for rank in ranks])
    return join_batches([output[rank] for rank in ranks], ranks, padding)


def _collected_ranks(mask: Sequence[bool], worker_group: WorkerGroupLike, output: Sequence[Any]) -> list[int]:
    mask = _checked_mask(mask, worker_group.world_size)
    collect_dp_compute(worker_group, output)
    return [rank for rank, collected in enumerate(mask) if collected]


def _mesh_mapping(mesh_name: str, worker_group: WorkerGroupLike) -> list[int]:
    known = worker_group._dispatch_info
    if mesh_name not in known:
        answer = worker_group._query_dispatch_info(mesh_name)
        known[mesh_name] = _checked_mapping(answer, None, worker_group.world_size, mesh_name)
    return known[mesh_name]


def _mesh_mask(mesh_name: str, worker_group: WorkerGroupLike) -> list[bool]:
    known = worker_group._collect_info
    if mesh_name not in known:
        answer = worker_group._query_collect_info(mesh_name)
        known[mesh_name] = _checked_mask(answer, worker_group.world_size, mesh_name)
    return known[mesh_name]


def _checked_mapping(
    mapping: Sequence[int], dp_size: int | None, world_size: int, mesh_name: str | None = None
) -> list[int]:
    """Check that every rank has an index and every index a rank; without `dp_size`, the highest index tells it."""
    of_mesh = f" of mesh {mesh_name!r}" if mesh_name is not None else ""
    if len(mapping) != world_size:
        raise DispatchError(
            f"dp_rank_mapping{of_mesh} has {len(mapping)} entries: {list(mapping)}. Expected the data-parallel index "
            f"of each of the {world_size} ranks. No rank was called."
        )
    indices = []
    for rank, index in enumerate(mapping):
        whole = index.__index__() if hasattr(index, "__index__") and not isinstance(index, bool) else -1
        if whole < 0 or (dp_size is not None and whole >= dp_size):
            limit = f"below dp_size={dp_size}" if dp_size is not None else "of 0 or more"
            raise DispatchError(
                f"dp_rank_mapping{of_mesh} gives rank {rank} the data-parallel index {index!r}. Expected an integer "
                f"{limit}. No rank was called."
            )
        indices.append(whole)
    size = max(indices, default=-1) + 1 if dp_size is None else dp_size
    missing = sorted(set(range(size)) - set(indices))
    if missing or size < 1:
        raise DispatchError(
            f"dp_rank_mapping{of_mesh} is {indices}: no rank has the data-parallel index "
            f"{', '.join(map(str, missing))}, so its rows would get lost. Expected all of 0 to {size - 1}. No rank was "
            "called."
        )
    return indices


def _checked_mask(mask: Sequence[bool], world_size: int, mesh_name: str | None = None) -> list[bool]:
    of_mesh = f" of mesh {mesh_name!r}" if mesh_name is not None else ""
    if len(mask) != world_size:
        raise DispatchError(
            f"collect_mask{of_mesh} has {len(mask)} entries: {list(mask)}. Expected True or False for each of the "
            f"{world_size} ranks."
        )
    for rank, collected in enumerate(mask):
        if collected not in (True, False):
            raise DispatchError(
                f"collect_mask{of_mesh} has {collected!r} for rank {rank}. Expected True or False: whether the result "
                "of the rank is collected."
            )
    if not any(mask):
        raise DispatchError(
            f"collect_mask{of_mesh} collects no rank, so the call would have no result. Expected is_collect=True on "
            "one rank per data-parallel index, such as that of tensor-parallel rank 0."
        )
    return [bool(collected) for collected in mask]
