"""Gathering a batch from all ranks of a torch process group. Owns nothing but this collective."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from dask_controller.errors import KeyConflictError, UnsupportedTypeError
from dask_controller.protocol.columns import join_arrays, join_tensordicts
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.serialize import Packed, pack, unpack

__all__ = ["all_gather_data_proto"]


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace the rows of ``data`` by those of all ranks of the group, in rank order, in place.

    Parameters
    ----------
    data : DataProto
        This rank's rows; every rank needs the same columns, the number of rows may differ. ``meta_info`` stays this
        rank's own. Tensors end on the device they came from.
    process_group : torch.distributed.ProcessGroup
        All its ranks must call this.

    Raises
    ------
    KeyConflictError
        The ranks have different columns. Raised on every rank.

    Notes
    -----
    Plain tensors go through one collective each as raw bytes, so that every dtype arrives bit for bit with any
    backend; nested tensors and object columns are pickled, as ``all_gather_object`` does. Blocks until all ranks
    have called.
    """
    if not isinstance(data, DataProto):
        raise UnsupportedTypeError(f"Expected a DataProto to gather, got {type(data).__name__}.")
    batch = data.batch
    keys = [] if batch is None else sorted(batch.keys(), key=str)
    plain = [key for key in keys if _is_plain(batch.get(key))]
    rest = {key: batch.get(key) for key in keys if key not in plain}
    # One round of objects says who has what; all ranks then judge by the same facts.
    mine = {
        "rows": len(data),
        "tensors": None if batch is None else {key: (str(batch.get(key).dtype), _row(batch.get(key))) for key in plain},
        "other": _freeze(pack((rest, data.non_tensor_batch))),
    }
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs["tensors"] != everyone[0]["tensors"]:
            raise KeyConflictError(
                f"Ranks must have the same tensors to gather: rank 0 has {everyone[0]['tensors']}, rank {rank} has "
                f"{theirs['tensors']}."
            )
    others = [unpack(_thaw(theirs["other"])) for theirs in everyone]
    rows = [theirs["rows"] for theirs in everyone]
    arrays = join_arrays([(rank, columns) for rank, (_, columns) in enumerate(others)])
    if batch is not None:
        columns: dict[str, Any] = {key: _gather(batch.get(key), rows, process_group) for key in plain}
        if rest:
            parts = [(r, TensorDict(td, batch_size=[rows[r]])) for r, (td, _) in enumerate(others)]
            joined = join_tensordicts(parts)
            columns.update({key: joined.get(key) for key in rest})
        ordered = {key: columns[key] for key in batch.keys()}
        gathered = TensorDict(ordered, batch_size=[sum(rows)])
        data.batch = gathered.to(batch.device) if batch.device is not None else gathered
    data.non_tensor_batch = arrays


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_nested and value.layout is torch.strided


def _row(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _freeze(packed: Packed) -> tuple[bytes, list[bytes]]:
    return packed.header, [bytes(frame) for frame in packed.frames]


def _thaw(parts: tuple[bytes, list[bytes]]) -> Packed:
    return Packed(*parts)


def _gather(tensor: torch.Tensor, rows: list[int], group: Any) -> torch.Tensor:
    """Gather one column; shorter ranks are filled up to the longest, because collectives want equal shapes."""
    device = torch.device("cuda") if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
    row_nbytes = int(np.prod(tensor.shape[1:], dtype=np.int64)) * tensor.element_size()
    longest = max(rows)
    sent = torch.zeros(longest * row_nbytes, dtype=torch.uint8, device=device)
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    sent[: raw.numel()] = raw.to(device)
    received = [torch.empty_like(sent) for _ in rows]
    dist.all_gather(received, sent, group=group)
    joined = torch.cat([part[: count * row_nbytes] for part, count in zip(received, rows, strict=True)])
    return joined.view(tensor.dtype).view(sum(rows), *tensor.shape[1:]).to(tensor.device)
