"""Padding by hand: adding rows to a batch so that it divides evenly, and taking them off again.

Owns the two helpers. How dispatch pads, and takes padding off the results of a call, is in
:class:`~dask_controller.protocol.batching.Padding`.
"""

from __future__ import annotations

import numpy as np

from dask_controller.errors import BatchMismatchError, ChunkError, UnsupportedTypeError
from dask_controller.protocol.batching import padding_rows
from dask_controller.protocol.data_proto import DataProto

__all__ = ["pad_dataproto_to_divisor", "unpad_dataproto"]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, taken from the front of the batch again and again, until ``size_divisor`` divides its length.

    Parameters
    ----------
    data : DataProto
        Any number of rows; it is not changed. A batch of 0 rows has nothing to repeat and stays as it is.
    size_divisor : int
        1 or more, also more than the batch has rows.

    Returns
    -------
    padded : DataProto
        ``data`` itself where nothing has to be added.
    pad_size : int
        Rows added, for :func:`unpad_dataproto`.

    Raises
    ------
    ChunkError
        ``size_divisor`` is no positive integer.
    """
    if not isinstance(data, DataProto):
        raise UnsupportedTypeError(f"Expected a DataProto to pad, got {type(data).__name__}.")
    rows = len(data)
    pad_size = padding_rows(rows, size_divisor)
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last ``pad_size`` rows; ``data`` itself where that is 0.

    Raises
    ------
    BatchMismatchError
        The batch has fewer rows than that.
    """
    if isinstance(pad_size, bool) or not isinstance(pad_size, (int, np.integer)) or pad_size < 0:
        raise ChunkError(f"pad_size must be 0 or a positive integer, got {pad_size!r}.")
    if pad_size > len(data):
        raise BatchMismatchError(f"Cannot take {pad_size} padding rows off a batch of {len(data)} rows.")
    return data[: len(data) - int(pad_size)] if pad_size else data
