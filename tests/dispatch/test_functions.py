"""The built-in modes on a group without a cluster: what each rank would get, and what the caller gets back."""

from __future__ import annotations

import pickle
from typing import Any

import distributed
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dask_controller.dispatch import functions
from dask_controller.dispatch._batches import PaddingView, call_padding
from dask_controller.dispatch.functions import (
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_rank_zero,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    dispatch_rank_zero,
    refuse_direct_rollout,
)
from dask_controller.errors import BatchMismatchError, DispatchError, UnsupportedTypeError
from dask_controller.protocol.batching import Padding, PerRank, RankOutputs
from dask_controller.protocol.config import DataProtoConfig
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.future import DataProtoFuture
from tests.dispatch.fake_group import FakeGroup, rows_asked


def batch(rows: int, start: int = 0, auto_padding: bool = False) -> DataProto:
    numbers = range(start, start + rows)
    return DataProto.from_dict(
        tensors={"x": torch.arange(start, start + rows)},
        non_tensors={"id": np.array([f"row {i}" for i in numbers], dtype=object)},
        meta_info={"step": 7},
        auto_padding=auto_padding,
    )


def rows_of(data: Any) -> list[int]:
    column = data["x"] if isinstance(data, TensorDict) else data.batch["x"]
    values: list[int] = column.tolist()
    if isinstance(data, DataProto) and "id" in data.non_tensor_batch:
        assert list(data.non_tensor_batch["id"]) == [f"row {i}" for i in values], "columns stay together"
    return values


def late(*keys: str) -> DataProtoFuture:
    return DataProtoFuture.from_futures([distributed.Future(key) for key in keys])


# ---- one to all, all to all, rank zero -------------------------------------------------------------------------------


def test_one_to_all_gives_every_rank_the_same_object() -> None:
    first, second = object(), {"k": [1]}
    args, kwargs = dispatch_one_to_all(FakeGroup(3), first, x=second)
    assert [len(arg) for arg in args] == [3]
    assert all(value is first for value in args[0])
    assert list(kwargs) == ["x"]
    assert all(value is second for value in kwargs["x"])
    assert isinstance(args[0], PerRank)
    assert args[0].padding is None
    assert dispatch_one_to_all(FakeGroup(3)) == ((), {})


def test_all_to_all_passes_through() -> None:
    value = [1, 2, 3]
    args, kwargs = dispatch_all_to_all(FakeGroup(2), value, x=value)
    assert args[0] is value
    assert kwargs["x"] is value
    assert collect_all_to_all(FakeGroup(2), [4, 5]) == [4, 5]


def test_rank_zero() -> None:
    group, value = FakeGroup(3), object()
    args, kwargs = dispatch_rank_zero(group, value, x=value)
    assert args == ([value, None, None],)
    assert kwargs == {"x": [value, None, None]}
    assert collect_rank_zero(group, RankOutputs(["result", None, None])) == "result"
    assert collect_rank_zero(group, ["result"]) == "result"
    assert collect_rank_zero.collect_mask(group) == [True, False, False]  # type: ignore[attr-defined]
    with pytest.raises(BatchMismatchError, match="2 results came back. Expected one per rank, 3"):
        collect_rank_zero(group, [1, 2])


@pytest.mark.parametrize("function", [dispatch_one_to_all, dispatch_all_to_all, dispatch_rank_zero])
def test_a_keyword_may_be_called_worker_group(function: Any) -> None:
    _, kwargs = function(FakeGroup(2), worker_group=1)
    assert list(kwargs) == ["worker_group"]


def test_direct_rollout_refuses() -> None:
    with pytest.raises(NotImplementedError, match="called directly on the rank.*never through the group"):
        refuse_direct_rollout(FakeGroup(2), 1, x=2)
    with pytest.raises(NotImplementedError, match="DIRECT_ROLLOUT_METHOD"):
        refuse_direct_rollout(FakeGroup(2), [None, None])


# ---- DP_COMPUTE ------------------------------------------------------------------------------------------------------


def test_dp_compute_takes_lists_and_tuples() -> None:
    given_list, given_tuple = [1, 2], ("a", "b")
    args, kwargs = dispatch_dp_compute(FakeGroup(2), given_list, x=given_tuple)
    assert args == ([1, 2],)
    assert kwargs == {"x": ["a", "b"]}
    args[0].append(3)
    assert given_list == [1, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([1, 2], [1, 2, 3]), {}, "argument 2 has 3 elements. Expected one per rank, 2 in all"),
        (([1, 2],), {"x": ()}, "argument 'x' has 0 elements. Expected one per rank, 2 in all"),
        ((5,), {}, "argument 1 is a int. Expected a list or tuple with one element per rank, 2 in all"),
        ((), {"x": "ab"}, "argument 'x' is a str"),
        ((torch.arange(2),), {}, "argument 1 is a Tensor"),
        ((batch(2),), {}, "argument 1 is a DataProto.*Dispatch.DP_COMPUTE_PROTO splits batches"),
    ],
)
def test_dp_compute_refuses(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(DispatchError, match=message) as info:
        dispatch_dp_compute(FakeGroup(2), *args, **kwargs)
    assert "No rank was called" in str(info.value)


def test_collect_dp_compute_checks_the_length() -> None:
    assert collect_dp_compute(FakeGroup(2), [1, None]) == [1, None]
    with pytest.raises(BatchMismatchError, match="1 results came back. Expected one per rank, 2 in all"):
        collect_dp_compute(FakeGroup(2), [1])


# ---- DP_COMPUTE_PROTO: splitting -------------------------------------------------------------------------------------


def test_splits_in_rank_order() -> None:
    args, kwargs = dispatch_dp_compute_data_proto(FakeGroup(2), batch(4), ref=batch(4, 10))
    assert [rows_of(chunk) for chunk in args[0]] == [[0, 1], [2, 3]]
    assert [rows_of(chunk) for chunk in kwargs["ref"]] == [[10, 11], [12, 13]]
    assert [chunk.meta_info["step"] for chunk in args[0]] == [7, 7]
    assert args[0].padding is kwargs["ref"].padding, "one cut for the whole call"
    assert args[0].padding.is_trivial
    assert call_padding(args, kwargs) is args[0].padding


def test_tensordict() -> None:
    data = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(2), data)
    assert [rows_of(chunk) for chunk in chunks] == [[0, 1], [2, 3]]
    assert all(isinstance(chunk, TensorDict) for chunk in chunks)
    assert rows_of(collect_dp_compute_data_proto(FakeGroup(2), list(chunks))) == [0, 1, 2, 3]


def test_no_argument_is_allowed() -> None:
    args, kwargs = dispatch_dp_compute_data_proto(FakeGroup(3))
    assert (list(args), kwargs) == ([], {})
    assert call_padding(args, kwargs) is None


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
def test_uneven_with_padding_on(rows: int, padding_on: None) -> None:
    data = batch(rows)
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(4), data)
    assert len(data) == rows
    assert rows_of(data) == list(range(rows))
    sizes = [len(chunk) for chunk in chunks]
    assert set(sizes) == {-(-rows // 4)}, "equal, and none empty"
    flat = [row for chunk in chunks for row in rows_of(chunk)]
    assert flat[:rows] == list(range(rows))
    assert set(flat[rows:]) <= {rows - 1}
    back = collect_dp_compute_data_proto(FakeGroup(4), RankOutputs(chunks, chunks.padding))
    assert rows_of(back) == list(range(rows))
    assert back.meta_info["step"] == 7


@pytest.mark.parametrize("switch", ["config", "environment", "batch"])
def test_each_switch_turns_padding_on(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if switch == "config":
        DataProtoConfig.auto_padding = True
    elif switch == "environment":
        monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    # One batch that asks for it takes the others of the call along.
    args, kwargs = dispatch_dp_compute_data_proto(
        FakeGroup(2), batch(3), TensorDict({"x": torch.arange(3)}, [3]), x=batch(3, auto_padding=switch == "batch")
    )
    assert [rows_of(chunk) for chunk in args[0]] == [[0, 1], [2, 2]]
    assert [rows_of(chunk) for chunk in args[1]] == [[0, 1], [2, 2]]
    assert [rows_of(chunk) for chunk in kwargs["x"]] == [[0, 1], [2, 2]]


def test_empty_batch(padding_on: None) -> None:
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(3), batch(0))
    assert [len(chunk) for chunk in chunks] == [0, 0, 0]
    assert all(chunk.batch["x"].dtype == torch.int64 for chunk in chunks)
    back = collect_dp_compute_data_proto(FakeGroup(3), RankOutputs(chunks, chunks.padding))
    assert len(back) == 0
    assert back.batch["x"].dtype == torch.int64


@pytest.mark.parametrize("rows", [10, 2, 1])
def test_uneven_with_padding_off_names_everything(rows: int) -> None:
    with pytest.raises(DispatchError) as info:
        dispatch_dp_compute_data_proto(FakeGroup(4), data=batch(rows))
    text = str(info.value)
    for part in (
        f"argument 'data' (DataProto) has {rows} rows",
        "4 ranks",
        "Expected a multiple of 4",
        "DataProtoConfig.auto_padding = True",
        "VERL_AUTO_PADDING=1",
        "pad_dataproto_to_divisor(data, 4)",
        "data[:8]" if rows == 10 else "send more rows",
        "No rank was called",
    ):
        assert part in text


@pytest.mark.parametrize("auto_padding", [False, True])
def test_lengths_that_differ(auto_padding: bool) -> None:
    with pytest.raises(DispatchError) as info:
        dispatch_dp_compute_data_proto(
            FakeGroup(2), batch(4, auto_padding=auto_padding), ref=TensorDict({"x": torch.arange(6)}, [6])
        )
    text = str(info.value)
    assert "argument 1 (DataProto) has 4 rows" in text
    assert "argument 'ref' (TensorDict) has 6" in text


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((batch(2), 0.5), {}, r"argument 2 is a float, which cannot be split.*meta_info.*ONE_TO_ALL"),
        ((batch(2),), {"lr": None}, "argument 'lr' is a NoneType, which cannot be split"),
        (([batch(1), batch(1)],), {}, r"argument 1 is a list.*Dispatch\.DP_COMPUTE\."),
        ((torch.arange(4),), {}, "argument 1 is a Tensor"),
        ((TensorDict({}, []),), {}, "argument 1 is a TensorDict with an empty batch_size"),
    ],
)
def test_what_cannot_be_split(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(DispatchError, match=message) as info:
        dispatch_dp_compute_data_proto(FakeGroup(2), *args, **kwargs)
    assert "No rank was called" in str(info.value)


def test_meta_info_alone_goes_to_every_rank() -> None:
    args, kwargs = dispatch_dp_compute_data_proto(FakeGroup(2), DataProto(meta_info={"lr": 1.0}), data=batch(4))
    assert [chunk.meta_info for chunk in args[0]] == [{"lr": 1.0}, {"lr": 1.0}]
    assert args[0][0].meta_info is not args[0][1].meta_info
    assert [rows_of(chunk) for chunk in kwargs["data"]] == [[0, 1], [2, 3]]
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(3), DataProto(meta_info={"lr": 1.0}))
    assert chunks.padding.is_trivial
    back = collect_dp_compute_data_proto(FakeGroup(3), RankOutputs([batch(1)] * 3, chunks.padding))
    assert rows_of(back) == [0, 0, 0], "a result has rows of its own where the argument had none"


def test_jagged_columns_are_padded(padding_on: None) -> None:
    parts = [torch.arange(n) for n in (2, 3, 1)]
    data = TensorDict({"x": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}, [3])
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(2), data)
    assert [[row.tolist() for row in chunk["x"].unbind()] for chunk in chunks] == [[[0, 1], [0, 1, 2]], [[0], [0]]]
    assert {chunk["x"].layout for chunk in chunks} == {torch.jagged}
    back = collect_dp_compute_data_proto(FakeGroup(2), RankOutputs(chunks, chunks.padding))
    assert [row.tolist() for row in back["x"].unbind()] == [part.tolist() for part in parts]


# ---- DP_COMPUTE_PROTO: futures ---------------------------------------------------------------------------------------


def test_futures_are_cut_without_their_lengths() -> None:
    args, kwargs = dispatch_dp_compute_data_proto(FakeGroup(2), late("a", "b"), x=distributed.Future("c"))
    assert len(args[0]) == len(kwargs["x"]) == 2
    assert all(isinstance(chunk, DataProtoFuture) for chunk in (*args[0], *kwargs["x"]))
    assert [future.key for future in kwargs["x"][0].futures] == ["c"]
    padding = call_padding(args, kwargs)
    assert padding is args[0].padding is kwargs["x"].padding
    assert padding is not None
    assert not padding.known


def test_a_batch_at_hand_decides_the_cut_of_a_future() -> None:
    args, _ = dispatch_dp_compute_data_proto(FakeGroup(2), late("a"), batch(3, auto_padding=True))
    padding = call_padding(args, {})
    assert padding == Padding((2, 1), (2, 2))
    assert [sum(rows_asked(chunk, {"a": 3})) for chunk in args[0]] == [2, 2], "padded as its companion is"


def test_results_that_are_futures_lose_their_padding_late() -> None:
    group, padding = FakeGroup(2), Padding()
    joined = collect_dp_compute_data_proto(
        group, RankOutputs([distributed.Future("a"), distributed.Future("b")], padding)
    )
    assert isinstance(joined, DataProtoFuture)
    assert [future.key for future in joined.futures] == ["a", "b"]
    padding.set(3, 2)
    assert rows_asked(joined, {"a": 2, "b": 2}) == [2, 1]

    per_rank = collect_dp_compute_data_proto(group, RankOutputs([late("a"), late("b")], padding))
    assert rows_asked(per_rank, {"a": 2, "b": 2}) == [2, 1]


@pytest.mark.parametrize("padding", [None, Padding((2, 2), (2, 2))])
def test_results_that_are_futures_without_padding(padding: Padding | None) -> None:
    joined = collect_dp_compute_data_proto(FakeGroup(2), RankOutputs([late("a"), late("b")], padding))
    assert rows_asked(joined, {"a": 5, "b": 1}) == [5, 1]


# ---- DP_COMPUTE_PROTO: joining ---------------------------------------------------------------------------------------


def test_joins_a_plain_list_in_rank_order() -> None:
    back = collect_dp_compute_data_proto(FakeGroup(2), [batch(2), batch(1, 5)])
    assert rows_of(back) == [0, 1, 5]


def test_several_result_rows_per_input_row(padding_on: None) -> None:
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(2), batch(3))
    outputs = RankOutputs([chunk.repeat(2, interleave=True) for chunk in chunks], chunks.padding)
    assert rows_of(collect_dp_compute_data_proto(FakeGroup(2), outputs)) == [0, 0, 1, 1, 2, 2]


def test_results_of_meta_info_alone(padding_on: None) -> None:
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(2), batch(3))
    outputs = [DataProto(meta_info={"metrics": {"loss": float(rank)}}) for rank in range(2)]
    back = collect_dp_compute_data_proto(FakeGroup(2), RankOutputs(outputs, chunks.padding))
    assert len(back) == 0
    assert back.meta_info["metrics"] == {"loss": [0.0, 1.0]}


def test_padding_that_cannot_be_told_apart(padding_on: None) -> None:
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(2), batch(3))
    outputs = RankOutputs([chunk[:1] for chunk in chunks], chunks.padding)
    with pytest.raises(BatchMismatchError, match="Padding cannot be removed"):
        collect_dp_compute_data_proto(FakeGroup(2), outputs)


def test_uneven_results_are_welcome_where_nothing_was_padded() -> None:
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(2), batch(4))
    outputs = RankOutputs([chunks[0][:0], chunks[1]], chunks.padding)
    assert rows_of(collect_dp_compute_data_proto(FakeGroup(2), outputs)) == [2, 3]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([None, None], r"All collected ranks \(0, 1\) returned None.*`return` missing.*DP_COMPUTE_METRIC"),
        ([batch(1), None], "got DataProto from rank 0; NoneType from rank 1. Expected a DataProto from every rank"),
        ([3.0, 4.0], "got float from ranks 0, 1"),
        ([batch(1), TensorDict({"x": torch.arange(1)}, [1])], "DataProto from rank 0; TensorDict from rank 1"),
    ],
)
def test_results_that_cannot_be_joined(outputs: list[Any], message: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=message):
        collect_dp_compute_data_proto(FakeGroup(2), RankOutputs(outputs))


def test_wrong_number_of_results() -> None:
    with pytest.raises(BatchMismatchError, match="3 results came back. Expected one per rank, 2 in all"):
        collect_dp_compute_data_proto(FakeGroup(2), [batch(1)] * 3)


def test_collecting_leaves_the_results_as_they_are(padding_on: None) -> None:
    [chunks], _ = dispatch_dp_compute_data_proto(FakeGroup(4), batch(5))
    outputs = RankOutputs(chunks, chunks.padding)
    before = [rows_of(output) for output in outputs]
    collect_dp_compute_data_proto(FakeGroup(4), outputs)
    assert [rows_of(output) for output in outputs] == before


# ---- with a function -------------------------------------------------------------------------------------------------


def test_function_goes_to_all_ranks(padding_on: None) -> None:
    args, kwargs = dispatch_dp_compute_data_proto_with_func(FakeGroup(2), len, batch(3), x=batch(3, 10))
    assert args[0] == [len, len]
    assert [rows_of(chunk) for chunk in args[1]] == [[0, 1], [2, 2]]
    assert [rows_of(chunk) for chunk in kwargs["x"]] == [[10, 11], [12, 12]]
    padding = call_padding(args, kwargs)
    assert padding == Padding((2, 1), (2, 2))
    assert rows_of(collect_dp_compute_data_proto(FakeGroup(2), RankOutputs(args[1], padding))) == [0, 1, 2]


def test_function_by_keyword() -> None:
    args, kwargs = dispatch_dp_compute_data_proto_with_func(FakeGroup(2), func=len, data=batch(2))
    assert list(args) == []
    assert list(kwargs) == ["func", "data"]
    assert kwargs["func"] == [len, len]
    assert [rows_of(chunk) for chunk in kwargs["data"]] == [[0], [1]]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((batch(2),), {}, "argument 1 is a DataProto. Expected a function"),
        ((batch(2),), {"func": len}, "argument 1 is a DataProto. Expected a function"),
        ((), {}, "names no single function to run.*got none"),
        ((), {"f": len, "g": max}, "exactly one among the keyword arguments; got 'f', 'g'"),
        ((len, 3), {}, "argument 2 is a int, which cannot be split"),
        ((len, batch(3)), {}, r"argument 2 \(DataProto\) has 3 rows"),
    ],
)
def test_with_function_refuses(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        dispatch_dp_compute_data_proto_with_func(FakeGroup(2), *args, **kwargs)


# ---- properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), ranks=st.integers(1, 9), factor=st.integers(1, 3), as_tensordict=st.booleans())
def test_collect_undoes_dispatch(rows: int, ranks: int, factor: int, as_tensordict: bool) -> None:
    group = FakeGroup(ranks)
    data = batch(rows, auto_padding=True)
    value = TensorDict({"x": data.batch["x"]}, [rows]) if as_tensordict else data
    # A TensorDict has no switch of its own: its companion speaks for the call.
    [chunks, _], kwargs = dispatch_dp_compute_data_proto(group, value, data, keyword=data)
    assert {len(chunk) for chunk in kwargs["keyword"]} == {-(-rows // ranks)}
    assert len(chunks) == ranks
    if not as_tensordict:
        chunks = PerRank([chunk.repeat(factor) for chunk in chunks], chunks.padding)
        expected = [row for row in range(rows) for _ in range(factor)]
    else:
        expected = list(range(rows))
    back = collect_dp_compute_data_proto(group, RankOutputs(chunks, chunks.padding))
    assert rows_of(back) == expected
    assert rows_of(data) == list(range(rows))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_view_follows_its_cut(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 6))
    rows = data.draw(st.integers(0, 20))
    order = data.draw(st.lists(st.integers(0, chunks - 1), max_size=8))
    cut = Padding()
    view = PaddingView(cut, order)
    assert (view.known, view.real, view.padded) == (False, None, None)
    cut.set(rows, chunks)
    assert cut.real is not None
    assert cut.padded is not None
    assert view == Padding(tuple(cut.real[i] for i in order), tuple(cut.padded[i] for i in order))
    again = pickle.loads(pickle.dumps(view))
    assert again == view
    assert view.kept(list(view.padded or ())) == list(view.real or ())


def test_every_function_is_public() -> None:
    for name in functions.__all__:
        assert getattr(functions, name).__module__ == functions.__name__
        assert getattr(functions, name).__doc__
