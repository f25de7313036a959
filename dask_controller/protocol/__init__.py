"""Data that travels: batches, their bytes, their futures. Importable and testable without a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.batching import Padding, PerRank, RankOutputs, chunk_bounds, chunk_sizes, padding_rows
from dask_controller.protocol.collate import collate_fn
from dask_controller.protocol.config import DataProtoConfig
from dask_controller.protocol.data_proto import DataProto, DataProtoItem
from dask_controller.protocol.folding import fold_batch_dim, unfold_batch_dim
from dask_controller.protocol.gather import all_gather_data_proto
from dask_controller.protocol.meta import RankValues, list_of_dict_to_dict_of_list
from dask_controller.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from dask_controller.protocol.serialize import Packed, pack, unpack
from dask_controller.protocol.union import union_numpy_dict, union_tensor_dict

if TYPE_CHECKING:
    from dask_controller.protocol.future import DataProtoFuture

__all__ = [
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Packed",
    "Padding",
    "PerRank",
    "RankOutputs",
    "RankValues",
    "all_gather_data_proto",
    "chunk_bounds",
    "chunk_sizes",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pack",
    "pad_dataproto_to_divisor",
    "padding_rows",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpack",
    "unpad_dataproto",
]


def __getattr__(name: str) -> Any:
    # Futures need a cluster; everything else here does not.
    if name == "DataProtoFuture":
        from dask_controller.protocol.future import DataProtoFuture

        return DataProtoFuture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
