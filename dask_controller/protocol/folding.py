"""Folding batch dimensions: the two functions of that name for DataProto. The work is done in ``reshape``."""

from __future__ import annotations

from dask_controller.protocol import reshape
from dask_controller.protocol.data_proto import DataProto

__all__ = ["fold_batch_dim", "unfold_batch_dim"]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return ``[rows, ...]`` as ``[new_batch_size, rows // new_batch_size, ...]``, every column alike, as views.

    Raises
    ------
    ChunkError
        ``new_batch_size`` does not divide the rows.
    UnsupportedTypeError
        A column is a nested tensor.
    """
    return data._new(*reshape.fold_columns(data.batch, data.non_tensor_batch, len(data), new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Merge the first ``batch_dims`` dimensions of every column into the batch dimension; undoes a fold.

    Raises
    ------
    BatchMismatchError
        A column has fewer dimensions, or columns disagree about them.
    """
    return data._new(*reshape.unfold_columns_dims(data.batch, data.non_tensor_batch, batch_dims))
