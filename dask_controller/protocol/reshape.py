"""Changing the form of a batch: TensorDicts in and out, folded dimensions, renamed columns, descriptions.

Owns operations over whole sets of columns that the DataProto methods of the same names hand over to. It does not know
DataProto: functions take and return its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dask_controller.errors import BatchMismatchError, ChunkError, KeyConflictError, UnsupportedTypeError
from dask_controller.protocol.columns import map_rows, object_column, take_tensordict

__all__ = [
    "count",
    "describe",
    "make_tensordict",
    "merge_tensordict",
    "rename_columns",
    "repeated_rows",
    "split_tensordict",
    "tensordict_nbytes",
    "unfold_columns",
]

Array = np.ndarray[Any, Any]


def count(value: Any, what: str, least: int) -> int:
    """Return ``value`` as an int of at least ``least``, or raise ChunkError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ChunkError(f"{what} must be an integer of at least {least}, got {value!r}.")
    return int(value)


# --- TensorDicts -------------------------------------------------------------------------------------------------


def make_tensordict(tensors: Mapping[str, Any]) -> TensorDict:
    """Put tensors of one length into a TensorDict, or say which columns disagree."""
    rows, witness = -1, ""
    for key, tensor in tensors.items():
        if not isinstance(tensor, (torch.Tensor, TensorDictBase, NonTensorStack)):
            raise UnsupportedTypeError(
                f"Column {key!r} of tensors must be a tensor, got {type(tensor).__name__}. "
                "Arrays and lists go into non_tensors, single values into meta_info."
            )
        if tensor.ndim == 0:
            raise BatchMismatchError(f"Tensor {key!r} has no dimensions; a column needs one element per row.")
        # Nested tensors of strided layout have no shape, but they can be asked for this size.
        length = int(tensor.size(0) if isinstance(tensor, torch.Tensor) else tensor.shape[0])
        if rows < 0:
            rows, witness = length, key
        elif length != rows:
            raise BatchMismatchError(f"Tensor {key!r} has {length} rows, but {witness!r} has {rows}.")
    return TensorDict(dict(tensors), batch_size=[rows])


def split_tensordict(td: TensorDictBase) -> tuple[TensorDict | None, dict[str, Array], dict[str, Any]]:
    """Take a TensorDict apart into tensors, object columns and values of the whole batch."""
    if not isinstance(td, TensorDictBase):
        raise UnsupportedTypeError(f"Expected a TensorDict, got {type(td).__name__}.")
    if td.batch_dims == 0:
        raise BatchMismatchError("The TensorDict has no batch dimension; set its batch_size to [rows].")
    tensors, arrays, meta = {}, {}, {}
    for key in td.keys():
        value = td.get(key)
        if isinstance(value, NonTensorStack):
            arrays[key] = object_column([element.data for element in value.tensordicts], key)
        elif isinstance(value, NonTensorData):
            meta[key] = value.data
        else:
            tensors[key] = value
    batch = TensorDict(tensors, batch_size=td.batch_size[:1], device=td.device) if tensors else None
    return batch, arrays, meta


def merge_tensordict(
    batch: TensorDictBase | None, arrays: Mapping[str, Array], meta: Mapping[str, Any], rows: int
) -> TensorDict:
    """Put the parts of a batch into one TensorDict; the inverse of :func:`split_tensordict`."""
    parts = {"batch": set(batch.keys()) if batch is not None else set(), "non_tensor_batch": set(arrays)}
    seen: dict[Any, str] = {}
    for part, keys in {**parts, "meta_info": set(meta)}.items():
        for key in keys:
            if key in seen:
                raise KeyConflictError(
                    f"Key {key!r} is in {seen[key]} and in {part}; a TensorDict has one place for it. Rename one."
                )
            seen[key] = part
    merged = TensorDict({}, batch_size=[rows], device=None if batch is None else batch.device)
    for key in () if batch is None else batch.keys():
        merged.set(key, batch.get(key))  # type: ignore[union-attr]
    for key, column in arrays.items():
        # A stack cannot be made from nothing, but it can be cut down to nothing.
        elements = [NonTensorData(element) for element in column] or [NonTensorData(None)]
        merged.set(key, cast("Any", NonTensorStack(*elements)[: len(column)]))
    for key, value in meta.items():
        merged.set(str(key), cast("Any", NonTensorData(value, batch_size=[rows])))
    return merged


def tensordict_nbytes(td: TensorDictBase | None) -> int:
    """Bytes the tensors of a TensorDict show."""
    if td is None:
        return 0
    total = 0
    for key in td.keys():
        value = td.get(key)
        if isinstance(value, TensorDictBase):
            total += tensordict_nbytes(value)
        elif isinstance(value, torch.Tensor):
            shown = value.values() if value.is_nested and value.layout is torch.jagged else value
            total += shown.numel() * shown.element_size()
    return total


# --- dimensions --------------------------------------------------------------------------------------------------


def repeated_rows(repeat_times: Any, rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Row numbers where row i occurs ``repeat_times[i]`` times."""
    if isinstance(repeat_times, torch.Tensor):
        repeat_times = repeat_times.detach().cpu().numpy()
    times = np.asarray(repeat_times)
    if times.size == 0:
        times = times.astype(np.int64)
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times < 0).any():
        raise UnsupportedTypeError(
            f"repeat_times must be a 1-D list, array or tensor of counts, got {times.ndim}-D {times.dtype}."
        )
    if len(times) != rows:
        raise BatchMismatchError(f"repeat_times has {len(times)} counts, but the batch has {rows} rows.")
    return np.repeat(np.arange(rows), times)


def unfold_columns(
    batch: TensorDictBase | None, arrays: Mapping[str, Array], n_split: int, split_keys: Sequence[str] | None
) -> tuple[TensorDict | None, dict[str, Array]]:
    """Cut the second dimension of some columns into ``n_split`` rows each; repeat the rows of the others."""
    n_split = count(n_split, "n_split", 1)
    wanted = [] if split_keys is None else list(split_keys)
    missing = [key for key in wanted if key not in arrays and (batch is None or key not in batch.keys())]
    if missing:
        raise KeyConflictError(f"The batch has no columns {missing} to cut.")

    def cut(key: str, column: Any) -> Any:
        if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == object:
            return _cut_elements(key, column, n_split)
        if column.ndim < 2 or column.shape[1] % n_split:
            raise ChunkError(
                f"Column {key!r} of shape {tuple(column.shape)} cannot be cut into {n_split} equal parts along its "
                "second dimension."
            )
        width = column.shape[1] // n_split
        return column.reshape(column.shape[0] * n_split, width, *column.shape[2:])

    unfolded = None
    if batch is not None:
        rows = batch.batch_size[0]
        rest = take_tensordict(batch.exclude(*wanted), np.repeat(np.arange(rows), n_split))
        unfolded = TensorDict(
            {key: cut(key, batch.get(key)) if key in wanted else rest.get(key) for key in batch.keys()},
            batch_size=[rows * n_split],
            device=batch.device,
        )
    columns = {
        key: cut(key, column) if key in wanted else np.repeat(column, n_split, axis=0) for key, column in arrays.items()
    }
    return unfolded, columns


def _cut_elements(key: str, column: Array, n_split: int) -> Array:
    """Cut every list of an object column: there it is the elements that have the second dimension."""
    parts = []
    for row, element in enumerate(column):
        if not isinstance(element, (list, tuple, np.ndarray)) or len(element) % n_split:
            raise ChunkError(
                f"Row {row} of column {key!r} cannot be cut into {n_split} equal parts: {type(element).__name__}"
                f"{f' of length {len(element)}' if hasattr(element, '__len__') else ''}."
            )
        width = len(element) // n_split
        parts += [element[start * width : (start + 1) * width] for start in range(n_split)]
    return object_column(parts, key)


def fold_columns(
    batch: TensorDictBase | None, arrays: Mapping[str, Array], rows: int, new_rows: int
) -> tuple[TensorDict | None, dict[str, Array]]:
    """Turn ``rows`` rows into ``new_rows`` rows of ``rows // new_rows`` each."""
    new_rows = count(new_rows, "new_batch_size", 1)
    if rows % new_rows:
        raise ChunkError(f"A batch of {rows} rows cannot be folded into {new_rows} equal rows.")
    each = rows // new_rows

    def fold(column: Any) -> Any:
        _refuse_nested(column)
        return column.reshape(new_rows, each, *column.shape[1:])

    return None if batch is None else map_rows(batch, fold, new_rows), {key: fold(col) for key, col in arrays.items()}


def unfold_columns_dims(
    batch: TensorDictBase | None, arrays: Mapping[str, Array], batch_dims: int
) -> tuple[TensorDict | None, dict[str, Array]]:
    """Merge the first ``batch_dims`` dimensions of every column into one."""
    batch_dims = count(batch_dims, "batch_dims", 1)
    leading: dict[tuple[int, ...], str] = {}

    def unfold(column: Any) -> Any:
        _refuse_nested(column)
        head = tuple(column.shape[:batch_dims])
        if len(head) < batch_dims:
            raise BatchMismatchError(f"A column of shape {tuple(column.shape)} has no {batch_dims} leading dimensions.")
        leading.setdefault(head, "")
        if len(leading) > 1:
            raise BatchMismatchError(f"Columns disagree about their first {batch_dims} dimensions: {list(leading)}.")
        return column.reshape(int(np.prod(head)), *column.shape[batch_dims:])

    columns = {key: unfold(column) for key, column in arrays.items()}
    unfolded = None
    if batch is not None:
        parts = {key: unfold(batch.get(key)) for key in batch.keys()}
        rows = int(np.prod(next(iter(leading), (batch.batch_size[0],))))
        unfolded = TensorDict(parts, batch_size=[rows], device=batch.device)
    return unfolded, columns


def _refuse_nested(column: Any) -> None:
    if isinstance(column, torch.Tensor) and column.is_nested:
        raise UnsupportedTypeError("A nested tensor has no second dimension of one size and cannot be folded; pop it.")


# --- names and descriptions --------------------------------------------------------------------------------------


def rename_columns(
    batch: TensorDictBase | None, arrays: Mapping[str, Array], names: Mapping[str, str]
) -> tuple[TensorDictBase | None, dict[str, Array]]:
    """Give columns other names, all at once."""
    tensors = [] if batch is None else list(batch.keys())
    missing = [key for key in names if key not in tensors and key not in arrays]
    if missing:
        raise KeyConflictError(f"There is no column {missing} to rename; the batch has {tensors + list(arrays)}.")
    after = [names.get(key, key) for key in [*tensors, *arrays]]
    taken = sorted({key for key in after if after.count(key) > 1})
    if taken:
        raise KeyConflictError(f"Renaming {dict(names)} would give two columns the name {taken}.")
    renamed: TensorDictBase | None = None
    if batch is not None:
        renamed = TensorDict(
            {names.get(key, key): batch.get(key) for key in tensors}, batch_size=batch.batch_size, device=batch.device
        )
    return renamed, {names.get(key, key): column for key, column in arrays.items()}


def describe(batch: TensorDictBase | None, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> str:
    """Return shapes, dtypes and devices, and the types of the other values, one a line."""
    lines = ["batch"]
    for key in () if batch is None else batch.keys():
        value = batch.get(key)  # type: ignore[union-attr]
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape) if not value.is_nested else f"({value.size(0)}, jagged)"
            lines.append(f"  {key}: {shape} ({value.dtype}) {value.device}")
        else:
            lines.append(f"  {key}: {type(value).__name__}")
    lines.append("non_tensor_batch")
    lines += [f"  {key}: ndarray{column.shape} ({column.dtype})" for key, column in arrays.items()]
    lines.append("meta_info")
    lines += [f"  {key}: {_type_text(value)}" for key, value in meta.items()]
    return "\n".join(lines)


def _type_text(value: Any, depth: int = 4) -> str:
    if depth and isinstance(value, list):
        kinds = list(dict.fromkeys(_type_text(item, depth - 1) for item in value[:3]))
        return f"list[{'|'.join(kinds) or '...'}]"
    if depth and isinstance(value, tuple):
        return f"tuple({', '.join(_type_text(item, depth - 1) for item in value)})"
    if depth and isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{_type_text(key, depth - 1)}: {_type_text(item, depth - 1)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    if isinstance(value, torch.Tensor):
        return f"Tensor ({value.dtype})"
    return type(value).__name__
