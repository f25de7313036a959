"""Which rows and columns of which keys make up a batch.

Owns the algebra behind :class:`~dask_controller.protocol.future.DataProtoFuture`: a small tree over the keys of parts
(joined, cut, picked, repeated, columns chosen, batches put side by side), and its evaluation once the lengths of the
parts are known. Pure functions over lengths; no data, no cluster.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from dask.typing import Key

from dask_controller.errors import BatchMismatchError, ChunkError, DataProtoError, KeyConflictError
from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.batching import Padding, chunk_bounds
from dask_controller.protocol.data_proto import DataProto

__all__ = [
    "Chunk",
    "ColumnStep",
    "Columns",
    "Concat",
    "Node",
    "Piece",
    "Repeat",
    "Rows",
    "RowPlan",
    "Source",
    "Strand",
    "Union",
    "assemble",
    "choose_columns",
    "keys_of",
    "pieces_of",
    "take_rows",
]

Index: TypeAlias = npt.NDArray[np.int64]

#: A choice of columns, as plain values that travel: ``("select", batch_keys, non_tensor_batch_keys, meta_info_keys)``,
#: ``("drop", keys)``, ``("rename", old, new)`` or ``("column", name)``.
ColumnStep: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class RowPlan:
    """Rows of several parts, in order: row ``i`` of the batch is row ``row[i]`` of part ``part[i]``."""

    part: Index
    row: Index
    #: The part that gives dtypes and shapes where there are no rows.
    template: int = 0
    #: Every part of an uncut batch, in order: one without rows still has its ``meta_info``. Empty after a cut.
    members: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.part)

    def take(self, index: Index | slice) -> RowPlan:
        return RowPlan(self.part[index], self.row[index], self.template)

    @classmethod
    def joined(cls, plans: Sequence[RowPlan]) -> RowPlan:
        if len(plans) == 1:
            return plans[0]
        return cls(
            np.concatenate([plan.part for plan in plans]),
            np.concatenate([plan.row for plan in plans]),
            next((int(plan.part[0]) for plan in plans if len(plan)), plans[0].template),
            tuple(part for plan in plans for part in (plan.members or np.unique(plan.part).tolist())),
        )


@dataclass(frozen=True)
class Strand:
    """Some columns of a batch, with the rows that they are made of."""

    rows: RowPlan
    #: Column filters in the order in which they were asked for.
    columns: tuple[ColumnStep, ...] = ()


Lengths: TypeAlias = Mapping[int, int]
#: How parts are numbered in a tree: by the position of their key in the list of all keys.
Numbering: TypeAlias = Mapping[Key, int]


@dataclass(frozen=True, eq=False)
class Source:
    """Parts joined in order, without the padding that dispatch had added."""

    keys: tuple[Key, ...]
    padding: Padding | None = None

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        parts = [numbering[key] for key in self.keys]
        rows = [lengths[part] for part in parts]
        if self.padding is not None:
            rows = self.padding.kept(rows)
        plan = RowPlan(
            np.repeat(np.asarray(parts, dtype=np.int64), rows),
            np.concatenate([np.arange(n, dtype=np.int64) for n in rows]),
            next((part for part, n in zip(parts, rows, strict=True) if n), parts[0]),
            tuple(parts),
        )
        return [Strand(plan)]


@dataclass(frozen=True, eq=False)
class Concat:
    """Batches one after the other."""

    nodes: tuple[Node, ...]

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        each = [node.strands(numbering, lengths) for node in self.nodes]
        if any(len(strands) != len(each[0]) for strands in each):
            raise DataProtoError("batches that are unions of different shape cannot be joined without their data")
        out = []
        for strands in zip(*each, strict=True):
            if any(strand.columns != strands[0].columns for strand in strands):
                raise DataProtoError(
                    "batches whose columns were chosen differently cannot be joined without their data: choose the "
                    "same columns of each, or choose after joining"
                )
            out.append(Strand(RowPlan.joined([strand.rows for strand in strands]), strands[0].columns))
        return out


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a batch picked by index: once known, anywhere in the batch, in any order, as often as wished."""

    node: Node
    #: Row numbers (negative ones count from the end), a mask, or a slice.
    index: Index | npt.NDArray[np.bool_] | slice

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        strands = self.node.strands(numbering, lengths)
        picked = self._resolved(len(strands[0].rows))
        return [Strand(strand.rows.take(picked), strand.columns) for strand in strands]

    def _resolved(self, n: int) -> Index | slice:
        if isinstance(self.index, slice):
            return self.index
        if self.index.dtype == np.bool_:
            if len(self.index) != n:
                raise BatchMismatchError(f"a mask of {len(self.index)} entries cannot pick from {n} rows")
            return np.flatnonzero(self.index)
        index = self.index.astype(np.int64, copy=False)
        wrong = index[(index < -n) | (index >= n)]
        if len(wrong):
            raise BatchMismatchError(f"row {int(wrong[0])} does not exist in a batch of {n} rows")
        return np.where(index < 0, index + n, index)


@dataclass(frozen=True, eq=False)
class Chunk:
    """One of ``count`` pieces of a batch."""

    node: Node
    position: int
    count: int
    #: For dispatch: pieces must be equal, after padding if ``auto_padding``. None: sizes may differ by one row.
    padding: Padding | None = None
    auto_padding: bool = False

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        strands = self.node.strands(numbering, lengths)
        total = len(strands[0].rows)
        if self.padding is None:
            picked: Index | slice = slice(*chunk_bounds(total, self.count)[self.position])
        else:
            picked = self._equal(total, self.padding)
        return [Strand(strand.rows.take(picked), strand.columns) for strand in strands]

    def _equal(self, total: int, padding: Padding) -> Index:
        if total % self.count and not self.auto_padding:
            raise ChunkError(
                f"a batch of {total} rows cannot be cut into {self.count} equal chunks, and automatic padding is off. "
                "Turn it on (DataProtoConfig.auto_padding = True), or make the producer return a multiple of "
                f"{self.count} rows. No rank was called"
            )
        if not padding.known:
            padding.set(total, self.count)
        assert padding.padded is not None and padding.real is not None
        if sum(padding.real) != total:
            raise BatchMismatchError(
                f"the arguments of one call have different lengths: {sum(padding.real)} rows and {total} rows. No rank "
                "was called"
            )
        start = sum(padding.padded[: self.position])
        # Padding repeats the last row.
        return np.minimum(np.arange(start, start + padding.padded[self.position], dtype=np.int64), total - 1)


@dataclass(frozen=True, eq=False)
class Repeat:
    """Every row ``times`` times."""

    node: Node
    times: int
    interleave: bool

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        strands = self.node.strands(numbering, lengths)
        rows = np.arange(len(strands[0].rows), dtype=np.int64)
        index = np.repeat(rows, self.times) if self.interleave else np.tile(rows, self.times)
        return [Strand(strand.rows.take(index), strand.columns) for strand in strands]


@dataclass(frozen=True, eq=False)
class Columns:
    """Some of the columns, or other names for them."""

    node: Node
    step: ColumnStep

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        return [Strand(strand.rows, (*strand.columns, self.step)) for strand in self.node.strands(numbering, lengths)]


@dataclass(frozen=True, eq=False)
class Union:
    """Batches of equal length side by side."""

    nodes: tuple[Node, ...]

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        each = [node.strands(numbering, lengths) for node in self.nodes]
        sizes = [len(strands[0].rows) for strands in each]
        if len(set(sizes)) > 1:
            raise BatchMismatchError(
                f"batches of {' and '.join(map(str, sizes))} rows cannot be put side by side; their lengths must be "
                "equal"
            )
        return [strand for strands in each for strand in strands]


Node: TypeAlias = "Source | Concat | Rows | Chunk | Repeat | Columns | Union"


@dataclass(frozen=True)
class Piece:
    """Rows of one part: a range, or an index where they are scattered."""

    part: int
    start: int
    stop: int
    index: Index | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start if self.index is None else len(self.index)


def pieces_of(plan: RowPlan) -> tuple[list[Piece], Index | None]:
    """What to ask of each part, and how to order the rows that come.

    Returns
    -------
    pieces : list of Piece
        To be joined in this order. At least one, so that dtypes and shapes are known without rows.
    order : array of int64 or None
        The batch is ``joined[order]``; None where it is the pieces as they are.
    """
    n = len(plan)
    if n == 0:
        return [Piece(part, 0, 0) for part in dict.fromkeys(plan.members or (plan.template,))], None
    jumps = np.flatnonzero((np.diff(plan.part) != 0) | (np.diff(plan.row) != 1)) + 1
    starts = np.concatenate(([0], jumps))
    parts = np.unique(plan.part)
    if len(starts) <= 2 * len(parts) + 8:
        stops = np.concatenate((jumps, [n]))
        runs = [
            Piece(int(plan.part[a]), int(plan.row[a]), int(plan.row[b - 1]) + 1)
            for a, b in zip(starts, stops, strict=True)
        ]
        return _with_hollow(runs, plan.members), None
    # Scattered: ask each part once, for each of its rows once.
    pieces: list[Piece] = []
    order = np.empty(n, dtype=np.int64)
    offset = 0
    for part in parts:
        here = np.flatnonzero(plan.part == part)
        rows, inverse = np.unique(plan.row[here], return_inverse=True)
        order[here] = inverse + offset
        offset += len(rows)
        low, high = int(rows[0]), int(rows[-1]) + 1
        pieces.append(Piece(int(part), low, high, None if high - low == len(rows) else rows))
    return pieces, None if np.array_equal(order, np.arange(n)) else order


def _with_hollow(pieces: list[Piece], members: Sequence[int]) -> list[Piece]:
    """Put parts without rows where they stand among the others, for the sake of their ``meta_info``."""
    present = {piece.part for piece in pieces}
    if present.issuperset(members):
        return pieces
    out: list[Piece] = []
    rest = list(pieces)
    for part in dict.fromkeys(members):
        if part not in present:
            out.append(Piece(part, 0, 0))
            continue
        while rest and rest[0].part == part:
            out.append(rest.pop(0))
    return out + rest


def keys_of(node: Any) -> list[Key]:
    """Every key that a tree refers to, each once, in order of appearance."""
    seen: dict[Key, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, Source):
            seen.update(dict.fromkeys(current.keys))
        elif isinstance(current, (Concat, Union)):
            stack.extend(reversed(current.nodes))
        else:
            stack.append(current.node)
    return list(seen)


def choose_columns(value: Any, steps: Sequence[ColumnStep]) -> Any:
    """Carry out choices of columns on the batch that they were asked of.

    Parameters
    ----------
    value : DataProto or TensorDict
        Not changed.
    steps : sequence
        See :data:`ColumnStep`.

    Returns
    -------
    DataProto or TensorDict
        With the columns that are left; tensors are shared.

    Raises
    ------
    KeyConflictError
        A column does not exist.
    """
    for name, *arguments in steps:
        value = _STEPS[name](value, *arguments)
    return value


def assemble(strands: Sequence[tuple[Sequence[Any], Index | None]]) -> Any:
    """Make one batch of what has come.

    Parameters
    ----------
    strands : sequence
        For each strand the values of its pieces, and the order of their rows.

    Returns
    -------
    DataProto or TensorDict
        Rows are copied once where there are several pieces, not at all where there is one.
    """
    out: Any = None
    for values, order in strands:
        # A single piece too: joining is what turns the metrics of ranks into lists.
        joined = BatchData(list(values)).concat()
        if order is not None:
            joined = take_rows(joined, order)
        out = joined if out is None else _side_by_side(out, joined)
    return out


def take_rows(value: Any, index: Index) -> Any:
    """Rows of a batch by number, copied."""
    return value.select_idxs(index) if isinstance(value, DataProto) else value[torch.from_numpy(index)]


def _side_by_side(left: Any, right: Any) -> Any:
    if isinstance(left, DataProto):
        return left.union(right)
    return left.clone(recurse=False).update(right)


def _names(value: Any) -> list[str]:
    if isinstance(value, DataProto):
        return [*(value.batch.keys() if value.batch is not None else ()), *value.non_tensor_batch]
    return list(value.keys())


def _only(value: Any, keys: Sequence[str]) -> Any:
    missing = [key for key in keys if key not in _names(value)]
    if missing:
        near = difflib.get_close_matches(missing[0], _names(value), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; there are {_names(value)}"
        raise KeyConflictError(f"the batch has no column {', '.join(map(repr, missing))}{hint}")
    if isinstance(value, DataProto):
        tensors = [key for key in keys if value.batch is not None and key in value.batch.keys()]
        return value.select(tensors, [key for key in keys if key not in tensors])
    return value.select(*keys)


def _select(value: Any, batch_keys: Any, non_tensor_batch_keys: Any, meta_info_keys: Any) -> Any:
    if isinstance(value, DataProto):
        return value.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
    keys = [*(batch_keys or ()), *(non_tensor_batch_keys or ())]
    return _only(value, keys)


def _drop(value: Any, keys: Sequence[str]) -> Any:
    _only(value, keys)
    return _only(value, [key for key in _names(value) if key not in keys])


def _rename(value: Any, old: Sequence[str], new: Sequence[str]) -> Any:
    if isinstance(value, DataProto):
        return value.rename(list(old), list(new))
    _only(value, old)
    out = value.clone(recurse=False)
    for before, after in zip(old, new, strict=True):
        out.rename_key_(before, after)
    return out


_STEPS: dict[str, Callable[..., Any]] = {
    "select": _select,
    "drop": _drop,
    "rename": _rename,
    "column": lambda value, name: _only(value, [name]),
}
