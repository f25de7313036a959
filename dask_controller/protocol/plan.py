"""Which rows and columns of which keys make up a batch.

Owns the algebra behind :class:`~dask_controller.protocol.future.DataProtoFuture`: a small tree over the keys of parts
(joined, cut, picked, repeated, columns chosen, batches put side by side), and its evaluation once the lengths of the
parts are known. Pure functions over lengths; no data, no cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dask_controller.errors import BatchMismatchError, ChunkError, DataProtoError
from dask_controller.protocol.batching import Padding, chunk_bounds

__all__ = [
    "Chunk",
    "ColumnFilter",
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
    "keys_of",
    "pieces_of",
]

Index: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowPlan:
    """Rows of several parts, in order: row ``i`` of the batch is row ``row[i]`` of part ``part[i]``."""

    part: Index
    row: Index
    #: The part that gives dtypes and shapes where there are no rows.
    template: int = 0

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
        )


@dataclass(frozen=True)
class Strand:
    """Some columns of a batch, with the rows that they are made of."""

    rows: RowPlan
    #: Column filters in the order in which they were asked for.
    columns: tuple[ColumnFilter, ...] = ()


@dataclass(frozen=True)
class ColumnFilter:
    """Columns to keep, or columns to leave out, and new names."""

    keep: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    keep_meta: bool = True


Lengths: TypeAlias = Mapping[int, int]
#: How parts are numbered in a tree: by the position of their key in the list of all keys.
Numbering: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Source:
    """Parts joined in order, without the padding that dispatch had added."""

    keys: tuple[str, ...]
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
    #: Gives the index for a batch of so many rows.
    index: Callable[[int], Index | slice]

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        strands = self.node.strands(numbering, lengths)
        picked = self.index(len(strands[0].rows))
        return [Strand(strand.rows.take(picked), strand.columns) for strand in strands]


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
    filter: ColumnFilter

    def strands(self, numbering: Numbering, lengths: Lengths) -> list[Strand]:
        return [Strand(strand.rows, (*strand.columns, self.filter)) for strand in self.node.strands(numbering, lengths)]


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
        return [Piece(plan.template, 0, 0)], None
    jumps = np.flatnonzero((np.diff(plan.part) != 0) | (np.diff(plan.row) != 1)) + 1
    starts = np.concatenate(([0], jumps))
    parts = np.unique(plan.part)
    if len(starts) <= 2 * len(parts) + 8:
        stops = np.concatenate((jumps, [n]))
        return [
            Piece(int(plan.part[a]), int(plan.row[a]), int(plan.row[b - 1]) + 1)
            for a, b in zip(starts, stops, strict=True)
        ], None
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


def keys_of(node: Any) -> list[str]:
    """Every key that a tree refers to, each once, in order of appearance."""
    seen: dict[str, None] = {}
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
