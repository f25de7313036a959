"""Cutting the batches of one call into chunks, and joining what the ranks return.

Owns the rules that hold for every mode that splits batches: what can be split, that all batches of a call have the same
number of rows, when rows are added so that every chunk gets some, and how the results of added rows are dropped again.
Which rank gets which chunk is the business of the callers in :mod:`~dask_controller.dispatch.functions` and
:mod:`~dask_controller.dispatch.mesh`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import distributed
import numpy as np
from tensordict import TensorDictBase

from dask_controller.errors import DispatchError, UnsupportedTypeError
from dask_controller.protocol import columns
from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.batching import Padding, PerRank, chunk_bounds, padding_rows
from dask_controller.protocol.config import DataProtoConfig
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.future import DataProtoFuture

__all__ = ["PaddingView", "call_padding", "join_batches", "labelled", "split_batches"]


class PaddingView(Padding):
    """Some chunks of a cut, in any order; it follows the cut, which may become known late.

    Parameters
    ----------
    cut : Padding
        How the batch was cut.
    chunks : sequence of int
        Which chunks, in the order in which their results stand.
    """

    __slots__ = ("chunks", "cut")

    def __init__(self, cut: Padding, chunks: Sequence[int]) -> None:
        self.cut = cut
        self.chunks = tuple(chunks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cut, self.chunks)

    # The base class stores these two; a view must look them up each time.
    @property
    def real(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """Rows of each chunk that came from the caller."""
        return None if self.cut.real is None else tuple(self.cut.real[chunk] for chunk in self.chunks)

    @property
    def padded(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """Rows of each chunk that were sent."""
        return None if self.cut.padded is None else tuple(self.cut.padded[chunk] for chunk in self.chunks)

    def set(self, length: int, chunks: int) -> None:
        """Fill in the cut itself."""
        self.cut.set(length, chunks)


@dataclass(frozen=True)
class _Argument:
    """One argument of a call, with the words to name it in a message."""

    label: str
    value: Any

    @property
    def is_late(self) -> bool:
        """Whether the number of rows is known only when the data are."""
        return isinstance(self.value, DataProtoFuture)

    @property
    def rows(self) -> int | None:
        """Number of rows; None where unknown yet, or where there are no columns that could have rows."""
        if isinstance(self.value, DataProto):
            return len(self.value) if _has_columns(self.value) else None
        return None if self.is_late else int(self.value.batch_size[0])

    def __str__(self) -> str:
        return f"{self.label} ({type(self.value).__name__})"


def labelled(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Go through the arguments of a call with the words that name each in a message; positions count from 1."""
    for position, value in enumerate(args, start=1):
        yield f"argument {position}", value
    for name, value in kwargs.items():
        yield f"argument {name!r}", value


def split_batches(
    chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, receivers: str = "ranks", first: int = 1
) -> tuple[list[PerRank], dict[str, PerRank]]:
    """Cut every argument of a call into the same number of chunks.

    Parameters
    ----------
    chunks : int
        How many pieces.
    args, kwargs
        Batches: DataProto, TensorDict, DataProtoFuture, or a Dask future of one of these.
    receivers : str
        What a chunk is for, in messages: ranks, or data-parallel groups.
    first : int
        Number of the first positional argument in messages.

    Returns
    -------
    (list of PerRank, dict of PerRank)
        In the place of each argument its `chunks` pieces. All share one Padding; where only futures were given it
        becomes known when their rows do.

    Raises
    ------
    DispatchError
        An argument cannot be split, two batches differ in length, or the rows do not come out even and padding is off.
    """
    positional = [_argument(f"argument {first + index}", value) for index, value in enumerate(args)]
    keywords = {name: _argument(f"argument {name!r}", value) for name, value in kwargs.items()}
    arguments = [*positional, *keywords.values()]

    rows = _common_rows([(str(argument), argument.rows) for argument in arguments if argument.rows is not None])
    may_pad = any(_wants_padding(argument.value) for argument in arguments)
    if rows is not None and padding_rows(rows, chunks) and not may_pad:
        raise _uneven(next(a for a in arguments if a.rows is not None), rows, chunks, receivers)
    padding = Padding()
    if rows is not None:
        padding.set(rows, chunks)
    elif not any(argument.is_late for argument in arguments):
        # Only meta_info, which goes to every chunk whole: nothing of the results can stem from padding.
        padding.set(0, chunks)

    def cut(argument: _Argument) -> PerRank:
        if argument.is_late:
            # With no batch at hand that says whether to pad, DataProtoConfig decides once the rows are known.
            known = rows is not None or may_pad
            pieces, _ = argument.value.chunk_padded(chunks, may_pad if known else None, padding)
        elif rows is None or argument.rows is None or not padding_rows(rows, chunks):
            pieces = BatchData(argument.value).chunk(chunks=chunks)
        else:
            pieces = _padded_chunks(argument.value, rows, chunks)
        return PerRank(pieces, padding)

    return [cut(argument) for argument in positional], {name: cut(argument) for name, argument in keywords.items()}


def call_padding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Padding | None:
    """Return the Padding by which the results of a call are to be trimmed.

    Parameters
    ----------
    args, kwargs
        What a dispatch function returned.

    Returns
    -------
    Padding or None
        None if no batch was split. The arguments that one call of a built-in function splits share one Padding.
    """
    for _, value in labelled(args, kwargs):
        padding = getattr(value, "padding", None)
        if isinstance(padding, Padding):
            return padding
    return None


def join_batches(outputs: Sequence[Any], ranks: Sequence[int], padding: Padding | None) -> Any:
    """Concatenate the results of some ranks, without the rows that come from padding.

    Parameters
    ----------
    outputs : sequence
        One result per collected rank, in the order in which their rows are to stand: all DataProto, all TensorDict, or
        all futures.
    ranks : sequence of int
        The rank of each result, for messages.
    padding : Padding or None
        One chunk per result.

    Returns
    -------
    DataProto, TensorDict or DataProtoFuture
        The results in one piece.

    Raises
    ------
    UnsupportedTypeError
        Results cannot be joined; the message names the rank and the type it returned.
    BatchMismatchError
        Rows of padding cannot be told from real ones.
    """
    _check_joinable(outputs, ranks)
    if isinstance(outputs[0], distributed.Future):
        joined: Any = BatchData(list(outputs)).concat()
        return joined if padding is None or padding.is_trivial else joined.without_padding(padding)
    if isinstance(outputs[0], DataProtoFuture):
        if padding is not None and not padding.is_trivial:
            outputs = [out.without_padding(PaddingView(padding, (place,))) for place, out in enumerate(outputs)]
        return BatchData(list(outputs)).concat()
    if padding is not None and not padding.is_trivial:
        rows = [_length(output) for output in outputs]
        # Ranks that return only meta_info have no rows, and so none that stem from padding.
        outputs = [
            output if keep == had else _slice(output, 0, keep)
            for output, had, keep in zip(outputs, rows, padding.kept(rows), strict=True)
        ]
    return BatchData(list(outputs)).concat()


def _argument(label: str, value: Any) -> _Argument:
    if isinstance(value, distributed.Future):
        value = DataProtoFuture.from_futures([value])
    elif isinstance(value, TensorDictBase) and not value.batch_size:
        raise DispatchError(
            f"{label} is a {type(value).__name__} with an empty batch_size, so it has no rows to split. Expected a "
            "batch dimension: build it with batch_size=[number of rows]. No rank was called."
        )
    elif not BatchData(value).is_chunkable():
        raise _not_chunkable(label, value)
    return _Argument(label, value)


def _not_chunkable(label: str, value: object) -> DispatchError:
    if isinstance(value, (list, tuple)):
        advice = "A list that already has one element per rank goes with Dispatch.DP_COMPUTE."
    else:
        advice = (
            "A plain value that every rank needs can ride in the batch's meta_info; "
            "Dispatch.ONE_TO_ALL sends equal arguments to all ranks."
        )
    return DispatchError(
        f"{label} is a {type(value).__name__}, which cannot be split between ranks. Expected a DataProto, TensorDict, "
        f"DataProtoFuture or Dask future in every argument of this dispatch mode. {advice} A mode of your own "
        "(dispatch_mode={'dispatch_fn': ..., 'collect_fn': ...}) can mix both. No rank was called."
    )


def _common_rows(lengths: Sequence[tuple[str, int]]) -> int | None:
    """Return the length that all have; None if there are none."""
    for label, rows in lengths:
        if rows != lengths[0][1]:
            raise DispatchError(
                f"The batches of one call differ in length: {lengths[0][0]} has {lengths[0][1]} rows, {label} has "
                f"{rows}. Expected equal lengths, because each rank receives the same chunk of every argument. Select "
                "or repeat rows so that they agree, or make two calls."
            )
    return lengths[0][1] if lengths else None


def _uneven(argument: _Argument, rows: int, chunks: int, receivers: str) -> DispatchError:
    fewer = rows - rows % chunks
    drop = f"drop rows (data[:{fewer}])" if fewer else "send more rows"
    return DispatchError(
        f"{argument} has {rows} rows, which {chunks} {receivers} cannot share evenly, and automatic padding is off. "
        f"Expected a multiple of {chunks}. Either turn padding on (DataProtoConfig.auto_padding = True, the "
        "environment variable VERL_AUTO_PADDING=1, or auto_padding=True where the batch is built), which also removes "
        f"the added rows from the result; or pad by hand with pad_dataproto_to_divisor(data, {chunks}) and "
        f"unpad_dataproto; or {drop}. No rank was called."
    )


def _wants_padding(value: object) -> bool:
    if isinstance(value, DataProto):
        return bool(value.is_padding_enabled())
    # A TensorDict has no place for a switch of its own. A future's own switch lies with its rows.
    return isinstance(value, TensorDictBase) and bool(DataProtoConfig.auto_padding)


def _padded_chunks(value: Any, rows: int, chunks: int) -> list[Any]:
    """Cut as if the last row were repeated up to a multiple of `chunks`, without copying the rows before it."""
    pieces = []
    for start, stop in chunk_bounds(rows + padding_rows(rows, chunks), chunks):
        if stop <= rows:
            pieces.append(_slice(value, start, stop))
            continue
        numbers = np.minimum(np.arange(start, stop), rows - 1)
        is_data_proto = isinstance(value, DataProto)
        pieces.append(value.select_idxs(numbers) if is_data_proto else columns.take_tensordict(value, numbers))
    return pieces


def _slice(value: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` (not included), as views."""
    if isinstance(value, DataProto):
        return value.slice(start, stop)
    return columns.slice_tensordict(value, slice(start, stop))


def _check_joinable(outputs: Sequence[Any], ranks: Sequence[int]) -> None:
    if not outputs:
        raise UnsupportedTypeError("No rank is collected, so there is no result to join. Expected at least one.")
    if BatchData(list(outputs)).is_concatable():
        return
    advice = (
        "Dispatch.DP_COMPUTE_METRIC splits the arguments in the same way and gives the results as a list, whatever "
        "their type."
    )
    if all(output is None for output in outputs):
        raise UnsupportedTypeError(
            f"All collected ranks ({', '.join(map(str, ranks))}) returned None, and this dispatch mode joins the "
            f"results into one batch. Is a `return` missing at the end of the method? {advice}"
        )
    by_kind: dict[str, list[str]] = {}
    for rank, output in zip(ranks, outputs, strict=True):
        by_kind.setdefault(type(output).__name__, []).append(str(rank))
    found = "; ".join(
        f"{kind} from {'rank' if len(where) == 1 else 'ranks'} {', '.join(where)}" for kind, where in by_kind.items()
    )
    raise UnsupportedTypeError(
        f"The results cannot be joined into one batch: got {found}. Expected a DataProto from every rank, or a "
        f"TensorDict from every rank. {advice}"
    )


def _has_columns(batch: DataProto) -> bool:
    return batch.batch is not None or bool(batch.non_tensor_batch)


def _length(batch: Any) -> int:
    return len(batch) if isinstance(batch, DataProto) else int(batch.batch_size[0])
