"""BatchData: one face for everything that can be cut into chunks and joined again.

Owns the list of such types. How each is cut and joined is its own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from dask_controller.errors import BatchMismatchError, UnsupportedTypeError
from dask_controller.protocol.batching import chunk_bounds
from dask_controller.protocol.columns import join_tensordicts, slice_tensordict
from dask_controller.protocol.data_proto import DataProto

__all__ = ["BatchData"]


def _kind(value: Any) -> type | None:
    """Return which of the types of batches ``value`` is, or None."""
    from distributed import Future

    from dask_controller.protocol.future import DataProtoFuture

    kinds: tuple[type, ...] = (DataProto, DataProtoFuture, TensorDictBase, Future)
    return next((kind for kind in kinds if isinstance(value, kind)), None)


class BatchData:
    """Wraps a batch, or a list of batches, so that dispatch need not ask for types.

    Parameters
    ----------
    data : object
        A DataProto, DataProtoFuture or TensorDict to cut; or a list or tuple of one such type, or of
        ``distributed.Future``, to join.

    Examples
    --------
    >>> import torch
    >>> dp = DataProto.from_dict({"x": torch.arange(4)})
    >>> BatchData(dp).is_chunkable(), BatchData([dp, dp]).is_concatable(), BatchData([]).is_concatable()
    (True, True, False)
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def is_chunkable(self) -> bool:
        """Whether the value can be cut: a DataProto, DataProtoFuture or TensorDict."""
        from distributed import Future

        kind = _kind(self._data)
        return kind is not None and kind is not Future

    def is_concatable(self) -> bool:
        """Whether the value is a non-empty list or tuple of one type of batches."""
        if not isinstance(self._data, (list, tuple)) or not self._data:
            return False
        kinds = {_kind(item) for item in self._data}
        return len(kinds) == 1 and None not in kinds

    def chunk(self, chunks: int) -> Sequence[Any]:
        """Cut into exactly ``chunks`` pieces of the original type, as :meth:`.DataProto.chunk` does.

        Raises
        ------
        UnsupportedTypeError
            The value cannot be cut.
        ChunkError
            ``chunks`` is no positive integer.
        """
        data = self._data
        if not self.is_chunkable():
            raise UnsupportedTypeError(
                f"A {type(data).__name__} cannot be cut into chunks; expected a DataProto, DataProtoFuture or "
                "TensorDict. Pass a list with one element per rank under Dispatch.DP_COMPUTE instead."
            )
        if isinstance(data, TensorDictBase):
            if data.batch_dims < 1:
                raise BatchMismatchError("A TensorDict without batch dimension cannot be cut; set its batch_size.")
            return [slice_tensordict(data, slice(a, b)) for a, b in chunk_bounds(data.batch_size[0], chunks)]
        pieces: Sequence[Any] = data.chunk(chunks)
        return pieces

    def concat(self) -> Any:
        """Join the batches of a list, in order; futures give a DataProtoFuture.

        Raises
        ------
        BatchMismatchError
            The list is empty.
        UnsupportedTypeError
            It is no list, or its elements are not batches of one type.
        """
        from distributed import Future

        data = self._data
        if not isinstance(data, (list, tuple)):
            raise UnsupportedTypeError(f"Only a list of batches can be joined, got {type(data).__name__}.")
        if not data:
            raise BatchMismatchError("There is no batch to join: the list is empty.")
        if not self.is_concatable():
            names = list(dict.fromkeys(type(item).__name__ for item in data))
            raise UnsupportedTypeError(
                "Only batches of one type can be joined (DataProto, DataProtoFuture, TensorDict or Future), "
                f"got {names}."
            )
        kind = _kind(data[0])
        if kind is TensorDictBase:
            return join_tensordicts(list(enumerate(data)))
        if kind is DataProto:
            return type(data[0]).concat(data)
        from dask_controller.protocol.future import DataProtoFuture

        if kind is Future:
            return DataProtoFuture.from_futures(list(data))
        return DataProtoFuture.concat(list(data))
