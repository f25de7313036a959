"""Mini-batches out of a batch, and a batch out of single rows. Owns the use of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset

from dask_controller.errors import BatchMismatchError, ChunkError, KeyConflictError, UnsupportedTypeError
from dask_controller.protocol.columns import object_column
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.meta import list_of_dict_to_dict_of_list
from dask_controller.protocol.reshape import count
from dask_controller.protocol.rows import BatchRows, DataProtoItem

__all__ = ["collate_fn", "iterate"]

_D = TypeVar("_D", bound=BatchRows)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a batch, for use with a DataLoader over a DataProto.

    Parameters
    ----------
    x : sequence of DataProtoItem
        At least one, all with the same columns. Tensors of one shape are stacked; tensors that differ in their first
        dimension become a jagged nested tensor. ``meta_info`` is not taken over.

    Raises
    ------
    BatchMismatchError
        No rows, or tensors that cannot be stacked; names the column.
    KeyConflictError
        The rows do not have the same columns.
    """
    items = list(x)
    if not items:
        raise BatchMismatchError("There is no row to stack: the list is empty.")
    batch = None
    if any(item.batch is not None for item in items):
        if any(item.batch is None for item in items):
            raise KeyConflictError("Some rows have tensors and some have none; stack rows of one batch.")
        rows = list_of_dict_to_dict_of_list([{key: item.batch.get(key) for key in item.batch.keys()} for item in items])
        batch = TensorDict({key: _stack(key, values) for key, values in rows.items()}, batch_size=[len(items)])
    arrays = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in items])
    return DataProto(batch=batch, non_tensor_batch={key: object_column(values, key) for key, values in arrays.items()})


def _stack(key: str, values: list[Any]) -> Any:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) == 1:
        return torch.stack(values)
    if len({shape[1:] for shape in shapes}) > 1 or () in shapes:
        raise BatchMismatchError(f"Rows of column {key!r} have shapes {sorted(shapes)} and cannot be stacked.")
    return torch.nested.nested_tensor(values, layout=torch.jagged)


class _Rows(Dataset[Any]):
    """Row access for DataLoader that picks a whole mini-batch at once instead of stacking single rows."""

    def __init__(self, data: BatchRows) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data.select_idxs(indices)


def _as_is(batch: Any) -> Any:
    return batch


def iterate(
    data: _D, mini_batch_size: int, epochs: int, seed: int | None, dataloader_kwargs: Mapping[str, Any] | None
) -> Iterator[_D]:
    """Iterate over mini-batches of a batch, for several epochs.

    Parameters
    ----------
    data : DataProto
        Is not changed; each mini-batch is a copy of its rows with a ``meta_info`` of its own.
    mini_batch_size : int
        Rows of each mini-batch. Must divide the batch, unless ``dataloader_kwargs`` has ``drop_last=True``.
    epochs : int
        Passes over the batch.
    seed : int, optional
        For shuffling; the order of every epoch follows from it. Without one the order is new each time.
    dataloader_kwargs : mapping, optional
        For :class:`torch.utils.data.DataLoader`, such as ``{"shuffle": True}``. A ``collate_fn`` gets the mini-batch.

    Raises
    ------
    ChunkError
        The sizes do not fit. Raised by the call, not by the first step.

    Notes
    -----
    The global random state of torch, numpy and ``random`` is neither read nor changed.
    """
    size = count(mini_batch_size, "mini_batch_size", 1)
    passes = count(epochs, "epochs", 0)
    if dataloader_kwargs is not None and not isinstance(dataloader_kwargs, Mapping):
        raise UnsupportedTypeError(f"dataloader_kwargs must be a dict, got {type(dataloader_kwargs).__name__}.")
    options = {"collate_fn": _as_is, **(dataloader_kwargs or {})}
    if len(data) % size and not options.get("drop_last"):
        raise ChunkError(
            f"{len(data)} rows cannot be cut into mini-batches of {size}: {len(data) % size} would be left over. "
            "Choose a size that divides, or pass dataloader_kwargs={'drop_last': True}."
        )
    if len(data) == 0:
        return iter(())
    # Always a generator of our own: without one DataLoader draws from the global state, also when it does not shuffle.
    generator = options.pop("generator", None)
    if generator is None:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(_Rows(data), batch_size=size, generator=generator, **options)

    def batches() -> Iterator[_D]:
        for _ in range(passes):
            yield from loader

    return batches()
