"""Plans of rows and columns, without a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_controller import DataProto
from dask_controller.errors import BatchMismatchError, ChunkError, DataProtoError, KeyConflictError
from dask_controller.protocol.batching import Padding
from dask_controller.protocol.plan import (
    Chunk,
    Columns,
    Concat,
    Node,
    Repeat,
    Rows,
    Source,
    Union,
    assemble,
    choose_columns,
    keys_of,
    pieces_of,
)

#: Rows of the parts a, b, c, d; their values are 0, 1, 2, … over all parts.
LENGTHS = {"a": 3, "b": 0, "c": 4, "d": 1}


def parts() -> dict[str, DataProto]:
    out, start = {}, 0
    for key, n in LENGTHS.items():
        rows = torch.arange(start, start + n)
        names = np.array([f"row {i}" for i in rows.tolist()], dtype=object)
        out[key] = DataProto.from_dict({"x": rows, "y": rows * 10}, {"name": names}, meta_info={f"of {key}": n})
        start += n
    return out


def evaluated(node: Node) -> Any:
    """What a host would make of the plan."""
    keys = keys_of(node)
    values = parts()
    strands = node.strands({key: i for i, key in enumerate(keys)}, {i: LENGTHS[key] for i, key in enumerate(keys)})
    out = []
    for strand in strands:
        pieces, order = pieces_of(strand.rows)
        picked = []
        for piece in pieces:
            value = choose_columns(values[keys[piece.part]], strand.columns)
            rows = slice(piece.start, piece.stop) if piece.index is None else piece.index
            picked.append(value[rows])
            assert len(picked[-1]) == piece.num_rows
        out.append((picked, order))
    return assemble(out)


def xs(node: Node) -> list[int]:
    got = evaluated(node)
    assert got.non_tensor_batch["name"].tolist() == [f"row {i}" for i in got.batch["x"].tolist()]
    return got.batch["x"].tolist()  # type: ignore[no-any-return]


ALL = Source(("a", "b", "c", "d"))


def test_parts_in_order_and_what_they_say() -> None:
    got = evaluated(ALL)
    assert got.batch["x"].tolist() == list(range(8))
    # A part without rows is heard too.
    assert got.meta_info == {"of a": 3, "of b": 0, "of c": 4, "of d": 1}


def test_a_cut_asks_only_the_parts_it_needs() -> None:
    strands = Chunk(ALL, 0, 4).strands({"a": 0, "b": 1, "c": 2, "d": 3}, {0: 3, 1: 0, 2: 4, 3: 1})
    pieces, order = pieces_of(strands[0].rows)
    assert [(piece.part, piece.start, piece.stop) for piece in pieces] == [(0, 0, 2)] and order is None


def test_no_rows_keep_dtype_and_shape() -> None:
    got = evaluated(Rows(ALL, slice(0, 0)))
    assert got.batch["x"].shape == (0,) and got.batch["x"].dtype == torch.int64


@given(count=st.integers(1, 12))
@settings(deadline=None, max_examples=15)
def test_joining_chunks_is_the_whole(count: int) -> None:
    assert xs(Concat(tuple(Chunk(ALL, i, count) for i in range(count)))) == list(range(8))


@given(index=st.lists(st.integers(-8, 7), max_size=40))
@settings(deadline=None, max_examples=40)
def test_rows_by_number(index: list[int]) -> None:
    assert xs(Rows(ALL, np.asarray(index, dtype=np.int64))) == [i % 8 for i in index]


@given(mask=st.lists(st.booleans(), min_size=8, max_size=8))
@settings(deadline=None, max_examples=20)
def test_rows_by_mask(mask: list[bool]) -> None:
    assert xs(Rows(ALL, np.asarray(mask))) == [i for i, keep in enumerate(mask) if keep]


def test_scattered_rows_are_fetched_once_each() -> None:
    index = np.asarray([7, 0, 3, 3, 0, 6, 1, 7, 2, 5, 4, 0, 3, 7, 1, 6, 2, 5] * 3, dtype=np.int64)
    strands = Rows(ALL, index).strands({"a": 0, "b": 1, "c": 2, "d": 3}, {0: 3, 1: 0, 2: 4, 3: 1})
    pieces, order = pieces_of(strands[0].rows)
    assert sum(piece.num_rows for piece in pieces) == 8 and order is not None
    assert xs(Rows(ALL, index)) == index.tolist()


@pytest.mark.parametrize(("interleave", "want"), [(True, [0, 0, 1, 1, 2, 2]), (False, [0, 1, 2, 0, 1, 2])])
def test_repeat(interleave: bool, want: list[int]) -> None:
    assert xs(Repeat(Source(("a",)), 2, interleave)) == want


def test_chunk_of_a_chunk_of_chosen_rows() -> None:
    reversed_rows = Rows(ALL, np.arange(7, -1, -1))
    assert xs(Chunk(Chunk(reversed_rows, 1, 2), 0, 2)) == [3, 2]


def test_equal_chunks_are_padded_with_the_last_row() -> None:
    padding = Padding()
    assert [xs(Chunk(ALL, i, 3, padding, True)) for i in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 7]]
    assert (padding.real, padding.padded) == ((3, 3, 2), (3, 3, 3))


def test_equal_chunks_without_padding() -> None:
    with pytest.raises(ChunkError, match="8 rows cannot be cut into 3 equal chunks"):
        xs(Chunk(ALL, 0, 3, Padding(), False))


def test_lengths_of_arguments_that_share_a_padding() -> None:
    padding = Padding()
    xs(Chunk(ALL, 0, 4, padding, True))
    with pytest.raises(BatchMismatchError, match="8 rows and 3 rows"):
        xs(Chunk(Source(("a",)), 0, 4, padding, True))


def test_padding_of_the_producing_call_is_removed() -> None:
    padding = Padding((2, 3, 1), (3, 4, 1))
    assert xs(Source(("a", "c", "d"), padding)) == [0, 1, 3, 4, 5, 7]


def test_columns() -> None:
    chosen = evaluated(Columns(ALL, ("select", ["x"], [], [])))
    assert (list(chosen.batch.keys()), chosen.non_tensor_batch, chosen.meta_info) == (["x"], {}, {})
    dropped = evaluated(Columns(ALL, ("drop", ["x", "name"])))
    assert (list(dropped.batch.keys()), dropped.non_tensor_batch) == (["y"], {})
    renamed = evaluated(Columns(ALL, ("rename", ["x"], ["z"])))
    assert renamed.batch["z"].tolist() == list(range(8)) and "x" not in renamed.batch.keys()
    with pytest.raises(KeyConflictError, match="no column 'nam'; did you mean 'name'"):
        evaluated(Columns(ALL, ("column", "nam")))


def test_side_by_side() -> None:
    left = Columns(ALL, ("column", "x"))
    right = Columns(Rows(ALL, slice(None)), ("select", ["y"], ["name"], []))
    got = evaluated(Union((left, right)))
    assert got.batch["x"].tolist() == list(range(8)) and got.batch["y"].tolist() == list(range(0, 80, 10))
    with pytest.raises(BatchMismatchError, match="8 and 3 rows"):
        evaluated(Union((ALL, Source(("a",)))))


def test_batches_with_different_columns_are_not_joined() -> None:
    with pytest.raises(DataProtoError, match="columns were chosen differently"):
        evaluated(Concat((Columns(ALL, ("column", "x")), ALL)))


def test_rows_that_do_not_exist() -> None:
    with pytest.raises(BatchMismatchError, match="row 8 does not exist in a batch of 8 rows"):
        xs(Rows(ALL, np.asarray([0, 8])))
    with pytest.raises(BatchMismatchError, match="a mask of 3 entries cannot pick from 8 rows"):
        xs(Rows(ALL, np.asarray([True, False, True])))
