"""Row arithmetic: exact sizes, exact inverses, padding that can be taken off or says why not."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_controller.errors import BatchMismatchError, ChunkError
from dask_controller.protocol.batching import Padding, PerRank, RankOutputs, chunk_bounds, chunk_sizes, padding_rows

quick = settings(deadline=None, max_examples=50)


@quick
@given(length=st.integers(0, 500), chunks=st.integers(1, 60))
def test_sizes_are_those_of_array_split(length: int, chunks: int) -> None:
    sizes = chunk_sizes(length, chunks)
    assert sizes == [len(part) for part in np.array_split(np.arange(length), chunks)]
    bounds = chunk_bounds(length, chunks)
    assert [end - start for start, end in bounds] == sizes
    assert bounds[0][0] == 0 and bounds[-1][1] == length
    assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:], strict=False))


@pytest.mark.parametrize(("length", "chunks"), [(124, 15), (6, 4), (2, 4), (0, 3)])
def test_always_exactly_n_pieces(length: int, chunks: int) -> None:
    assert len(chunk_sizes(length, chunks)) == chunks


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "3", None, True])
def test_bad_chunk_counts_are_refused(chunks: object) -> None:
    with pytest.raises(ChunkError, match="number of chunks"):
        chunk_sizes(4, chunks)  # type: ignore[arg-type]


def test_numpy_integers_are_counts() -> None:
    assert chunk_sizes(np.int64(5), np.int32(2)) == [3, 2]


@quick
@given(length=st.integers(0, 300), divisor=st.integers(1, 50))
def test_padding_rows_makes_it_divide(length: int, divisor: int) -> None:
    added = padding_rows(length, divisor)
    assert 0 <= added < divisor
    assert (length + added) % divisor == 0
    assert length or added == 0


@quick
@given(length=st.integers(0, 100), chunks=st.integers(1, 20), times=st.integers(0, 4))
def test_padding_keeps_the_real_rows(length: int, chunks: int, times: int) -> None:
    padding = Padding()
    assert not padding.known and not padding.is_trivial
    padding.set(length, chunks)
    assert padding.known and padding.real is not None and padding.padded is not None
    assert sum(padding.real) == length and len(set(padding.padded)) == 1
    assert padding.is_trivial == (length % chunks == 0)
    if padding.padded[0]:
        assert padding.kept([times * rows for rows in padding.padded]) == [times * rows for rows in padding.real]


def test_five_rows_on_four_ranks() -> None:
    padding = Padding()
    padding.set(5, 4)
    assert padding.kept([2, 2, 2, 2]) == [2, 2, 1, 0]
    assert padding.kept([4, 2, 6, 0]) == [4, 2, 3, 0]


@pytest.mark.parametrize("rows", [[1, 2, 2, 2], [2, 2, 3, 2], [2, 2, 2, 1]])
def test_lengths_that_fit_no_padding_are_refused(rows: list[int]) -> None:
    padding = Padding((2, 2, 1, 0), (2, 2, 2, 2))
    with pytest.raises(BatchMismatchError, match="pad_dataproto_to_divisor"):
        padding.kept(rows)


def test_unpadded_chunks_may_return_any_length() -> None:
    assert Padding((2, 2), (2, 2)).kept([1, 7]) == [1, 7]


def test_padding_says_what_is_wrong() -> None:
    with pytest.raises(BatchMismatchError, match="before the length"):
        Padding().kept([1])
    with pytest.raises(BatchMismatchError, match="4 chunks.*3 results"):
        Padding((2, 2, 1, 0), (2, 2, 2, 2)).kept([2, 2, 2])
    with pytest.raises(BatchMismatchError):
        Padding((1,), None)
    with pytest.raises(BatchMismatchError):
        Padding((1,), (1, 1))


@pytest.mark.parametrize("cls", [PerRank, RankOutputs])
def test_rank_lists_are_lists_that_carry_padding(cls: type) -> None:
    padding = Padding((1, 0), (1, 1))
    values = cls([1, 2], padding)
    assert values == [1, 2] and isinstance(values, list) and values.padding is padding
    assert cls().padding is None
    again = pickle.loads(pickle.dumps(values))
    assert again == values and type(again) is cls and again.padding == padding
