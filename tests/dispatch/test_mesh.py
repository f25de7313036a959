"""Dispatch over meshes: who gets which chunk, whose result counts, and that rows come back in their order."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import distributed
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dask_controller.dispatch._batches import call_padding
from dask_controller.dispatch.mesh import (
    collect_lazy_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    make_nd_compute_dataproto_dispatch_fn,
)
from dask_controller.errors import BatchMismatchError, DispatchError, UnsupportedTypeError
from dask_controller.protocol.batching import Padding, RankOutputs
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.future import DataProtoFuture
from tests.dispatch.fake_group import FakeGroup, rows_asked


def batch(rows: int, auto_padding: bool = False) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)}, auto_padding=auto_padding)


def rows_of(data: Any) -> list[int]:
    values: list[int] = (data["x"] if isinstance(data, TensorDict) else data.batch["x"]).tolist()
    return values


def outputs_of(chunks: Sequence[Any], mask: Sequence[bool]) -> RankOutputs:
    """What a group hands to a collect function when each rank returns its chunk."""
    kept = [chunk if keep else None for chunk, keep in zip(chunks, mask, strict=True)]
    return RankOutputs(kept, call_padding([chunks], {}))


# ---- explicit mapping and mask ---------------------------------------------------------------------------------------


def test_peers_get_the_same_object() -> None:
    first, second = object(), object()
    args, kwargs = dispatch_nd_compute([0, 0, 1, 1], 2, FakeGroup(4), [first, second], x=(second, first))
    assert [value is first for value in args[0]] == [True, True, False, False]
    assert [value is second for value in kwargs["x"]] == [True, True, False, False]


def test_nd_dataproto_cuts_once_per_index() -> None:
    data = batch(4)
    args, kwargs = dispatch_nd_compute_dataproto([0, 1, 0, 1], 2, FakeGroup(4), data, ref=data)
    assert [rows_of(chunk) for chunk in args[0]] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert args[0][0] is args[0][2]
    assert args[0][1] is args[0][3]
    assert kwargs["ref"][0] is kwargs["ref"][2]
    assert len({id(chunk) for chunk in args[0]}) == 2


@pytest.mark.parametrize(
    ("mapping", "dp_size", "message"),
    [
        ([0, 1], 2, r"has 2 entries: \[0, 1\]. Expected the data-parallel index of each of the 4 ranks"),
        ([0, 0, 1, 2], 2, "gives rank 3 the data-parallel index 2. Expected an integer below dp_size=2"),
        ([0, 0, 1, -1], 2, "gives rank 3 the data-parallel index -1"),
        ([0, 0, 1, "1"], 2, "gives rank 3 the data-parallel index '1'"),
        ([0, 0, 1, None], 2, "gives rank 3 the data-parallel index None"),
        ([0, 0, 2, 2], 3, r"no rank has the data-parallel index 1, so its rows would get lost. Expected all of 0 to 2"),
        ([0, 0, 0, 0], 2, "no rank has the data-parallel index 1"),
    ],
)
def test_bad_mapping(mapping: Any, dp_size: int, message: str) -> None:
    for function, value in ((dispatch_nd_compute, [1] * dp_size), (dispatch_nd_compute_dataproto, batch(6))):
        with pytest.raises(DispatchError, match=message) as info:
            function(mapping, dp_size, FakeGroup(4), value)
        assert "No rank was called" in str(info.value)


def test_numpy_integers_are_indices() -> None:
    args, _ = dispatch_nd_compute(np.array([1, 0]), np.int64(2), FakeGroup(2), ["a", "b"])  # type: ignore[arg-type]
    assert args == (["b", "a"],)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2, 3], "argument 1 has 3 elements. Expected one per data-parallel index, 2 in all"),
        (3, "argument 1 is a int. Expected a list or tuple with one element per data-parallel index"),
    ],
)
def test_nd_compute_checks_its_arguments(value: Any, message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        dispatch_nd_compute([0, 0, 1, 1], 2, FakeGroup(4), value)


def test_nd_dataproto_uneven_names_the_groups_of_ranks() -> None:
    with pytest.raises(DispatchError, match="has 5 rows, which 2 data-parallel groups of ranks cannot share evenly"):
        dispatch_nd_compute_dataproto([0, 0, 1, 1], 2, FakeGroup(4), batch(5))
    # Four rows would not divide among three ranks, but they do between two indices.
    args, _ = dispatch_nd_compute_dataproto([0, 1, 1], 2, FakeGroup(3), batch(4))
    assert [rows_of(chunk) for chunk in args[0]] == [[0, 1], [2, 3], [2, 3]]


def test_collect_nd_compute() -> None:
    group = FakeGroup(4)
    assert collect_nd_compute([True, False, True, False], group, ["a", None, "c", None]) == ["a", "c"]
    assert collect_nd_compute(collect_mask=[True] * 4, worker_group=group, output=list("abcd")) == list("abcd")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True, False], r"has 2 entries: \[True, False\]. Expected True or False for each of the 4 ranks"),
        ([True, None, True, True], "has None for rank 1"),
        ([True, 2, True, True], "has 2 for rank 1"),
        ([False] * 4, "collects no rank.*is_collect=True"),
    ],
)
def test_bad_mask(mask: Any, message: str) -> None:
    for function in (collect_nd_compute, collect_nd_compute_dataproto):
        with pytest.raises(DispatchError, match=message):
            function(mask, FakeGroup(4), [batch(1)] * 4)


def test_wrong_number_of_results() -> None:
    with pytest.raises(BatchMismatchError, match="2 results came back. Expected one per rank, 4 in all"):
        collect_nd_compute([True] * 4, FakeGroup(4), ["a", "b"])


def test_collect_joins_the_ranks_of_the_mask_only() -> None:
    group, mask = FakeGroup(4), [False, True, False, True]
    [chunks], _ = dispatch_nd_compute_dataproto([0, 0, 1, 1], 2, group, batch(4))
    assert rows_of(collect_nd_compute_dataproto(mask, group, outputs_of(chunks, mask))) == [0, 1, 2, 3]
    assert rows_of(collect_nd_compute_dataproto(mask, group, [None, batch(2), None, batch(1)])) == [0, 1, 0]


def test_explicit_pair_pads_and_keeps_the_order_of_the_rows() -> None:
    """Rank 0 holds the last chunk here: order and padding must follow the chunks, not the ranks."""
    group, mapping, mask = FakeGroup(4), [1, 0, 1, 0], [True, True, False, False]
    [chunks], _ = dispatch_nd_compute_dataproto(mapping, 2, group, batch(5, auto_padding=True))
    assert [rows_of(chunk) for chunk in chunks] == [[3, 4, 4], [0, 1, 2], [3, 4, 4], [0, 1, 2]]
    assert rows_of(collect_nd_compute_dataproto(mask, group, outputs_of(chunks, mask))) == [0, 1, 2, 3, 4]


def test_padding_of_another_dispatch_function_goes_by_rank() -> None:
    group, mask = FakeGroup(4), [True, False, False, True]
    padding = Padding()
    padding.set(5, 4)  # one chunk per rank: 2, 2, 1 and 0 real rows
    outputs = RankOutputs([batch(2), None, None, batch(2)], padding)
    assert rows_of(collect_nd_compute_dataproto(mask, group, outputs)) == [0, 1]


def test_error_names_the_rank_of_the_group() -> None:
    mask = [False, True, False, True]
    with pytest.raises(UnsupportedTypeError, match="got DataProto from rank 1; NoneType from rank 3"):
        collect_nd_compute_dataproto(mask, FakeGroup(4), [None, batch(1), None, None])
    with pytest.raises(UnsupportedTypeError, match=r"All collected ranks \(1, 3\) returned None"):
        collect_nd_compute_dataproto(mask, FakeGroup(4), [None] * 4)


# ---- mapping and mask from the ranks ---------------------------------------------------------------------------------


def test_lazy_asks_once_per_mesh() -> None:
    group = FakeGroup(4, [0, 0, 1, 1], [True, False, True, False])
    for _ in range(3):
        [chunks], _ = dispatch_lazy_compute_data_proto("train", group, batch(4))
        back = collect_lazy_compute_data_proto("train", group, outputs_of(chunks, group.mask))
        assert rows_of(back) == [0, 1, 2, 3]
    assert group.asked == [("dispatch", "train"), ("collect", "train")]
    assert group._dispatch_info == {"train": [0, 0, 1, 1]}
    assert group._collect_info == {"train": [True, False, True, False]}
    dispatch_lazy_compute_data_proto("infer", group, batch(4))
    assert group.asked[2:] == [("dispatch", "infer")]


def test_lazy_takes_what_the_program_has_put_there() -> None:
    group = FakeGroup(2)
    group._dispatch_info["train"] = [1, 0]
    group._collect_info["train"] = [True, True]
    [chunks], _ = dispatch_lazy_compute_data_proto("train", group, batch(2))
    assert [rows_of(chunk) for chunk in chunks] == [[1], [0]]
    assert rows_of(collect_lazy_compute_data_proto("train", group, outputs_of(chunks, [True, True]))) == [0, 1]
    assert group.asked == []


def test_lazy_collect_alone_asks_for_the_order_itself() -> None:
    group = FakeGroup(2, [1, 0], [True, True])
    assert rows_of(collect_lazy_compute_data_proto("train", group, [batch(1), batch(2)])) == [0, 1, 0]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([0, 1], "dp_rank_mapping of mesh 'train' has 2 entries"),
        ([0, 0, 2, 2], "dp_rank_mapping of mesh 'train' is .*no rank has the data-parallel index 1"),
        (
            [0, 0, 1, None],
            "of mesh 'train' gives rank 3 the data-parallel index None. Expected an integer of 0 or more",
        ),
        ([True, False, True, True], "of mesh 'train' gives rank 0 the data-parallel index True"),
    ],
)
def test_bad_answers_are_not_kept(mapping: Any, message: str) -> None:
    group = FakeGroup(4, mapping, [True])
    for _ in range(2):
        with pytest.raises(DispatchError, match=message):
            dispatch_lazy_compute_data_proto("train", group, batch(4))
    assert group._dispatch_info == {}
    with pytest.raises(DispatchError, match="collect_mask of mesh 'train' has 1 entries"):
        collect_lazy_compute_data_proto("train", group, [batch(1)] * 4)
    assert group._collect_info == {}


def test_two_collected_ranks_of_one_index_give_their_rows_twice() -> None:
    group = FakeGroup(4, [1, 0, 1, 0], [True, True, True, False])
    [chunks], _ = dispatch_lazy_compute_data_proto("train", group, batch(3, auto_padding=True))
    back = collect_lazy_compute_data_proto("train", group, outputs_of(chunks, group.mask))
    assert rows_of(back) == [0, 1, 2, 2], "the padding of both is gone"


def test_one_index_may_stay_uncollected() -> None:
    group = FakeGroup(2, [1, 0], [True, False])
    [chunks], _ = dispatch_lazy_compute_data_proto("train", group, batch(3, auto_padding=True))
    assert rows_of(collect_lazy_compute_data_proto("train", group, outputs_of(chunks, group.mask))) == [2]


def test_tensordict(padding_on: None) -> None:
    group = FakeGroup(4, [0, 0, 1, 1], [True, False, True, False])
    [chunks], _ = dispatch_lazy_compute_data_proto("train", group, TensorDict({"x": torch.arange(3)}, [3]))
    back = collect_lazy_compute_data_proto("train", group, outputs_of(chunks, group.mask))
    assert isinstance(back, TensorDict)
    assert rows_of(back) == [0, 1, 2]


def test_futures_in_and_out() -> None:
    group = FakeGroup(4, [1, 1, 0, 0], [True, False, True, False])
    [chunks], _ = dispatch_lazy_compute_data_proto("train", group, DataProtoFuture([distributed.Future("in")]))
    assert chunks[0] is chunks[1]
    assert chunks[2] is chunks[3]
    results = [distributed.Future(f"out {rank}") for rank in range(4)]
    kept = [result if keep else None for result, keep in zip(results, group.mask, strict=True)]
    joined = collect_lazy_compute_data_proto("train", group, RankOutputs(kept, chunks.padding))
    assert [future.key for future in joined.futures] == ["out 2", "out 0"], "in the order of the chunks"
    # The rows become known after the result was made.
    chunks.padding.set(3, 2)
    assert rows_asked(joined, {"out 2": 2, "out 0": 2}) == [2, 1]


# ---- as a dispatch mode ----------------------------------------------------------------------------------------------


def test_the_mode_of_a_mesh() -> None:
    group = FakeGroup(4, [0, 0, 1, 1], [False, True, False, True])
    mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="train")
    assert set(mode) == {"dispatch_fn", "collect_fn"}
    collect_fn: Any = mode["collect_fn"]
    mask = collect_fn.collect_mask(group)
    assert mask == [False, True, False, True]
    mask[0] = True
    assert collect_fn.collect_mask(group) == [False, True, False, True]

    [], kwargs = mode["dispatch_fn"](group, data=batch(3, auto_padding=True), mesh_name=batch(3))
    assert list(kwargs) == ["data", "mesh_name"], "a method may name its arguments as it likes"
    back = collect_fn(group, outputs_of(kwargs["data"], collect_fn.collect_mask(group)))
    assert rows_of(back) == [0, 1, 2]
    assert group.asked == [("collect", "train"), ("dispatch", "train")]


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_the_mode_pickles_by_reference(pickler: Any) -> None:
    mode = make_nd_compute_dataproto_dispatch_fn("train")
    stream = pickler.dumps(mode)
    assert pickler.loads(stream) == mode
    assert b"train" in stream
    assert len(stream) < 300
    assert "train" in repr(mode)
    assert make_nd_compute_dataproto_dispatch_fn("infer") != mode


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_mesh_needs_a_name(name: Any) -> None:
    with pytest.raises(DispatchError, match="Expected the name of a mesh"):
        make_nd_compute_dataproto_dispatch_fn(name)


# ---- properties ------------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    """A mapping in any order, and a mask with exactly one rank per index."""
    dp_size = draw(st.integers(1, 5))
    peers = draw(st.integers(1, 3))
    mapping = draw(st.permutations([index for index in range(dp_size) for _ in range(peers)]))
    collected = [draw(st.sampled_from([r for r, d in enumerate(mapping) if d == index])) for index in range(dp_size)]
    return mapping, [rank in collected for rank in range(len(mapping))]


@settings(max_examples=80, deadline=None)
@given(mesh=meshes(), rows=st.integers(0, 23), explicit=st.booleans())
def test_collect_undoes_dispatch(mesh: tuple[list[int], list[bool]], rows: int, explicit: bool) -> None:
    mapping, mask = mesh
    group, data = FakeGroup(len(mapping), mapping, mask), batch(rows, auto_padding=True)
    dp_size = max(mapping) + 1
    if explicit:
        [chunks], _ = dispatch_nd_compute_dataproto(mapping, dp_size, group, data)
        back = collect_nd_compute_dataproto(mask, group, outputs_of(chunks, mask))
    else:
        [chunks], _ = dispatch_lazy_compute_data_proto("m", group, data)
        back = collect_lazy_compute_data_proto("m", group, outputs_of(chunks, mask))
    assert rows_of(back) == list(range(rows))
    assert len({id(chunk) for chunk in chunks}) == dp_size
    assert {len(chunk) for chunk in chunks} == {-(-rows // dp_size)}
    assert len(data) == rows
