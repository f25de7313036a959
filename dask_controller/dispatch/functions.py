"""The dispatch and collect functions behind the built-in modes.

A dispatch function turns the arguments of one call into lists with one element per rank; a collect function turns the
list of results into what the caller gets. Both are pure: they see of the group only what
:class:`~dask_controller.dispatch._types.WorkerGroupLike` says, start nothing, and leave their inputs as they are. The
group is positional-only, so that a method may have a keyword argument of any name. The functions for device meshes are
in :mod:`~dask_controller.dispatch.mesh`; which mode uses which function stands in
:mod:`~dask_controller.dispatch.registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from dask_controller.dispatch._batches import join_batches, labelled, split_batches
from dask_controller.dispatch._types import Dispatched, WorkerGroupLike
from dask_controller.errors import BatchMismatchError, DispatchError
from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.batching import PerRank

__all__ = [
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_rank_zero",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_one_to_all",
    "dispatch_rank_zero",
    "refuse_direct_rollout",
]


def dispatch_one_to_all(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Every rank gets the same value.

    Parameters
    ----------
    worker_group : WorkerGroupLike
        The group that is called.
    *args, **kwargs
        Any values.

    Returns
    -------
    (tuple of PerRank, dict of PerRank)
        Each holds the very same object once per rank, so that the group can send it once per host.
    """
    world_size = worker_group.world_size
    return (
        tuple(PerRank([value] * world_size) for value in args),
        {name: PerRank([value] * world_size) for name, value in kwargs.items()},
    )


def dispatch_all_to_all(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Let the arguments pass as they are; the group hands them to every rank."""
    return args, kwargs


def collect_all_to_all(worker_group: WorkerGroupLike, output: Any) -> Any:
    """Return the list of results, one per rank."""
    return output


def dispatch_rank_zero(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Rank 0 gets the values; the other ranks are not called, and None stands in their places."""
    others = [None] * (worker_group.world_size - 1)
    return (
        tuple(PerRank([value, *others]) for value in args),
        {name: PerRank([value, *others]) for name, value in kwargs.items()},
    )


def collect_rank_zero(worker_group: WorkerGroupLike, output: Sequence[Any]) -> Any:
    """Return the result of rank 0 itself, not a list.

    `output` may hold one element per rank, or that of rank 0 alone.
    """
    if len(output) not in (1, worker_group.world_size):
        raise _wrong_count(worker_group, output)
    return output[0]


def dispatch_dp_compute(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Every argument already is a list or tuple with one element per rank.

    Raises
    ------
    DispatchError
        An argument is something else, or has another length; the message names it.
    """
    for label, value in labelled(args, kwargs):
        check_per_rank(label, value, worker_group.world_size)
    return tuple(PerRank(value) for value in args), {name: PerRank(value) for name, value in kwargs.items()}


def collect_dp_compute(worker_group: WorkerGroupLike, output: Sequence[Any]) -> Any:
    """Return the list of results after checking that there is one per rank.

    Raises
    ------
    BatchMismatchError
        More or fewer results than ranks.
    """
    if len(output) != worker_group.world_size:
        raise _wrong_count(worker_group, output)
    return output


def dispatch_dp_compute_data_proto(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Split every batch into one chunk per rank.

    Parameters
    ----------
    worker_group : WorkerGroupLike
        The group that is called.
    *args, **kwargs
        DataProto, TensorDict, DataProtoFuture, or Dask futures of these, all with the same number of rows. A DataProto
        without columns, which only carries meta_info, goes with any length. No argument at all is allowed.

    Returns
    -------
    (list of PerRank, dict of PerRank)
        With the Padding that says how each was cut.

    Raises
    ------
    DispatchError
        An argument cannot be split, two batches differ in length, or the length is no multiple of the number of ranks
        while padding is off.

    Notes
    -----
    Where padding is on for one batch of the call (``DataProtoConfig.auto_padding``, ``VERL_AUTO_PADDING``, or
    ``auto_padding`` of the batch) all are padded alike, by repeating the last row until the ranks can share evenly:
    every rank gets at least one row, unless there are none. The batches of the caller stay as they are.
    """
    return split_batches(worker_group.world_size, args, kwargs)


def collect_dp_compute_data_proto(worker_group: WorkerGroupLike, output: Sequence[Any]) -> Any:
    """Join the results in rank order, without the rows that come from padding.

    Parameters
    ----------
    worker_group : WorkerGroupLike
        The group that was called.
    output : RankOutputs or sequence
        One DataProto, TensorDict or future per rank.

    Returns
    -------
    DataProto, TensorDict or DataProtoFuture
        The results in one piece; a DataProtoFuture where futures came in.

    Raises
    ------
    UnsupportedTypeError
        A rank returned something else; the message names it.
    BatchMismatchError
        More or fewer results than ranks, or rows of padding cannot be told from real ones.
    """
    collect_dp_compute(worker_group, output)
    return join_batches(output, range(len(output)), getattr(output, "padding", None))


def dispatch_dp_compute_data_proto_with_func(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> Dispatched:
    """Send a function to all ranks, and split every other argument into one chunk per rank.

    The function is the first positional argument. In a call that has keyword arguments only it is the one that can be
    called.

    Raises
    ------
    DispatchError
        There is no function, or as in :func:`dispatch_dp_compute_data_proto`.
    """
    world_size = worker_group.world_size
    if args:
        if not _is_function(args[0]):
            raise DispatchError(
                f"argument 1 is a {type(args[0]).__name__}. Expected a function: this dispatch mode sends its first "
                "argument to all ranks, which call it, and splits the others. No rank was called."
            )
        split_args, split_kwargs = split_batches(world_size, args[1:], kwargs, first=2)
        return [PerRank([args[0]] * world_size), *split_args], split_kwargs

    functions = {name: value for name, value in kwargs.items() if _is_function(value)}
    if len(functions) != 1:
        found = ", ".join(map(repr, functions)) or "none"
        raise DispatchError(
            "The call names no single function to run. Expected a function as the first argument, or exactly one among "
            f"the keyword arguments; got {found}. No rank was called."
        )
    _, split_kwargs = split_batches(world_size, (), {k: v for k, v in kwargs.items() if k not in functions})
    return [], {
        name: PerRank([value] * world_size) if name in functions else split_kwargs[name]
        for name, value in kwargs.items()
    }


def refuse_direct_rollout(worker_group: WorkerGroupLike, /, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: a method of this mode is no affair of the group.

    Raises
    ------
    NotImplementedError
        Always.
    """
    raise NotImplementedError(
        "A method marked Dispatch.DIRECT_ROLLOUT_METHOD is called directly on the rank, by the rollout engine that "
        "runs there, and never through the group: arguments and results of such a call have no split. Mark the method "
        "with another mode, such as Dispatch.ONE_TO_ALL, to call it from the controller."
    )


def check_per_rank(label: str, value: object, expected: int, receivers: str = "rank") -> None:
    """Check that an argument is a list or tuple with one element per rank, or per data-parallel index."""
    if not isinstance(value, (list, tuple)):
        hint = " Dispatch.DP_COMPUTE_PROTO splits batches." if BatchData(value).is_chunkable() else ""
        raise DispatchError(
            f"{label} is a {type(value).__name__}. Expected a list or tuple with one element per {receivers}, "
            f"{expected} in all.{hint} No rank was called."
        )
    if len(value) != expected:
        raise DispatchError(
            f"{label} has {len(value)} elements. Expected one per {receivers}, {expected} in all. No rank was called."
        )


def _is_function(value: object) -> bool:
    return callable(value) and not BatchData(value).is_chunkable()


def _wrong_count(worker_group: WorkerGroupLike, output: Sequence[Any]) -> BatchMismatchError:
    return BatchMismatchError(
        f"{len(output)} results came back. Expected one per rank, {worker_group.world_size} in all. A collect function "
        "gets the results of all ranks, with None where a rank was not asked."
    )


def _rank_zero_mask(worker_group: WorkerGroupLike) -> list[bool]:
    return [rank == 0 for rank in range(worker_group.world_size)]


# The group reads this to know which ranks need not send anything back.
collect_rank_zero.collect_mask = _rank_zero_mask  # type: ignore[attr-defined]
