"""Row operations on the columns of a batch: cut, pick, join. Tensors and arrays alike, rows always in front.

Owns what has to be done differently for odd dtypes, nested tensors and empty parts. Pure functions; nothing here
changes its input. It does not know DataProto.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from dask_controller.errors import BatchMismatchError, KeyConflictError, UnsupportedTypeError

__all__ = [
    "join_arrays",
    "join_tensordicts",
    "map_rows",
    "object_column",
    "row_indices",
    "stack_nested",
    "slice_tensordict",
    "take_tensordict",
]

Array = np.ndarray[Any, Any]


# --- building ----------------------------------------------------------------------------------------------------


def object_column(values: Any, key: str = "") -> Array:
    """Return a column for ``values``: an array as it is, anything else as a 1-D object column, one element per row.

    Lists stay lists: no element is looked into, also where all have the same length.

    Raises
    ------
    UnsupportedTypeError
        ``values`` is no sequence of rows.

    Examples
    --------
    >>> object_column([[1, 2], [3, 4]])
    array([list([1, 2]), list([3, 4])], dtype=object)
    """
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise UnsupportedTypeError(
                f"Column {key!r} is a 0-d array; a column needs one element per row. Put single values in meta_info."
            )
        return values
    if isinstance(values, torch.Tensor):
        values = values.tolist() if values.dim() else [values]
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise UnsupportedTypeError(
            f"Column {key!r} must be an array or a list with one element per row, got {type(values).__name__}. "
            "Put single values in meta_info."
        )
    rows = list(values)
    # np.array(rows, dtype=object) would turn equally long lists into a 2-D array.
    return np.fromiter(rows, dtype=object, count=len(rows))


# --- indices -----------------------------------------------------------------------------------------------------


def row_indices(indices: Any, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return row numbers in ``0 .. length - 1`` for a list, range, array or tensor of numbers, or a mask.

    Raises
    ------
    IndexError
        A row number is outside the batch.
    BatchMismatchError
        A mask is not as long as the batch.
    UnsupportedTypeError
        Neither numbers nor a mask, or more than one dimension.
    """
    if isinstance(indices, torch.Tensor):
        array = indices.detach().cpu().numpy()
    else:
        array = np.asarray(indices)
        if array.size == 0 and not isinstance(indices, np.ndarray):
            array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise UnsupportedTypeError(
            f"Rows are picked by a 1-D list, array or tensor of integers or bools, got {array.ndim}-D {array.dtype}."
        )
    if array.dtype.kind == "b":
        if len(array) != length:
            raise BatchMismatchError(f"The mask has {len(array)} entries, but the batch has {length} rows.")
        return np.flatnonzero(array)
    numbers = array.astype(np.int64)
    numbers = np.where(numbers < 0, numbers + length, numbers)
    outside = (numbers < 0) | (numbers >= length)
    if outside.any():
        raise IndexError(f"Row {array[outside][0]} is outside a batch of {length} rows.")
    return numbers


# --- one tensordict ----------------------------------------------------------------------------------------------


def map_rows(
    td: TensorDictBase, function: Callable[[Any], Any], length: int, names: Sequence[str] | None = None
) -> TensorDict:
    """Apply ``function`` to each tensor; nested TensorDicts are followed, non-tensor entries must allow indexing."""
    columns = {}
    for key in td.keys():
        value = td.get(key)
        columns[key] = map_rows(value, function, length) if isinstance(value, TensorDict) else function(value)
    return TensorDict(columns, batch_size=[length], device=td.device, names=list(names) if names else None)


def slice_tensordict(td: TensorDictBase, rows: builtins.slice) -> TensorDictBase:
    """Rows of a plain slice, as views; steps below 1 are for :func:`take_tensordict`."""
    try:
        sliced: TensorDictBase = td[rows]
        return td.copy() if sliced is td else sliced  # a full slice gives the very object
    except (NotImplementedError, RuntimeError):  # a layout that torch cannot slice
        return take_tensordict(td, np.arange(td.batch_size[0])[rows])


def take_tensordict(td: TensorDictBase, indices: np.ndarray[Any, np.dtype[np.int64]]) -> TensorDictBase:
    """Rows by number, as a copy."""
    index = torch.from_numpy(indices)
    if td.device is not None and td.device.type == "cuda":
        index = index.to(td.device, non_blocking=True)
    try:
        taken: TensorDictBase = td[index]
        return taken
    except (NotImplementedError, RuntimeError):  # a dtype or layout that torch cannot index
        return map_rows(td, lambda column: _take(column, index), len(indices))


def _take(column: Any, index: torch.Tensor) -> Any:
    if not isinstance(column, torch.Tensor):
        return column[index]
    if column.is_nested:
        rows = column.unbind()
        return stack_nested([rows[i] for i in index.tolist()], like=column)
    try:
        return column[index]
    except NotImplementedError:
        bits = torch.uint8 if column.dtype.itemsize == 1 else torch.int16
        return column.view(bits)[index].view(column.dtype)


def stack_nested(rows: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Make a nested tensor of the layout and dtype of ``like`` out of its, or similar, rows."""
    if rows:
        return torch.nested.as_nested_tensor(list(rows), layout=like.layout)
    if like.layout is not torch.jagged:
        return torch.nested.nested_tensor([], dtype=like.dtype, device=like.device)
    values, offsets = like.values(), like.offsets()  # type: ignore[attr-defined]
    ragged_dim = int(like._ragged_idx)  # type: ignore[attr-defined]
    none = values.narrow(ragged_dim - 1, 0, 0)
    return torch.nested.nested_tensor_from_jagged(none, offsets[:1] * 0, jagged_dim=ragged_dim)


# --- joining -----------------------------------------------------------------------------------------------------


def _check_keys(kind: str, parts: Sequence[tuple[int, Iterable[str]]]) -> None:
    rank, keys = parts[0]
    expected = set(keys)
    for other, names in parts[1:]:
        found = set(names)
        if found != expected:
            raise KeyConflictError(
                f"Batches to join must have the same {kind}: batch {rank} has {sorted(map(str, expected))}, batch "
                f"{other} has {sorted(map(str, found))} (missing {sorted(map(str, expected - found))}, unexpected "
                f"{sorted(map(str, found - expected))}). Use select or pop to make them agree."
            )


def join_tensordicts(parts: Sequence[tuple[int, TensorDictBase]]) -> TensorDictBase:
    """Stack batches below each other, one copy. ``parts`` are (position in the caller's list, batch).

    A batch of 0 rows says nothing about dtype or trailing shape where another has rows: ranks that had nothing to do
    often return ``torch.empty(0)``.

    Raises
    ------
    KeyConflictError
        The batches have different columns.
    BatchMismatchError
        Columns of one name have different trailing shapes.
    """
    _check_keys("tensor columns", [(rank, td.keys()) for rank, td in parts])
    full = [part for part in parts if part[1].batch_size[0]] or [parts[0]]
    if len(full) == 1:
        return full[0][1].copy()  # columns shared, container its own
    try:
        return cast("TensorDictBase", torch.cat([cast("Any", td) for _, td in full], dim=0))
    except (RuntimeError, NotImplementedError, KeyError) as error:
        raise BatchMismatchError(_shape_text(full) or f"The batches cannot be joined: {error}") from error


def _shape_text(parts: Sequence[tuple[int, TensorDictBase]]) -> str:
    for key in parts[0][1].keys():
        shapes = {}
        for rank, td in parts:
            column = td.get(key)
            if isinstance(column, torch.Tensor) and not column.is_nested:
                shapes[rank] = tuple(column.shape[1:])
        if len(set(shapes.values())) > 1:
            each = ", ".join(f"batch {rank}: {shape}" for rank, shape in list(shapes.items())[:8])
            return (
                f"Column {key!r} has different trailing shapes in the batches to join ({each}). "
                "Pad it to one length, or use a jagged nested tensor."
            )
    return ""


def join_arrays(parts: Sequence[tuple[int, Mapping[str, Array]]]) -> dict[str, Array]:
    """Stack object and array columns below each other; the rules are those of :func:`join_tensordicts`."""
    _check_keys("non-tensor columns", [(rank, columns.keys()) for rank, columns in parts])
    joined = {}
    for key in parts[0][1]:
        arrays = [(rank, columns[key]) for rank, columns in parts]
        full = [(rank, array) for rank, array in arrays if len(array)] or arrays[:1]
        if len(full) == 1:
            joined[key] = full[0][1]
            continue
        shapes = {rank: array.shape[1:] for rank, array in full}
        if len(set(shapes.values())) > 1:
            each = ", ".join(f"batch {rank}: {shape}" for rank, shape in list(shapes.items())[:8])
            raise BatchMismatchError(
                f"Column {key!r} has different trailing shapes in the batches to join ({each}). "
                "Make it a 1-D object column (a list with one element per row)."
            )
        joined[key] = np.concatenate([array for _, array in full], axis=0)
    return joined
