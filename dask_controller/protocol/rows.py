"""The rows of a batch: counting, picking, repeating, cutting and padding them.

Owns the part of DataProto that treats all columns alike and never looks at their names. Building batches, choosing
columns, joining and sending are in :mod:`~dask_controller.protocol.data_proto`.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dask_controller.errors import BatchMismatchError, ChunkError, UnsupportedTypeError
from dask_controller.protocol import columns, reshape
from dask_controller.protocol.batching import chunk_bounds
from dask_controller.protocol.meta import copy_containers

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BatchRows", "DataProtoItem"]

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class DataProtoItem:
    """One row of a batch: what ``dp[3]`` gives.

    Attributes
    ----------
    batch : TensorDict or None
        The row of each tensor, without a batch dimension; views of the batch.
    non_tensor_batch : dict
        The element of each object column.
    meta_info : dict
        Copy of the batch's.
    """

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class BatchRows:
    """Row operations over ``batch``, ``non_tensor_batch`` and ``meta_info``; the base of DataProto.

    Every method that returns a batch returns one of the caller's own type.
    """

    batch: Any
    non_tensor_batch: dict[str, Array]
    meta_info: dict[str, Any]

    def _new(self, batch: Any, arrays: dict[str, Array]) -> Self:
        """Return a batch of this type with other columns and its own copy of ``meta_info``."""
        make: Any = type(self)
        new: Self = make(batch=batch, non_tensor_batch=arrays, meta_info=copy_containers(self.meta_info))
        return new

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Iterate over the rows."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, item: Any) -> Any:
        """Return a :class:`DataProtoItem` for an integer, a DataProto for a slice, numbers or a mask.

        Raises
        ------
        IndexError
            A row is outside the batch.
        UnsupportedTypeError
            ``item`` is of another type.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        scalar = isinstance(item, (int, np.integer)) and not isinstance(item, bool)
        if scalar or (isinstance(item, (np.ndarray, torch.Tensor)) and item.ndim == 0):
            row = int(columns.row_indices([item.item() if not isinstance(item, int) else item], len(self))[0])
            return DataProtoItem(
                batch=None if self.batch is None else self.batch[row],
                non_tensor_batch={key: column[row] for key, column in self.non_tensor_batch.items()},
                meta_info=copy_containers(self.meta_info),
            )
        if isinstance(item, (list, range, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        raise UnsupportedTypeError(
            f"A batch is indexed by an int, slice, list, range, array or tensor, got {type(item).__name__}."
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows ``start`` to ``end`` (not included), as views."""
        rows = builtins.slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(np.arange(len(self))[rows])  # tensors have no negative strides
        return self._new(
            None if self.batch is None else columns.slice_tensordict(self.batch, rows),
            {key: column[rows] for key, column in self.non_tensor_batch.items()},
        )

    def select_idxs(self, idxs: Any) -> Self:
        """Return the rows of the given numbers (in that order, repeats allowed) or of a mask, as a copy.

        Parameters
        ----------
        idxs : list, range, numpy.ndarray or Tensor
            1-D; integers (negative ones count from the end) or bools.

        Raises
        ------
        IndexError, BatchMismatchError, UnsupportedTypeError
            As :func:`~dask_controller.protocol.columns.row_indices`.
        """
        rows = columns.row_indices(idxs, len(self))
        return self._new(
            None if self.batch is None else columns.take_tensordict(self.batch, rows),
            {key: column[rows] for key, column in self.non_tensor_batch.items()},
        )

    def reorder(self, indices: Any) -> None:
        """Put the rows into the given order, in place."""
        picked = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = picked.batch, picked.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return every row ``repeat_times`` times: next to each other, or the whole batch again and again."""
        times = reshape.count(repeat_times, "repeat_times", 0)
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def sample_level_repeat(self, repeat_times: Any) -> Self:
        """Return row i ``repeat_times[i]`` times.

        Raises
        ------
        BatchMismatchError
            Not one count per row.
        """
        return self.select_idxs(reshape.repeated_rows(repeat_times, len(self)))

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into exactly ``chunks`` pieces; the first ``len % chunks`` are one row longer, later ones may be empty.

        Tensors and object columns are cut at the same rows, as views. Whether a batch that does not divide evenly
        may be dispatched is for dispatch to say.

        Raises
        ------
        ChunkError
            ``chunks`` is no positive integer.
        """
        return [self.slice(start, end) for start, end in chunk_bounds(len(self), chunks)]

    def split(self, split_size: int) -> list[Self]:
        """Cut into pieces of ``split_size`` rows, as views; the last may be shorter. 0 rows give one piece of 0 rows.

        Raises
        ------
        ChunkError
            ``split_size`` is no positive integer.
        """
        size = reshape.count(split_size, "split_size", 1)
        return [self.slice(start, start + size) for start in range(0, max(len(self), 1), size)]

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of one row, in place.

        Parameters
        ----------
        padding_size : int
            Rows to add.
        padding_candidate : {"", "first", "last"}
            Which row to copy; ``""`` is the last.

        Raises
        ------
        BatchMismatchError
            The batch has no row to copy.
        """
        size = reshape.count(padding_size, "padding_size", 0)
        if padding_candidate not in ("", "first", "last"):
            raise ChunkError(f"padding_candidate must be 'first' or 'last', got {padding_candidate!r}.")
        if size == 0:
            return
        rows = len(self)
        if rows == 0:
            raise BatchMismatchError(f"A batch of 0 rows has no row to copy, {size} rows of padding were asked for.")
        extra = 0 if padding_candidate == "first" else rows - 1
        self.reorder(np.concatenate([np.arange(rows), np.full(size, extra)]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches, ``epochs`` times over the batch; see :func:`.collate.iterate`."""
        from dask_controller.protocol.collate import iterate

        return iterate(self, mini_batch_size, epochs, seed, dataloader_kwargs)
