"""Row arithmetic: how many rows each piece of a batch has, and which rows are padding.

Owns the rules for cutting a batch and for taking padding off again, as functions of plain integers. It does not
touch data: :mod:`~dask_controller.protocol.data_proto` cuts, the dispatch functions decide when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dask_controller.errors import BatchMismatchError, ChunkError

__all__ = ["Padding", "PerRank", "RankOutputs", "chunk_bounds", "chunk_sizes", "padding_rows"]


def _count(value: object, what: str, least: int) -> int:
    """Return ``value`` as an int, or say which argument is not a count."""
    try:
        number = value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise ChunkError(f"{what} must be an integer, got {value!r} of type {type(value).__name__}.") from None
    if isinstance(value, bool) or number < least:
        raise ChunkError(f"{what} must be an integer of at least {least}, got {value!r}.")
    return int(number)


def chunk_sizes(length: int, chunks: int) -> list[int]:
    """Rows of each of exactly ``chunks`` pieces; the first ``length % chunks`` are one row longer.

    The rule is that of :func:`numpy.array_split`, so that tensors and object columns can be cut at the same rows.

    Parameters
    ----------
    length : int
        Rows of the batch, 0 or more.
    chunks : int
        Number of pieces, 1 or more. More pieces than rows give pieces of 0 rows at the end.

    Returns
    -------
    list of int
        ``chunks`` sizes whose sum is ``length``.

    Raises
    ------
    ChunkError
        An argument is not an integer, or out of range.

    Examples
    --------
    >>> chunk_sizes(10, 4)
    [3, 3, 2, 2]
    >>> chunk_sizes(2, 4)
    [1, 1, 0, 0]
    """
    length = _count(length, "the length of a batch", 0)
    chunks = _count(chunks, "the number of chunks", 1)
    base, longer = divmod(length, chunks)
    return [base + 1] * longer + [base] * (chunks - longer)


def chunk_bounds(length: int, chunks: int) -> list[tuple[int, int]]:
    """First row and row after the last, for each of exactly ``chunks`` pieces.

    Raises
    ------
    ChunkError
        An argument is not an integer, or out of range.

    Examples
    --------
    >>> chunk_bounds(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    bounds, start = [], 0
    for size in chunk_sizes(length, chunks):
        bounds.append((start, start + size))
        start += size
    return bounds


def padding_rows(length: int, divisor: int) -> int:
    """Rows to add so that ``divisor`` divides the batch. A batch of 0 rows has nothing to repeat and stays at 0.

    Raises
    ------
    ChunkError
        An argument is not an integer, or out of range.

    Examples
    --------
    >>> padding_rows(10, 4), padding_rows(1, 8), padding_rows(0, 8)
    (2, 7, 0)
    """
    length = _count(length, "the length of a batch", 0)
    divisor = _count(divisor, "the divisor", 1)
    return -length % divisor


class Padding:
    """How one padded batch was cut: real rows and rows including padding, per data-parallel chunk.

    One object is shared by the side that cuts and the side that collects. It may be made before the length of the
    batch is known (the batch is a future) and is filled in by :meth:`set`.

    Parameters
    ----------
    real, padded : tuple of int, optional
        Per chunk: rows that came from the caller, and rows that were sent. Give both or neither.

    Examples
    --------
    >>> padding = Padding()
    >>> padding.set(5, 4)
    >>> padding.real, padding.padded
    ((2, 2, 1, 0), (2, 2, 2, 2))
    >>> padding.kept([2, 2, 2, 2])
    [2, 2, 1, 0]
    """

    __slots__ = ("padded", "real")

    def __init__(self, real: tuple[int, ...] | None = None, padded: tuple[int, ...] | None = None) -> None:
        if (real is None) != (padded is None) or (real is not None and padded is not None and len(real) != len(padded)):
            raise BatchMismatchError(
                f"Padding needs real and padded rows of the same chunks, got real={real!r} and padded={padded!r}."
            )
        self.real = None if real is None else tuple(real)
        self.padded = None if padded is None else tuple(padded)

    def __repr__(self) -> str:
        return f"Padding(real={self.real}, padded={self.padded})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Padding):
            return NotImplemented
        return self.real == other.real and self.padded == other.padded

    __hash__ = None  # type: ignore[assignment]

    def set(self, length: int, chunks: int) -> None:
        """Fill in the cut of ``length`` rows, padded at the end to a multiple of ``chunks``, into equal chunks."""
        each = (length + padding_rows(length, chunks)) // chunks
        self.padded = (each,) * chunks
        self.real = tuple(min(max(length - index * each, 0), each) for index in range(chunks))

    @property
    def known(self) -> bool:
        """Whether the cut is known yet."""
        return self.real is not None

    @property
    def is_trivial(self) -> bool:
        """Whether the cut is known and no row was added."""
        return self.real is not None and self.real == self.padded

    def kept(self, out_rows: Sequence[int]) -> list[int]:
        """How many leading rows of each chunk's result belong to real input rows.

        Parameters
        ----------
        out_rows : sequence of int
            Rows of the result of each chunk, in chunk order.

        Returns
        -------
        list of int
            Rows to keep. A result as long as its chunk keeps the real rows. One that is ``k`` times as long keeps
            ``k`` times the real rows: the results of one input row are taken to stand next to each other, as
            ``repeat(k, interleave=True)`` makes them.

        Raises
        ------
        BatchMismatchError
            The cut is not known, the number of results differs from the number of chunks, or a result's length is no
            multiple of its chunk's, so that nobody can say which rows came from padding.
        """
        if self.real is None or self.padded is None:
            raise BatchMismatchError(
                "Padding cannot be removed before the length of the padded batch is known; "
                "wait for the input batch (its `.get()`), then collect."
            )
        if len(out_rows) != len(self.padded):
            raise BatchMismatchError(
                f"Padding cannot be removed: the batch was cut into {len(self.padded)} chunks, "
                f"but {len(out_rows)} results came back."
            )
        if self.is_trivial:
            return list(out_rows)
        keep = []
        for index, (rows, real, padded) in enumerate(zip(out_rows, self.real, self.padded, strict=True)):
            if padded == 0 or rows % padded:
                raise BatchMismatchError(
                    f"Padding cannot be removed: chunk {index} was sent with {padded} rows ({padded - real} of them "
                    f"padding) and came back with {rows}, which is no multiple. Return one row (or k rows) per input "
                    "row, or turn auto_padding off and use pad_dataproto_to_divisor and unpad_dataproto around the "
                    "call."
                )
            keep.append(real * (rows // padded))
        return keep


class PerRank(list[Any]):
    """What a built-in dispatch function returns for one argument: one element per rank.

    Attributes
    ----------
    padding : Padding or None
        How the argument was padded, for the collect function.
    """

    def __init__(self, items: Iterable[Any] = (), padding: Padding | None = None) -> None:
        super().__init__(items)
        self.padding = padding


class RankOutputs(list[Any]):
    """What a collect function gets: one element per rank, None for ranks that were not collected.

    Attributes
    ----------
    padding : Padding or None
        How the arguments of the call were padded.
    """

    def __init__(self, items: Iterable[Any] = (), padding: Padding | None = None) -> None:
        super().__init__(items)
        self.padding = padding
