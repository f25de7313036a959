"""DataProto: cutting, picking, joining. Inputs stay as they are, no row is lost, empty batches keep their form."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dask_controller.errors import (
    BatchMismatchError,
    ChunkError,
    DataProtoError,
    KeyConflictError,
    UnsupportedTypeError,
)
from dask_controller.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    fold_batch_dim,
    pack,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpack,
    unpad_dataproto,
)
from tests.protocol.batches import assert_same_batch, fingerprint, zoo

quick = settings(deadline=None, max_examples=25)


def index_of(dp: DataProto) -> list[int]:
    values: list[int] = dp.batch["index"].tolist()
    return values


# --- identities --------------------------------------------------------------------------------------------------


@quick
@given(rows=st.integers(0, 12), chunks=st.integers(1, 15))
def test_chunk_then_concat_is_identity(rows: int, chunks: int) -> None:
    dp = zoo(rows)
    pieces = dp.chunk(chunks)
    assert len(pieces) == chunks
    assert_same_batch(DataProto.concat(pieces), dp)


@quick
@given(rows=st.integers(0, 12), size=st.integers(1, 15))
def test_split_then_concat_is_identity(rows: int, size: int) -> None:
    dp = zoo(rows)
    pieces = dp.split(size)
    assert all(len(piece) == size for piece in pieces[:-1]) and len(pieces) == max(-(-rows // size), 1)
    assert_same_batch(DataProto.concat(pieces), dp)


@quick
@given(rows=st.integers(0, 12), divisor=st.integers(1, 15))
def test_pad_then_unpad_is_identity(rows: int, divisor: int) -> None:
    dp = zoo(rows)
    padded, added = pad_dataproto_to_divisor(dp, divisor)
    assert len(padded) % divisor == 0 and len(padded) == rows + added
    assert index_of(padded) == [index % rows for index in range(rows + added)]
    assert_same_batch(unpad_dataproto(padded, added), dp)


@quick
@given(rows=st.integers(0, 12))
def test_pack_then_unpack_is_identity(rows: int) -> None:
    dp = zoo(rows)
    back = unpack(pack(dp).copied())
    assert_same_batch(back, dp)
    assert fingerprint(back.batch["nan"]) == fingerprint(dp.batch["nan"])


def test_nan_payloads_survive_cut_and_join() -> None:
    odd = torch.tensor([0x7FC00001, 0x7FC0DEAD, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    dp = DataProto.from_dict({"x": odd})
    for back in (DataProto.concat(dp.chunk(2)), unpack(pack(dp)), dp[[0, 1, 2]], dp.repeat(1)):
        assert torch.equal(back.batch["x"].view(torch.int32), odd.view(torch.int32))


@quick
@given(rows=st.integers(1, 12), data=st.data())
def test_picking_rows_agrees_with_numpy(rows: int, data: Any) -> None:
    dp = zoo(rows)
    numbers = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=20))
    expected = np.arange(rows)[numbers].tolist() if numbers else []
    for form in (numbers, np.array(numbers, dtype=np.int32), torch.tensor(numbers, dtype=torch.int64)):
        picked = dp[form]
        assert index_of(picked) == expected and picked.non_tensor_batch["number"].tolist() == expected
        assert picked.non_tensor_batch["ids"].tolist() == [[index, index] for index in expected]
        for ours, index in zip(picked.batch["jagged"].unbind() if numbers else (), expected, strict=True):
            assert torch.equal(ours, dp.batch["jagged"].unbind()[index])
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for form in (mask, np.array(mask), torch.tensor(mask)):
        assert index_of(dp[form]) == np.flatnonzero(mask).tolist()
    start, stop = data.draw(st.integers(-15, 15)), data.draw(st.integers(-15, 15))
    step = data.draw(st.sampled_from([None, 1, 2, 3, -1, -2]))
    assert index_of(dp[start:stop:step]) == np.arange(rows)[start:stop:step].tolist()


# --- inputs stay as they are -------------------------------------------------------------------------------------


def other_columns(dp: DataProto) -> DataProto:
    return DataProto.from_dict({"other": torch.arange(len(dp))}, {"more": list(range(len(dp)))}, {"extra": [1]})


PURE: dict[str, Callable[[DataProto], Any]] = {
    "index": lambda dp: dp[1],
    "slice": lambda dp: dp.slice(1, 3),
    "full slice": lambda dp: dp[:],
    "reversed": lambda dp: dp[::-1],
    "select_idxs": lambda dp: dp.select_idxs([2, 0]),
    "mask": lambda dp: dp[torch.tensor([True, False, True, False])],
    "select": lambda dp: dp.select(["index"], ["ids"], ["nested"]),
    "select all": lambda dp: dp.select(),
    "select deepcopy": lambda dp: dp.select(["index"], deepcopy=True),
    "rename": lambda dp: dp.rename(["index", "float"], ["float", "index"]),
    "union": lambda dp: dp.union(other_columns(dp)),
    "union with itself": lambda dp: dp.union(dp),
    "union into": lambda dp: other_columns(dp).union(dp),
    "to": lambda dp: dp.to("cpu"),
    "chunk": lambda dp: dp.chunk(3),
    "chunk 1": lambda dp: dp.chunk(1),
    "split": lambda dp: dp.split(3),
    "repeat": lambda dp: dp.repeat(2),
    "repeat block": lambda dp: dp.repeat(2, interleave=False),
    "sample_level_repeat": lambda dp: dp.sample_level_repeat([1, 0, 2, 3]),
    "unfold_column_chunks": lambda dp: dp.unfold_column_chunks(2, ["float"]),
    "fold": lambda dp: fold_batch_dim(dp.select([key for key in dp.batch.keys() if key != "jagged"]), 2),
    "concat": lambda dp: DataProto.concat([dp, dp]),
    "concat one": lambda dp: DataProto.concat([dp]),
    "pad": lambda dp: pad_dataproto_to_divisor(dp, 3)[0],
    "unpad": lambda dp: unpad_dataproto(dp, 1),
    "to_tensordict": lambda dp: DataProto.from_tensordict(dp.select(["index"], ["ids"], ["nested"]).to_tensordict()),
    "iterate": lambda dp: list(dp.make_iterator(2, 1, seed=0, dataloader_kwargs={"shuffle": True})),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def all_batches(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


@pytest.mark.parametrize("name", PURE)
def test_methods_do_not_change_their_input(name: str) -> None:
    dp = zoo(4)
    before, tensors, arrays = fingerprint(dp), dp.batch, dp.non_tensor_batch
    PURE[name](dp)
    assert fingerprint(dp) == before and dp.batch is tensors and dp.non_tensor_batch is arrays


@pytest.mark.parametrize("name", PURE)
def test_results_have_containers_of_their_own(name: str) -> None:
    """In-place methods and assignments on a result never show in the input or in its siblings."""
    dp = zoo(4)
    before = fingerprint(dp)
    results = all_batches(PURE[name](dp))
    others = [fingerprint(result) for result in results[1:]]
    first = results[0]
    first.meta_info["new"] = 1
    if "nested" in first.meta_info and name != "copy":
        first.meta_info["nested"]["a"][1]["b"] = "changed"
    first.non_tensor_batch["new"] = np.zeros(len(first)) if isinstance(first, DataProto) else 0
    if isinstance(first, DataProto):
        keys = list(first.batch.keys())
        first.pop(batch_keys=keys[:1])
        first.batch["new"] = torch.zeros(len(first))
        first.reorder(list(range(len(first)))[::-1])
    assert fingerprint(dp) == before
    assert [fingerprint(result) for result in results[1:]] == others


@pytest.mark.parametrize("fails", ["to_tensordict", "union", "rename", "concat"])
def test_failing_methods_do_not_change_their_input(fails: str) -> None:
    dp = zoo(4)
    clash = DataProto.from_dict({"new": torch.zeros(4), "index": torch.ones(4)}, {"more": [1] * 4}, {"step": 4})
    calls: dict[str, Callable[[], Any]] = {
        "to_tensordict": lambda: DataProto.from_dict({"x": torch.zeros(4)}, {"x": [1] * 4}).to_tensordict(),
        "union": lambda: dp.union(clash),
        "rename": lambda: dp.rename("index", "float"),
        "concat": lambda: DataProto.concat([dp, clash]),
    }
    before = fingerprint((dp, clash))
    with pytest.raises(KeyConflictError):
        calls[fails]()
    assert fingerprint((dp, clash)) == before


def test_the_callers_dicts_stay_as_they_are() -> None:
    tensors, arrays, meta = {"x": torch.zeros(2)}, {"o": [[1], [2]]}, {"m": {"k": 1}}
    dp = DataProto.from_dict(tensors, arrays, meta, auto_padding=True)
    dp.meta_info["more"] = 1
    dp.non_tensor_batch["p"] = np.zeros(2)
    dp.pop(["x"], ["o"], ["m"])
    assert list(tensors) == ["x"] and arrays == {"o": [[1], [2]]} and meta == {"m": {"k": 1}}
    td = TensorDict({"x": torch.zeros(2), "y": torch.zeros(2)}, batch_size=[2])
    meta = {"m": 1}
    built = DataProto(batch=td, meta_info=meta)
    popped = built.pop(["x"], meta_info_keys=["m"])
    assert set(td.keys()) == {"x", "y"} and meta == {"m": 1}
    assert set(popped.batch.keys()) == {"x"} and popped.meta_info == {"m": 1}
    given = {"a": np.zeros(2)}
    union_numpy_dict(given, {"b": np.zeros(2)})
    union_tensor_dict(td, TensorDict({"z": torch.zeros(2)}, batch_size=[2]))
    assert list(given) == ["a"] and set(td.keys()) == {"x", "y"}


def test_chunks_are_independent() -> None:
    dp = DataProto.from_dict({"x": torch.zeros(4)}, meta_info={"metrics": {"x": 0}, "t": ([1],)})
    c = dp.chunk(2)
    c[0].meta_info["m"] = 1
    c[0].meta_info["metrics"]["x"] = 1
    c[0].meta_info["t"][0].append(2)
    for unchanged in (dp, c[1]):
        assert unchanged.meta_info == {"metrics": {"x": 0}, "t": ([1],)}


def test_slices_are_views_and_a_single_batch_is_not_copied() -> None:
    dp = zoo(6)
    piece = dp.chunk(3)[1]
    assert piece.batch["float"].data_ptr() == dp.batch["float"][2:].data_ptr()
    assert np.shares_memory(piece.non_tensor_batch["matrix"], dp.non_tensor_batch["matrix"])
    assert piece.batch["jagged"].values().untyped_storage().data_ptr() == (
        dp.batch["jagged"].values().untyped_storage().data_ptr()
    )
    assert DataProto.concat([dp]).batch["float"].data_ptr() == dp.batch["float"].data_ptr()


# --- exact pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "chunks"), [(124, 15), (6, 4), (2, 4), (0, 4), (10, 4), (1, 3)])
def test_always_n_pieces_cut_at_the_same_rows(rows: int, chunks: int) -> None:
    dp = zoo(rows)
    pieces = dp.chunk(chunks)
    assert [len(piece) for piece in pieces] == [len(part) for part in np.array_split(np.arange(rows), chunks)]
    for piece in pieces:
        assert piece.non_tensor_batch["number"].tolist() == index_of(piece)
        assert [ids[0] for ids in piece.non_tensor_batch["ids"]] == index_of(piece)
    only_objects = dp.select(batch_keys=[]).pop(non_tensor_batch_keys=["ids"])
    assert [len(piece) for piece in only_objects.chunk(chunks)] == [len(piece) for piece in pieces]


@pytest.mark.parametrize(("rows", "divisor", "added"), [(1, 8, 7), (3, 8, 5), (0, 8, 0), (8, 8, 0), (9, 8, 7)])
def test_padding_to_a_divisor(rows: int, divisor: int, added: int) -> None:
    dp = zoo(rows)
    padded, pad_size = pad_dataproto_to_divisor(dp, divisor)
    assert pad_size == added and len(padded) == rows + added
    assert_same_batch(unpad_dataproto(padded, pad_size), dp)


def test_padding_by_hand_says_what_is_wrong() -> None:
    dp = zoo(3)
    with pytest.raises(ChunkError, match="divisor"):
        pad_dataproto_to_divisor(dp, 0)
    with pytest.raises(UnsupportedTypeError, match="list"):
        pad_dataproto_to_divisor([1], 2)  # type: ignore[arg-type]
    with pytest.raises(BatchMismatchError, match="4 padding rows off a batch of 3"):
        unpad_dataproto(dp, 4)
    with pytest.raises(ChunkError):
        unpad_dataproto(dp, -1)


def test_padding_method_is_in_place() -> None:
    dp = zoo(3)
    assert dp.padding(0) is None and len(dp) == 3
    dp.padding(2)
    assert index_of(dp) == [0, 1, 2, 2, 2] and dp.non_tensor_batch["ids"].tolist()[-1] == [2, 2]
    dp.padding(1, "first")
    assert index_of(dp) == [0, 1, 2, 2, 2, 0] and dp.meta_info["step"] == 3
    with pytest.raises(ChunkError, match="'middle'"):
        dp.padding(1, "middle")
    with pytest.raises(BatchMismatchError, match="0 rows"):
        zoo(0).padding(1)
    zoo(0).padding(0)


def test_the_padding_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_AUTO_PADDING", raising=False)
    plain = DataProto.from_dict({"x": torch.zeros(2)})
    own = DataProto.from_dict({"x": torch.zeros(2)}, auto_padding=True)
    assert not plain.is_padding_enabled() and own.is_padding_enabled()
    assert all(piece.is_padding_enabled() for piece in own.chunk(2))
    assert DataProto.concat([plain, own]).is_padding_enabled() and plain.union(own).is_padding_enabled()
    assert DataProto.from_single_dict({"x": torch.zeros(2)}, auto_padding=True).is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "true")
    assert plain.is_padding_enabled() and DataProtoConfig.auto_padding
    monkeypatch.setenv("VERL_AUTO_PADDING", "0")
    assert not plain.is_padding_enabled()
    DataProtoConfig.auto_padding = True
    try:
        assert plain.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(UnsupportedTypeError, match="True or False"):
        DataProtoConfig.auto_padding = 1  # type: ignore[assignment]


# --- empty batches -----------------------------------------------------------------------------------------------

EMPTY: dict[str, Callable[[DataProto], DataProto]] = {
    "slice": lambda dp: dp[0:0],
    "reversed": lambda dp: dp[::-1],
    "select_idxs": lambda dp: dp.select_idxs([]),
    "mask": lambda dp: dp[torch.zeros(0, dtype=torch.bool)],
    "select": lambda dp: dp.select(),
    "union": lambda dp: dp.union(dp),
    "to": lambda dp: dp.to("cpu"),
    "chunk": lambda dp: dp.chunk(3)[2],
    "split": lambda dp: dp.split(2)[0],
    "repeat": lambda dp: dp.repeat(3),
    "repeat block": lambda dp: dp.repeat(3, interleave=False),
    "sample_level_repeat": lambda dp: dp.sample_level_repeat([]),
    "concat": lambda dp: DataProto.concat([dp, dp, dp]),
    "concat one": lambda dp: DataProto.concat([dp]),
    "pad": lambda dp: pad_dataproto_to_divisor(dp, 8)[0],
    "unpad": lambda dp: unpad_dataproto(dp, 0),
    "pack": lambda dp: unpack(pack(dp)),
    "copy": copy.copy,
    "rename": lambda dp: dp.rename("index", "i").rename("i", "index"),
    "repeat nothing": lambda dp: zoo(4).repeat(0),
    "no rows picked": lambda dp: zoo(4)[[]],
    "no rows left": lambda dp: zoo(4)[4:],
    "no rows of a mask": lambda dp: zoo(4)[np.zeros(4, dtype=bool)],
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_batches_keep_dtype_and_trailing_shape(name: str) -> None:
    assert_same_batch(EMPTY[name](zoo(0)), zoo(0))


def test_empty_batches_of_one_column_kind() -> None:
    dp = zoo(0, jagged=False)
    folded = unfold_batch_dim(fold_batch_dim(dp, 3))
    assert_same_batch(folded, dp)
    unfolded = dp.unfold_column_chunks(2, ["float", "matrix"])
    assert unfolded.batch["float"].shape == (0, 2) and unfolded.non_tensor_batch["matrix"].shape == (0, 1, 3)
    td = dp.select(["index"], ["ids"], []).to_tensordict()
    back = DataProto.from_tensordict(td)
    assert back.non_tensor_batch["ids"].dtype == object and back.non_tensor_batch["ids"].shape == (0,)
    assert list(dp.make_iterator(4, 2)) == []


def test_ranks_without_rows_do_not_spoil_the_others() -> None:
    full = zoo(3)
    nothing = DataProto.from_dict({"x": torch.empty(0)}, {"o": np.empty(0)}, {"from": "rank 1"})
    rows = DataProto.from_dict({"x": torch.ones(2, 5, dtype=torch.int64)}, {"o": np.array(["a", "b"])})
    joined = DataProto.concat([nothing, rows, nothing])
    assert joined.batch["x"].dtype is torch.int64 and joined.batch["x"].shape == (2, 5)
    assert joined.non_tensor_batch["o"].tolist() == ["a", "b"] and joined.meta_info == {"from": "rank 1"}
    assert_same_batch(DataProto.concat([full[:0], full, full[:0]]), full)
    assert_same_batch(DataProto.concat([DataProto(), full, DataProto(meta_info={"m": 1})]), full, meta=False)
    assert len(DataProto.concat([DataProto(), DataProto()])) == 0


# --- columns -----------------------------------------------------------------------------------------------------


def test_object_columns_are_one_dimensional_and_lists_stay_lists() -> None:
    first = DataProto.from_dict(non_tensors={"ids": [[1, 2], [3, 4]]})
    second = DataProto.from_dict(non_tensors={"ids": [[1], [2, 3]]})
    for column in (first.non_tensor_batch["ids"], second.non_tensor_batch["ids"]):
        assert column.shape == (2,) and column.dtype == object
    joined = DataProto.concat([first, second]).non_tensor_batch["ids"]
    assert joined.shape == (4,) and joined.tolist() == [[1, 2], [3, 4], [1], [2, 3]]
    assert all(type(item) is list for item in joined)
    travelled = unpack(pack(first)).non_tensor_batch["ids"]
    assert travelled.shape == (2,) and type(travelled[0]) is list


@pytest.mark.parametrize(
    "values",
    [[np.zeros(2), np.zeros(2)], [torch.zeros(2)] * 2, ["a", "b"], [(1, 2), (3, 4)], [None, 1], ({}, {}), range(2)],
    ids=repr,
)
def test_columns_from_any_sequence(values: Any) -> None:
    column = DataProto.from_dict(non_tensors={"o": values}).non_tensor_batch["o"]
    assert column.shape == (2,) and column.dtype == object
    assert [type(item) for item in column] == [type(item) for item in values]


@pytest.mark.parametrize("value", ["text", 5, {"a": 1}, np.array(3)], ids=repr)
def test_what_is_no_column_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match="'bad'"):
        DataProto.from_dict(non_tensors={"bad": value})


def test_building_says_which_columns_disagree() -> None:
    with pytest.raises(BatchMismatchError, match="'y' has 3 rows.*'x' has 2"):
        DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)})
    with pytest.raises(BatchMismatchError, match="'o' has 3 rows, but the tensors has 2"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"o": [1, 2, 3]})
    with pytest.raises(BatchMismatchError, match="'p' has 1 rows, but column 'o' has 3"):
        DataProto.from_dict(non_tensors={"o": [1, 2, 3], "p": [1]})
    with pytest.raises(BatchMismatchError, match="no dimensions"):
        DataProto.from_dict({"x": torch.tensor(1)})
    with pytest.raises(UnsupportedTypeError, match="'x' of tensors must be a tensor, got list"):
        DataProto.from_dict({"x": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(UnsupportedTypeError, match="from_dict"):
        DataProto(batch={"x": torch.zeros(2)})
    with pytest.raises(BatchMismatchError, match="one batch dimension"):
        DataProto(batch=TensorDict({}, batch_size=[2, 3]))
    with pytest.raises(BatchMismatchError, match="num_batch_dims=2"):
        DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2)
    with pytest.raises(UnsupportedTypeError, match="list"):
        DataProto.from_single_dict({"x": [1, 2]})
    with pytest.raises(UnsupportedTypeError, match="'o'"):
        DataProto(non_tensor_batch={"o": [1]})  # type: ignore[dict-item]
    dp = zoo(3)
    dp.non_tensor_batch["late"] = np.zeros(2)
    with pytest.raises(BatchMismatchError, match="'late' has 2 rows"):
        dp.check_consistency()


def test_from_single_dict_and_nothing() -> None:
    dp = DataProto.from_single_dict({"x": torch.zeros(2), "o": np.array(["a", "b"])}, {"m": 1})
    assert set(dp.batch.keys()) == {"x"} and list(dp.non_tensor_batch) == ["o"] and dp.meta_info == {"m": 1}
    empty = DataProto()
    assert len(empty) == 0 and empty.batch is None and list(empty) == [] and len(empty.chunk(2)) == 2
    assert DataProto.from_dict(meta_info={"m": 1}).meta_info == {"m": 1}
    assert DataProto(None, None, None).meta_info == {}  # type: ignore[arg-type]


def test_single_rows() -> None:
    dp = zoo(4)
    for index in (2, -2, np.int64(2), torch.tensor(2)):
        item = dp[index]
        assert type(item) is DataProtoItem and item.batch["index"] == 2 and item.non_tensor_batch["ids"] == [2, 2]
        assert item.batch["jagged"].shape == (4, 2)
    assert [item.non_tensor_batch["text"] for item in dp] == [f"row {index}" for index in range(4)]
    assert DataProto.from_dict(non_tensors={"o": [[1], [2]]})[1].non_tensor_batch == {"o": [2]}


def test_bad_indices() -> None:
    dp = zoo(4)
    for outside in (4, -5, [0, 4], torch.tensor([-5])):
        with pytest.raises(IndexError, match="4 rows"):
            dp[outside]
    with pytest.raises(BatchMismatchError, match="3 entries.*4 rows"):
        dp[[True, False, True]]
    for bad in ("x", (1, 2), None, [0.5], torch.zeros(2, 2, dtype=torch.int64), True):
        with pytest.raises(UnsupportedTypeError):
            dp[bad]


def test_select_pop_and_rename() -> None:
    dp = zoo(3)
    some = dp.select(["index", "jagged"], ["ids"], ["step"])
    assert set(some.batch.keys()) == {"index", "jagged"} and list(some.non_tensor_batch) == ["ids"]
    assert some.meta_info == {"step": 3}
    assert len(dp.select(batch_keys=[], non_tensor_batch_keys=[], meta_info_keys=[])) == 3
    popped = dp.pop(["index"], ["ids", "ids"], ["step"])
    assert index_of(popped) == [0, 1, 2] and popped.meta_info == {"step": 3}
    assert "index" not in dp.batch.keys() and "ids" not in dp.non_tensor_batch and "step" not in dp.meta_info
    before = fingerprint(dp)
    for keys in ({"batch_keys": ["float", "no"]}, {"batch_keys": ["float"], "meta_info_keys": ["no"]}):
        with pytest.raises(KeyConflictError, match="no"):
            dp.pop(**keys)
        with pytest.raises(KeyConflictError, match="no"):
            dp.select(**keys)
    with pytest.raises(UnsupportedTypeError, match="'float'"):
        dp.select(batch_keys="float")  # type: ignore[arg-type]
    assert fingerprint(dp) == before
    with pytest.raises(KeyConflictError):
        DataProto.from_dict(non_tensors={"o": [1]}).pop(batch_keys=["x"])
    renamed = dp.rename(["float", "bool"], ["bool", "float"]).rename("text", "words")
    assert torch.equal(renamed.batch["float"], dp.batch["bool"]) and "words" in renamed.non_tensor_batch
    with pytest.raises(KeyConflictError, match="2 old and 1 new"):
        dp.rename(["float", "bool"], ["x"])
    with pytest.raises(KeyConflictError, match="'nothing'"):
        dp.rename("nothing", "x")
    with pytest.raises(KeyConflictError, match="two columns"):
        dp.rename("float", "bool")


def test_deepcopy_of_select_copies_elements() -> None:
    dp = zoo(2)
    dp.select(deepcopy=True).non_tensor_batch["ids"][0].append(9)
    assert dp.non_tensor_batch["ids"][0] == [0, 0]


# --- union -------------------------------------------------------------------------------------------------------


def test_union_accepts_equal_values_and_nans() -> None:
    dp = zoo(3)
    dp.non_tensor_batch["deep"] = np.fromiter([{"x": [float("nan")]}, np.array([np.nan]), None], object, 3)
    both = dp.union(copy.deepcopy(dp))
    assert_same_batch(both, dp)


def test_union_with_a_side_that_has_no_tensors() -> None:
    tensors, objects = DataProto.from_dict({"x": torch.zeros(2)}), DataProto.from_dict(non_tensors={"o": [1, 2]})
    for both in (tensors.union(objects), objects.union(tensors)):
        assert set(both.batch.keys()) == {"x"} and both.non_tensor_batch["o"].tolist() == [1, 2]
    assert tensors.union(DataProto(meta_info={"m": 1})).meta_info == {"m": 1}
    assert len(DataProto().union(tensors)) == 2


def test_union_names_sizes_and_keys() -> None:
    for left, right in [
        (DataProto.from_dict({"x": torch.zeros(2)}), DataProto.from_dict({"y": torch.zeros(3)})),
        (DataProto.from_dict({"x": torch.zeros(2)}), DataProto.from_dict(non_tensors={"o": [1, 2, 3]})),
        (DataProto.from_dict(non_tensors={"p": [1, 2]}), DataProto.from_dict(non_tensors={"o": [1, 2, 3]})),
    ]:
        with pytest.raises(BatchMismatchError, match="2.*3"):
            left.union(right)
    with pytest.raises(KeyConflictError, match="'x'"):
        DataProto.from_dict({"x": torch.zeros(2)}).union(DataProto.from_dict({"x": torch.ones(2)}))
    with pytest.raises(KeyConflictError, match="'o'"):
        union_numpy_dict({"o": np.array([1, 2])}, {"o": np.array([1, 3])})
    with pytest.raises(KeyConflictError, match="'m'.*1.*2"):
        DataProto(meta_info={"m": 1}).union(DataProto(meta_info={"m": 2}))
    with pytest.raises(BatchMismatchError, match=r"\(2,\).*\(3,\)"):
        union_tensor_dict(TensorDict({}, batch_size=[2]), TensorDict({}, batch_size=[3]))
    with pytest.raises(UnsupportedTypeError, match="dict"):
        zoo(1).union({})  # type: ignore[arg-type]


# --- joining -----------------------------------------------------------------------------------------------------


def test_concat_says_what_does_not_fit() -> None:
    x = DataProto.from_dict({"x": torch.zeros(2, 3)}, {"o": [1, 2]})
    with pytest.raises(BatchMismatchError, match="empty"):
        DataProto.concat([])
    with pytest.raises(UnsupportedTypeError, match="Element 1.*dict"):
        DataProto.concat([x, {}])  # type: ignore[list-item]
    with pytest.raises(KeyConflictError, match=r"batch 0 has \['x'\], batch 1 has \['y'\]"):
        DataProto.concat([x, DataProto.from_dict({"y": torch.zeros(2)}, {"o": [1, 2]})])
    with pytest.raises(KeyConflictError, match="non-tensor columns"):
        DataProto.concat([x, DataProto.from_dict({"x": torch.zeros(2, 3)})])
    with pytest.raises(KeyConflictError, match=r"\[1\] to join have no tensors"):
        DataProto.concat([x, DataProto.from_dict(non_tensors={"o": [1, 2]})])
    with pytest.raises(BatchMismatchError, match=r"'x'.*batch 0: \(3,\).*batch 1: \(4,\)"):
        DataProto.concat([x, DataProto.from_dict({"x": torch.zeros(2, 4)}, {"o": [1, 2]})])
    with pytest.raises(BatchMismatchError, match="'m'.*1-D object column"):
        DataProto.concat([DataProto(non_tensor_batch={"m": np.zeros((2, n))}) for n in (2, 3)])
    ragged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(BatchMismatchError):
        DataProto.concat([x, DataProto.from_dict({"x": ragged}, {"o": [1, 2]})])


def test_concat_keeps_the_subclass() -> None:
    class Mine(DataProto):
        pass

    dp = Mine.from_dict({"x": torch.zeros(2)})
    assert all(type(result) is Mine for result in [*dp.chunk(2), Mine.concat(dp.chunk(2)), dp[:1], dp.repeat(2)])


# --- repeating and folding ---------------------------------------------------------------------------------------


def test_repeats() -> None:
    dp = zoo(3)
    assert index_of(dp.repeat()) == [0, 0, 1, 1, 2, 2]
    assert index_of(dp.repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    repeated = dp.sample_level_repeat(torch.tensor([2, 0, 1]))
    assert index_of(repeated) == [0, 0, 2] and repeated.non_tensor_batch["matrix"].shape == (3, 2, 3)
    for form in ([2, 0, 1], (2, 0, 1), np.array([2, 0, 1])):
        assert index_of(dp.sample_level_repeat(form)) == [0, 0, 2]
    with pytest.raises(BatchMismatchError, match="2 counts.*3 rows"):
        dp.sample_level_repeat([1, 2])
    for bad in ([1, -1, 1], [0.5, 1, 1], [[1], [1], [1]]):
        with pytest.raises(UnsupportedTypeError):
            dp.sample_level_repeat(bad)
    for times in (-1, 1.5, None):
        with pytest.raises(ChunkError, match="repeat_times"):
            dp.repeat(times)  # type: ignore[arg-type]


def test_reorder_in_place() -> None:
    for order in ([2, 0, 1], np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        dp = zoo(3)
        assert dp.reorder(order) is None
        assert index_of(dp) == [2, 0, 1] and dp.non_tensor_batch["text"].tolist() == ["row 2", "row 0", "row 1"]


def test_unfold_column_chunks() -> None:
    dp = zoo(2)
    cut = dp.unfold_column_chunks(2, ["float", "matrix"])
    assert torch.equal(cut.batch["float"], dp.batch["float"].reshape(4, 2)) and index_of(cut) == [0, 0, 1, 1]
    assert cut.non_tensor_batch["matrix"].shape == (4, 1, 3) and cut.non_tensor_batch["text"][1] == "row 0"
    assert index_of(dp.unfold_column_chunks(3)) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ChunkError, match="'float'.*3 equal parts"):
        dp.unfold_column_chunks(3, ["float"])
    with pytest.raises(KeyConflictError, match="nothing"):
        dp.unfold_column_chunks(2, ["nothing"])
    lists = DataProto.from_dict(non_tensors={"o": [["a", "b"], ["c", "d"]], "p": [1, 2]})
    cut = lists.unfold_column_chunks(2, ["o"])
    assert cut.non_tensor_batch["o"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert cut.non_tensor_batch["p"].tolist() == [1, 1, 2, 2]
    for bad in ("o", "p"):
        with pytest.raises(ChunkError, match=f"Row 0 of column '{bad}'"):
            lists.unfold_column_chunks(3, [bad])
    only = DataProto.from_dict(non_tensors={"m": np.arange(8).reshape(2, 4)})
    assert only.unfold_column_chunks(2, ["m"]).non_tensor_batch["m"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_fold_and_unfold() -> None:
    dp = zoo(6, jagged=False)
    folded = fold_batch_dim(dp, 2)
    assert len(folded) == 2 and folded.batch["float"].shape == (2, 3, 4)
    assert folded.non_tensor_batch["ids"].shape == (2, 3)
    assert_same_batch(unfold_batch_dim(folded), dp)
    with pytest.raises(ChunkError, match="6 rows.*4"):
        fold_batch_dim(dp, 4)
    with pytest.raises(UnsupportedTypeError, match="nested"):
        fold_batch_dim(zoo(6), 2)
    with pytest.raises(BatchMismatchError, match="2 leading"):
        unfold_batch_dim(dp)
    with pytest.raises(BatchMismatchError, match="disagree"):
        unfold_batch_dim(DataProto.from_dict({"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)}))


# --- other forms -------------------------------------------------------------------------------------------------


def test_tensordict_and_back() -> None:
    dp = zoo(3)
    dp.meta_info["list"] = [1, 2]
    del dp.meta_info["nan"]
    td = dp.to_tensordict()
    assert isinstance(td, TensorDict) and td.batch_size == (3,)
    back = DataProto.from_tensordict(td, meta_info={"given": 1})
    assert set(back.batch.keys()) == set(dp.batch.keys()) and back.meta_info["given"] == 1
    assert back.meta_info["list"] == [1, 2] and back.meta_info["nested"] == dp.meta_info["nested"]
    assert back.non_tensor_batch["ids"].tolist() == [[0, 0], [1, 1], [2, 2]]
    nested = TensorDict({"a": {"b": torch.zeros(2)}, "w": NonTensorStack("x", "y"), "m": NonTensorData(5)}, [2])
    back = DataProto.from_tensordict(nested)
    assert back.batch["a", "b"].shape == (2,) and back.non_tensor_batch["w"].tolist() == ["x", "y"]
    assert back.meta_info == {"m": 5}
    with pytest.raises(KeyConflictError, match="'x'"):
        DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"x": 1}).to_tensordict()
    with pytest.raises(UnsupportedTypeError):
        DataProto.from_tensordict({"x": 1})  # type: ignore[arg-type]
    with pytest.raises(BatchMismatchError):
        DataProto.from_tensordict(TensorDict({}, batch_size=[]))
    assert len(DataProto.from_tensordict(TensorDict({"w": NonTensorStack("x", "y")}, [2]))) == 2
    assert len(DataProto.from_dict(non_tensors={"o": [1, 2]}).to_tensordict()) == 2


def test_nested_tensordicts_and_non_tensor_entries_in_batch() -> None:
    dp = DataProto(batch=TensorDict({"a": {"b": torch.arange(4)}, "w": NonTensorStack(*"abcd")}, [4]))
    joined = DataProto.concat(dp.chunk(3))
    assert joined.batch["a", "b"].tolist() == [0, 1, 2, 3] and list(joined.batch["w"]) == list("abcd")
    assert list(dp[[2, 0]].batch["w"]) == ["c", "a"]
    assert dp.select([("a", "b")]).batch["a", "b"].tolist() == [0, 1, 2, 3]


def test_eyes(capsys: pytest.CaptureFixture[str]) -> None:
    dp = zoo(3)
    text = dp.get_data_info()
    for part in ("float: (3, 4) (torch.float32) cpu", "jagged", "ids: ndarray(3,) (object)", "nested: dict[str: list["):
        assert part in text
    dp.print_size("here")
    assert capsys.readouterr().out.startswith("here, size of tensors: ")
    assert "3 rows" in repr(dp) and "jagged" in repr(dp)
    DataProto().print_size()
    assert DataProto().get_data_info() == "batch\nnon_tensor_batch\nmeta_info"


def test_unsendable_parts_are_named_before_anything_is_sent() -> None:
    dp = DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"deep": {"lock": threading.Lock()}})
    with pytest.raises(UnsupportedTypeError, match=r"\.meta_info\['deep'\]\['lock'\]"):
        pack(dp.chunk(2)[0])


@pytest.mark.parametrize("error", [BatchMismatchError, ChunkError, KeyConflictError, UnsupportedTypeError])
def test_errors_are_value_errors_too(error: type[Exception]) -> None:
    assert issubclass(error, DataProtoError) and issubclass(error, ValueError)
