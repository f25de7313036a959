"""DataProto: the batch that travels between the controller and its ranks.

Owns the class: its checks, building, choosing columns, joining, travelling. Rows are picked and cut in
:mod:`~dask_controller.protocol.rows`, work on single columns is in :mod:`~dask_controller.protocol.columns`, the rule
for ``meta_info`` in :mod:`~dask_controller.protocol.meta`, bytes in :mod:`~dask_controller.protocol.serialize`. It
knows no cluster.
"""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from dask.sizeof import sizeof
from tensordict import TensorDict, TensorDictBase

from dask_controller.errors import BatchMismatchError, KeyConflictError, UnsupportedTypeError
from dask_controller.protocol import columns, reshape
from dask_controller.protocol.config import DataProtoConfig
from dask_controller.protocol.meta import AUTO_PADDING_KEY, copy_containers, join_meta
from dask_controller.protocol.rows import BatchRows, DataProtoItem
from dask_controller.protocol.serialize import pack, register_with_dask, unpack
from dask_controller.protocol.union import union_meta, union_numpy_dict, union_tensor_dict

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DataProto", "DataProtoConfig", "DataProtoItem"]

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class DataProto(BatchRows):
    """A batch of rows: tensors, object columns, and values that belong to the batch as a whole.

    Methods that return a DataProto leave this one, and the dicts it was built from, as they are, and give the new one
    a ``meta_info`` of its own (containers at every depth; tensors and objects inside are shared). Only :meth:`pop`,
    :meth:`reorder` and :meth:`padding` change the batch in place. Slices share memory with it, as slices of tensors
    do; picking rows by number copies them.

    Parameters
    ----------
    batch : TensorDict, optional
        Tensors with one batch dimension; any dtype, any trailing shape, also jagged nested tensors.
    non_tensor_batch : dict of str to numpy.ndarray, optional
        Columns of at least one dimension, the first of which is the batch.
    meta_info : dict, optional
        Anything. Each chunk of the batch gets all of it.

    Raises
    ------
    BatchMismatchError, UnsupportedTypeError
        See :meth:`check_consistency`.

    Examples
    --------
    >>> dp = DataProto.from_dict({"x": torch.arange(5)}, {"name": list("abcde")}, {"step": 1})
    >>> [len(piece) for piece in dp.chunk(3)]
    [2, 2, 1]
    >>> DataProto.concat(dp.chunk(3)).batch["x"]
    tensor([0, 1, 2, 3, 4])
    """

    batch: Any = None
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.non_tensor_batch is None:
            self.non_tensor_batch = {}
        if self.meta_info is None:
            self.meta_info = {}
        self.check_consistency()

    # --- building ------------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Build from one dict: tensors become tensor columns, numpy arrays object columns.

        Raises
        ------
        UnsupportedTypeError
            A value is neither.
        """
        tensors, arrays = {}, {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                raise UnsupportedTypeError(
                    f"Column {key!r} must be a tensor or a numpy array, got {type(value).__name__}. "
                    "Use from_dict, which takes lists as non_tensors."
                )
        return cls.from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Build from dicts. The dicts are copied, the tensors and arrays in them are not.

        Parameters
        ----------
        tensors : mapping of str to Tensor, optional
            All with the same first dimension.
        non_tensors : mapping, optional
            Arrays, or lists with one element per row, which become 1-D object columns whatever their elements are.
        meta_info : mapping, optional
            Values of the whole batch.
        num_batch_dims : int
            Kept for programs that pass it; only 1 is possible.
        auto_padding : bool
            Let dispatch pad this batch when it does not divide evenly.

        Raises
        ------
        BatchMismatchError
            Lengths differ; names the columns.
        UnsupportedTypeError
            A column is of a type that cannot be one.
        """
        if num_batch_dims != 1:
            raise BatchMismatchError(
                f"A DataProto has exactly one batch dimension, got num_batch_dims={num_batch_dims!r}. "
                "Use unfold_batch_dim to merge leading dimensions."
            )
        batch = None
        if tensors:
            batch = reshape.make_tensordict(tensors)
        arrays = {key: columns.object_column(value, key) for key, value in (non_tensors or {}).items()}
        meta = dict(meta_info or {})
        if auto_padding:
            meta[AUTO_PADDING_KEY] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDictBase, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Build from a TensorDict: stacks of non-tensor data become object columns, single ones go to ``meta_info``."""
        batch, arrays, meta = reshape.split_tensordict(tensor_dict)
        if num_batch_dims != 1:
            raise BatchMismatchError(f"A DataProto has exactly one batch dimension, got {num_batch_dims!r}.")
        return cls(batch=batch, non_tensor_batch=arrays, meta_info={**(meta_info or {}), **meta})

    def to_tensordict(self) -> TensorDict:
        """Return everything as one TensorDict: object columns as stacks, ``meta_info`` as single non-tensor entries.

        Raises
        ------
        KeyConflictError
            A key occurs in more than one of the three parts.
        """
        return reshape.merge_tensordict(self.batch, self.non_tensor_batch, copy_containers(self.meta_info), len(self))

    def check_consistency(self) -> None:
        """Check that all columns have one length.

        Raises
        ------
        BatchMismatchError
            A length differs, or ``batch`` has another number of batch dimensions than one.
        UnsupportedTypeError
            ``batch`` is no TensorDict, or a column is no array.
        """
        rows, witness = None, ""
        if self.batch is not None:
            if not isinstance(self.batch, TensorDictBase):
                raise UnsupportedTypeError(
                    f"batch must be a TensorDict or None, got {type(self.batch).__name__}. "
                    "Use DataProto.from_dict for a dict of tensors."
                )
            if len(self.batch.batch_size) != 1:
                raise BatchMismatchError(
                    f"batch must have exactly one batch dimension, got batch_size {tuple(self.batch.batch_size)}."
                )
            rows, witness = self.batch.batch_size[0], "the tensors"
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.ndim == 0:
                raise UnsupportedTypeError(
                    f"Column {key!r} of non_tensor_batch must be a numpy array with one element per row, got "
                    f"{type(column).__name__}. DataProto.from_dict turns lists into columns."
                )
            if rows is None:
                rows, witness = len(column), f"column {key!r}"
            elif len(column) != rows:
                raise BatchMismatchError(f"Column {key!r} has {len(column)} rows, but {witness} has {rows}.")

    # --- looking -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        tensors = sorted(map(str, self.batch.keys())) if self.batch is not None else None
        return (
            f"<{type(self).__name__}: {len(self)} rows, batch={tensors}, "
            f"non_tensor_batch={sorted(self.non_tensor_batch)}, meta_info={sorted(map(str, self.meta_info))}>"
        )

    def print_size(self, prefix: str = "") -> None:
        """Print how many GiB the tensors and the other columns take."""
        tensors = reshape.tensordict_nbytes(self.batch) / 2**30
        arrays = sum(column.nbytes for column in self.non_tensor_batch.values()) / 2**30
        head = f"{prefix}, " if prefix else ""
        print(f"{head}size of tensors: {tensors:.6f} GiB, size of non_tensor_batch: {arrays:.6f} GiB")

    def get_data_info(self) -> str:
        """Return shapes, dtypes and devices of all columns, and the types of ``meta_info``, one a line."""
        return reshape.describe(self.batch, self.non_tensor_batch, self.meta_info)

    # --- picking columns -----------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of some columns; None means all of that kind.

        Parameters
        ----------
        batch_keys, non_tensor_batch_keys, meta_info_keys : list of str, optional
            What to keep.
        deepcopy : bool
            Copy object columns and ``meta_info`` with everything in them, not only their containers.

        Raises
        ------
        KeyConflictError
            A key is not there.
        """
        batch = self.batch
        if batch_keys is not None:
            self._require("batch", batch_keys)
            batch = batch.select(*batch_keys) if batch is not None else None
        elif batch is not None:
            batch = batch.copy()
        arrays = self._some("non_tensor_batch", non_tensor_batch_keys)
        meta = self._some("meta_info", meta_info_keys)
        if deepcopy:
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=copy_containers(meta))

    def _some(self, part: str, keys: Sequence[str] | None) -> dict[str, Any]:
        held: dict[str, Any] = getattr(self, part)
        if keys is None:
            return dict(held)
        self._require(part, keys)
        return {key: held[key] for key in keys}

    def _require(self, part: str, keys: Sequence[Any]) -> None:
        if isinstance(keys, str):
            raise UnsupportedTypeError(f"Keys of {part} must be given as a list, got the string {keys!r}.")
        held = getattr(self, part)
        present = () if held is None else held.keys(True) if part == "batch" else held.keys()
        missing = [key for key in keys if key not in present]
        if missing:
            raise KeyConflictError(f"{part} has no {missing}; it has {sorted(map(str, present))}.")

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Take columns and values out of this batch, in place, and return them as a batch. All or, on error, none.

        Raises
        ------
        KeyConflictError
            A key is not there.
        """
        wanted = {
            "batch": list(dict.fromkeys(batch_keys or ())),
            "non_tensor_batch": list(dict.fromkeys(non_tensor_batch_keys or ())),
            "meta_info": list(dict.fromkeys(meta_info_keys or ())),
        }
        for part, given in zip(wanted, (batch_keys, non_tensor_batch_keys, meta_info_keys), strict=True):
            self._require(part, given or ())
        # Containers are replaced, not emptied: they may be the caller's own.
        tensors = None
        if wanted["batch"]:
            tensors = self.batch.select(*wanted["batch"])
            self.batch = self.batch.exclude(*wanted["batch"])
        arrays = {key: self.non_tensor_batch[key] for key in wanted["non_tensor_batch"]}
        meta = {key: self.meta_info[key] for key in wanted["meta_info"]}
        self.non_tensor_batch = {key: col for key, col in self.non_tensor_batch.items() if key not in arrays}
        self.meta_info = {key: value for key, value in self.meta_info.items() if key not in meta}
        return type(self)(batch=tensors, non_tensor_batch=arrays, meta_info=meta)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Return a batch whose columns ``old_keys`` are called ``new_keys``; all at once, so that names may swap.

        Raises
        ------
        KeyConflictError
            An old key is absent, or a new one is taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise KeyConflictError(f"rename needs as many new keys as old ones, got {len(old)} old and {len(new)} new.")
        batch, arrays = reshape.rename_columns(self.batch, self.non_tensor_batch, dict(zip(old, new, strict=True)))
        return self._new(batch, arrays)

    def union(self, other: DataProto) -> Self:
        """Return a batch with the columns and ``meta_info`` of both. What both have must be equal (NaN equals NaN).

        Raises
        ------
        BatchMismatchError
            The lengths differ; names both.
        KeyConflictError
            A key has two different values; names it and them.
        """
        if not isinstance(other, DataProto):
            raise UnsupportedTypeError(f"union needs another DataProto, got {type(other).__name__}.")
        ours, theirs = self._has_columns(), other._has_columns()
        if ours and theirs and len(self) != len(other):
            raise BatchMismatchError(
                f"union needs batches of one length, got {len(self)} rows here and {len(other)} in the other."
            )
        if self.batch is None or other.batch is None:
            batch = self.batch if other.batch is None else other.batch
            batch = None if batch is None else batch.copy()
        else:
            batch = union_tensor_dict(self.batch, other.batch)
        return type(self)(
            batch=batch,
            non_tensor_batch=union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            meta_info=copy_containers(union_meta(self.meta_info, other.meta_info)),
        )

    def _has_columns(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch)

    def to(self, device: Any) -> Self:
        """Return the batch with its tensors on ``device``; tensors that are there already are shared."""
        batch = None if self.batch is None else self.batch.to(device)
        if batch is self.batch and batch is not None:
            batch = batch.copy()
        return self._new(batch, dict(self.non_tensor_batch))

    # --- cutting and joining -------------------------------------------------------------------------------------

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Stack batches below each other, in order; one copy of each column. ``meta_info``: see :func:`join_meta`.

        Batches without any column add only their ``meta_info``. Of batches with 0 rows neither dtype nor trailing
        shape counts where another batch has rows. A single batch is not copied: the result shares its columns.

        Raises
        ------
        BatchMismatchError
            Nothing to join, or trailing shapes that differ.
        KeyConflictError
            Columns that only some batches have, or ``meta_info`` that disagrees.
        UnsupportedTypeError
            An element is no DataProto.
        """
        items = list(data)
        for index, item in enumerate(items):
            if not isinstance(item, DataProto):
                raise UnsupportedTypeError(f"Element {index} to join is a {type(item).__name__}, not a DataProto.")
        if not items:
            raise BatchMismatchError("There is no batch to join: the list is empty.")
        held = [(index, item) for index, item in enumerate(items) if item._has_columns()]
        batch, arrays = None, {}
        if held:
            with_tensors = [(index, item.batch) for index, item in held if item.batch is not None]
            if with_tensors and len(with_tensors) != len(held):
                without = [index for index, item in held if item.batch is None]
                raise KeyConflictError(f"Batches {without} to join have no tensors, the others have.")
            if with_tensors:
                batch = columns.join_tensordicts(with_tensors)
            arrays = columns.join_arrays([(index, item.non_tensor_batch) for index, item in held])
        return type(items[0])(
            batch=batch, non_tensor_batch=arrays, meta_info=join_meta([item.meta_info for item in items])
        )

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad this batch: for it alone (``auto_padding=True``), or for all (DataProtoConfig)."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False)) or DataProtoConfig.auto_padding

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cut the second dimension of ``split_keys`` into ``n_split`` rows each; other columns repeat their rows."""
        return self._new(*reshape.unfold_columns(self.batch, self.non_tensor_batch, n_split, split_keys))

    # --- disk --------------------------------------------------------------------------------------

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write the batch to one file, all of it or nothing; see :func:`.disk.save`."""
        from dask_controller.protocol.disk import save

        save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str], allow_pickle: bool = False) -> DataProto:
        """Read a batch from a file, running no code from it unless ``allow_pickle``; see :func:`.disk.load`."""
        from dask_controller.protocol.disk import load

        return load(filepath, allow_pickle=allow_pickle)

    # --- travelling ----------------------------------------------------------------------------------------------

    def _pack_reduce_(self) -> tuple[Any, ...]:
        # Part of a larger stream: columns stay objects of that stream, so that shared ones are sent once.
        return _restore, (type(self), dict(vars(self)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Someone else's pickler: one Packed, whose frames are out-of-band buffers from protocol 5 on.
        return unpack, (pack(self),)

    def __copy__(self) -> Self:
        new = _restore(type(self), dict(vars(self)))
        new.batch = None if self.batch is None else self.batch.copy()
        new.non_tensor_batch, new.meta_info = dict(self.non_tensor_batch), dict(self.meta_info)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return _restore(type(self), {key: copy.deepcopy(value, memo) for key, value in vars(self).items()})

    def __dask_tokenize__(self) -> Any:
        # Keys made from content collide while an equal batch of the step before is being released.
        return uuid.uuid4().hex


def _restore(cls: type[_T], state: dict[str, Any]) -> _T:
    """Make an object whose fields were checked when it was first built."""
    new = cls.__new__(cls)
    new.__dict__.update(state)
    return new


register_with_dask(DataProto)


@sizeof.register(DataProto)  # type: ignore[untyped-decorator]
def _sizeof_data_proto(data: DataProto) -> int:
    arrays = sum(sizeof(column) for column in data.non_tensor_batch.values())
    return int(reshape.tensordict_nbytes(data.batch) + arrays + sizeof(data.meta_info))
