"""What a group offers for the methods of its class: every mode, every way to call, positional and by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Future, LocalCluster
from tensordict import TensorDict

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Execute,
    Worker,
    collect_all_to_all,
    dispatch_one_to_all,
    errors,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)

#: Nothing in these tests takes long; a wait that lasts this long hangs.
LIMIT_S = 30.0


def make_group(client: Client, cls: type, ranks: int = 4, *args: Any, **kwargs: Any) -> DaskWorkerGroup:
    pool = DaskResourcePool([ranks], use_gpu=False)
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(cls, *args, **kwargs), client=client)


def numbers(rows: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)}, non_tensors={"id": [f"row {i}" for i in range(rows)]})


def pairs_for_all(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """A dispatch function of a user: two values, dealt out in turn."""

    def deal(pair: Any) -> list[Any]:
        return [pair[rank % 2] for rank in range(worker_group.world_size)]

    return [deal(pair) for pair in args], {name: deal(pair) for name, pair in kwargs.items()}


def total(worker_group: Any, output: Any) -> int:
    assert len(output) == worker_group.world_size
    return sum(output)


class Calc(Worker):
    """Marked methods of every mode. ``calls`` counts what reached this rank."""

    def __init__(self, base: int = 2) -> None:
        super().__init__()
        self.base = base
        self.calls: list[str] = []

    def plain(self, y: int, *, scale: int = 1) -> int:
        """Not marked."""
        return (self.base + y) * scale + self.rank

    def what_was_called(self) -> list[str]:
        return self.calls

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to_all(self, x: int, y: int = 0, *, z: int = 0) -> tuple[int, int]:
        """Adds up."""
        return self.rank, self.base + x + 10 * y + 100 * z

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def to_all_on_zero(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def to_all_later(self, x: int) -> int:
        return self.rank * 10 + x

    @register
    def each(self, x: Any, y: Any = None) -> tuple[int, Any, Any]:
        return self.rank, x, y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def each_on_zero(self, x: Any, y: Any) -> tuple[int, Any, Any]:
        return self.rank, x, y

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def listed(self, x: Any, y: Any = 0) -> Any:
        self.calls.append("listed")
        return x * 2 + y

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def listed_later(self, data: Any) -> Any:
        return type(data).__name__, data.batch["x"].tolist()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: DataProto, other: DataProto | None = None) -> DataProto:
        self.calls.append("rows")
        tensors = {"x": data.batch["x"] * 2, "rank": torch.full((len(data),), self.rank)}
        if other is not None:
            tensors["x"] = data.batch["x"] + other.batch["x"]
        return DataProto.from_dict(tensors=tensors, non_tensors={"id": data.non_tensor_batch["id"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def rows_async(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] + 100})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count_rows(self, data: DataProto) -> tuple[int, int]:
        return self.rank, len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def with_func(self, func: Callable[..., DataProto], data: DataProto) -> DataProto:
        return func(self, data)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def on_zero(self, x: Any, *, y: Any = None) -> tuple[int, Any, Any]:
        self.calls.append("on_zero")
        return self.rank, x, y

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def rollout(self, prompt: str) -> str:
        self.calls.append("rollout")
        return f"{prompt} from {self.rank}"

    @register(dispatch_mode={"dispatch_fn": pairs_for_all, "collect_fn": total})
    def dealt(self, x: int, y: int = 0) -> int:
        return x + 10 * y + self.rank

    @register(dispatch_mode={"dispatch_fn": lambda group, *args, **kwargs: ([[1, 2]], {}), "collect_fn": total})
    def dealt_wrongly(self, x: int) -> int:
        self.calls.append("dealt_wrongly")
        return x

    @register(dispatch_mode={"dispatch_fn": lambda group, *args, **kwargs: [[1]], "collect_fn": total})
    def dealt_without_kwargs(self, x: int) -> int:
        self.calls.append("dealt_without_kwargs")
        return x


@pytest.fixture
def calc(inproc_client: Client) -> Iterator[DaskWorkerGroup]:
    with make_group(inproc_client, Calc) as group:
        yield group


# ---------------------------------------------------------------------- built-in modes


def test_one_to_all_gives_every_rank_the_same(calc: DaskWorkerGroup) -> None:
    assert calc.to_all(1) == [(rank, 3) for rank in range(4)]
    assert calc.to_all(1, 2, z=3) == [(rank, 323) for rank in range(4)]
    assert calc.to_all(z=3, y=2, x=1) == [(rank, 323) for rank in range(4)]


def test_all_to_all_splits_only_if_every_argument_is_a_list_of_one_per_rank(calc: DaskWorkerGroup) -> None:
    assert calc.each([1, 2, 3, 4], [5, 6, 7, 8]) == [(0, 1, 5), (1, 2, 6), (2, 3, 7), (3, 4, 8)]
    assert calc.each(x=[1, 2, 3, 4], y=[5, 6, 7, 8]) == [(0, 1, 5), (1, 2, 6), (2, 3, 7), (3, 4, 8)]
    assert calc.each([1, 2, 3, 4], 5) == [(rank, [1, 2, 3, 4], 5) for rank in range(4)]
    assert calc.each([1, 2, 3]) == [(rank, [1, 2, 3], None) for rank in range(4)]
    assert calc.each("abcd") == [(rank, "abcd", None) for rank in range(4)]


def test_rank_zero_execution_returns_the_result_itself_and_splits_nothing(calc: DaskWorkerGroup) -> None:
    assert calc.each_on_zero(1, [2, 3, 4, 5]) == (0, 1, [2, 3, 4, 5])
    assert calc.each_on_zero([1, 2, 3, 4], y=[2, 3, 4, 5]) == (0, [1, 2, 3, 4], [2, 3, 4, 5])
    assert calc.to_all_on_zero([7, 8]) == (0, [7, 8])


def test_rank_zero_mode_runs_on_rank_0_only(calc: DaskWorkerGroup) -> None:
    assert calc.on_zero([1, 2, 3, 4], y=5) == (0, [1, 2, 3, 4], 5)
    assert calc.execute_all_sync("what_was_called") == [["on_zero"], [], [], []]


def test_dp_compute_takes_one_element_per_rank(calc: DaskWorkerGroup) -> None:
    assert calc.listed([1, 2, 3, 4]) == [2, 4, 6, 8]
    assert calc.listed((1, 2, 3, 4), y=[10, 20, 30, 40]) == [12, 24, 36, 48]


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        (([1, 2, 3],), {}, "argument 1 has 3 elements. Expected one per rank, 4 in all"),
        ((7,), {}, "argument 1 is a int. Expected a list or tuple with one element per rank, 4 in all"),
        (([1, 2, 3, 4],), {"y": [1]}, "argument 'y' has 1 elements"),
    ],
)
def test_dp_compute_refuses_other_lengths_before_any_rank_is_called(
    calc: DaskWorkerGroup, args: Any, kwargs: Any, complaint: str
) -> None:
    with pytest.raises(errors.DispatchError) as caught:
        calc.listed(*args, **kwargs)
    assert complaint in str(caught.value)
    assert calc.execute_all_sync("what_was_called") == [[]] * 4


def test_dp_compute_proto_splits_and_joins(calc: DaskWorkerGroup) -> None:
    for out in (calc.rows(numbers(8)), calc.rows(data=numbers(8))):
        assert out.batch["x"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert out.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert out.non_tensor_batch["id"].tolist() == [f"row {i}" for i in range(8)]
    both = calc.rows(numbers(8), other=numbers(8))
    assert both.batch["x"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_metrics_come_as_a_list(calc: DaskWorkerGroup) -> None:
    assert calc.count_rows(numbers(8)) == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_direct_rollout_is_refused_by_the_group_and_reached_on_the_rank(calc: DaskWorkerGroup) -> None:
    with pytest.raises(NotImplementedError, match="called directly on the rank"):
        calc.rollout("hello")
    assert calc.execute_all_sync("what_was_called") == [[]] * 4
    assert calc.workers[2].rollout("hello") == "hello from 2"


# ---------------------------------------------------------------------- modes of the user's own


def test_a_mapping_is_a_mode(calc: DaskWorkerGroup) -> None:
    assert calc.dealt([1, 2]) == (1 + 2) * 2 + 0 + 1 + 2 + 3
    assert calc.dealt(x=[1, 2], y=[3, 4]) == (31 + 42) * 2 + 0 + 1 + 2 + 3


def test_a_dispatch_function_that_forgets_ranks_is_refused(calc: DaskWorkerGroup) -> None:
    with pytest.raises(errors.DispatchError) as caught:
        calc.dealt_wrongly(1)
    assert "argument 1 of dealt_wrongly() was dispatched as 2 elements" in str(caught.value)
    assert "4 in all. No rank was called" in str(caught.value)
    with pytest.raises(errors.DispatchError, match=r"must return \(args, kwargs\)"):
        calc.dealt_without_kwargs(1)
    assert calc.execute_all_sync("what_was_called") == [[]] * 4


@pytest.fixture
def pairs_mode() -> Iterator[Any]:
    register_dispatch_mode("test_pairs", pairs_for_all, collect_all_to_all)
    yield Dispatch["TEST_PAIRS"]
    Dispatch.remove("TEST_PAIRS")


def test_a_mode_that_only_the_controller_has_registered(client: Client, pairs_mode: Any) -> None:
    class Dealt(Worker):
        @register(dispatch_mode=pairs_mode)
        def show(self, x: Any, y: Any = None) -> Any:
            return self.rank, x, y

    with make_group(client, Dealt) as group:
        assert group.show(["a", "b"]) == [(0, "a", None), (1, "b", None), (2, "a", None), (3, "b", None)]
        assert group.show("ab", y="cd") == [(0, "a", "c"), (1, "b", "d"), (2, "a", "c"), (3, "b", "d")]


def test_an_updated_mode_holds_for_groups_made_after(inproc_client: Client, pairs_mode: Any) -> None:
    class Dealt(Worker):
        @register(dispatch_mode=pairs_mode)
        def show(self, x: Any) -> Any:
            return x + self.rank

    with make_group(inproc_client, Dealt) as group:
        assert group.show([10, 20]) == [10, 21, 12, 23]
    update_dispatch_mode(pairs_mode, dispatch_one_to_all, total)
    with make_group(inproc_client, Dealt) as group:
        assert group.show(10) == 10 + 11 + 12 + 13
    pair = get_predefined_dispatch_fn(pairs_mode)
    assert (pair["dispatch_fn"], pair["collect_fn"]) == (dispatch_one_to_all, total)


def test_a_mode_that_is_gone_is_refused_before_any_rank_is_made(inproc_client: Client) -> None:
    register_dispatch_mode("test_gone", pairs_for_all, collect_all_to_all)

    class Gone(Worker):
        @register(dispatch_mode=Dispatch["TEST_GONE"])
        def show(self, x: Any) -> Any:
            return x

    Dispatch.remove("TEST_GONE")
    with pytest.raises(errors.RegistrationError, match="Gone.show.*TEST_GONE"):
        make_group(inproc_client, Gone)


# ---------------------------------------------------------------------- any method, marked or not


def test_execute_all_of_an_unmarked_method(calc: DaskWorkerGroup) -> None:
    assert calc.execute_all_sync("plain", 3) == [5, 6, 7, 8]
    assert calc.execute_all_sync("plain", y=3, scale=10) == [50, 51, 52, 53]
    assert calc.execute_all_sync("plain", [1, 2, 3, 4]) == [3, 5, 7, 9]
    for call in (calc.execute_all_async, calc.execute_all):
        futures = call("plain", y=4)
        assert [type(future) for future in futures] == [Future] * 4
        assert calc.client.gather(futures) == [6, 7, 8, 9]


def test_execute_rank_zero_of_an_unmarked_method(calc: DaskWorkerGroup) -> None:
    assert calc.execute_rank_zero_sync("plain", 3, scale=2) == 10
    for call in (calc.execute_rank_zero_async, calc.execute_rank_zero):
        future = call("plain", y=4)
        assert isinstance(future, Future)
        assert future.result(timeout=LIMIT_S) == 6


def test_an_unmarked_method_says_which_decorator_is_missing(calc: DaskWorkerGroup) -> None:
    with pytest.raises(errors.NotRegisteredError, match=r"Calc\.plain is not marked.*@register.*execute_all_sync"):
        calc.plain(3)
    with pytest.raises(AttributeError, match="has no member 'to_al'.*to_all"):
        calc.to_al(3)
    assert not hasattr(calc, "nothing_of_this_name")


def test_a_method_that_no_rank_has_is_an_error_of_the_rank(calc: DaskWorkerGroup) -> None:
    with pytest.raises(errors.RankFailedError, match="Calc has no method 'absent'") as caught:
        calc.execute_all_sync("absent")
    assert isinstance(caught.value.__cause__, AttributeError)
    assert calc.to_all(1)[3] == (3, 3)


def test_rank_handles(calc: DaskWorkerGroup) -> None:
    handles = calc.workers
    assert [handle.rank for handle in handles] == [0, 1, 2, 3]
    assert [handle.name for handle in handles] == calc.worker_names
    assert [handle.host for handle in handles] == calc.hosts
    assert len(set(calc.worker_names)) == 4
    assert [handle.plain(1, scale=2) for handle in handles] == [6, 7, 8, 9]
    assert handles[1].to_all(5) == (1, 7)
    assert handles[3].execute("plain", y=0) == 5
    future = handles[2].execute_async("plain", 1)
    assert isinstance(future, Future)
    assert future.result(timeout=LIMIT_S) == 5
    assert calc.worker_names[2] in repr(handles[2])


def test_bound_methods_look_like_the_marked_ones(calc: DaskWorkerGroup) -> None:
    assert calc.to_all.__name__ == "to_all"
    assert calc.to_all.__doc__ == "Adds up."
    assert list(inspect.signature(calc.to_all).parameters) == ["x", "y", "z"]
    assert {"to_all", "rows", "close"} <= set(dir(calc))
    assert "plain" not in dir(calc)


# ---------------------------------------------------------------------- functions of the controller


class NoSuper(Worker):
    """As many classes are written: nothing of Worker's own ``__init__`` runs."""

    def __init__(self) -> None:
        self.offset = 1000


def test_execute_with_func_generator_needs_no_init_of_worker(client: Client) -> None:
    seen = []

    def lengths(worker: Any, data: DataProto, other: DataProto | None = None) -> DataProto:
        seen.append(worker)  # a copy on the rank: the list here stays empty
        rows = data.batch["ids"]
        counts = torch.tensor([len(row.tolist()) + worker.offset for row in rows])
        if other is not None:
            counts += other.batch["ids"][:, 0]
        return DataProto.from_dict(tensors={"count": counts, "rank": torch.full((len(data),), worker.rank)})

    data = DataProto.from_dict(tensors={"ids": torch.arange(24).view(8, 3)}, meta_info={"kind": "test"})
    with make_group(client, NoSuper) as group:
        out = group.execute_with_func_generator(lengths, data)
        assert out.batch["count"].tolist() == [1003] * 8
        assert out.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        out = group.execute_with_func_generator(lengths, data, other=data)
        assert out.batch["count"].tolist() == [1003 + 3 * i for i in range(8)]
        with pytest.raises(errors.DispatchError, match="Expected a function"):
            group.execute_with_func_generator(data)
    assert seen == []


def test_a_function_goes_to_all_ranks_with_their_rows(calc: DaskWorkerGroup) -> None:
    def scale(worker: Calc, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] * worker.rank})

    assert calc.with_func(scale, numbers(8)).batch["x"].tolist() == [0, 0, 2, 3, 8, 10, 18, 21]
    assert calc.with_func(func=scale, data=numbers(4)).batch["x"].tolist() == [0, 1, 4, 9]


def test_execute_func_rank_zero(calc: DaskWorkerGroup) -> None:
    ones = torch.ones(2, 2)
    out = calc.execute_func_rank_zero(lambda data, *, by: data + by, ones, by=2)
    assert out.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert ones.tolist() == [[1.0, 1.0], [1.0, 1.0]]


# ---------------------------------------------------------------------- futures


def test_plain_results_of_non_blocking_calls_are_futures_in_rank_order(calc: DaskWorkerGroup) -> None:
    futures = calc.to_all_later(x=5)
    assert type(futures) is list
    assert [type(future) for future in futures] == [Future] * 4
    assert calc.client.gather(futures) == [5, 15, 25, 35]
    assert calc.client.submit(sum, futures).result(timeout=LIMIT_S) == 80


def test_a_non_blocking_coroutine_gives_a_batch_of_futures(calc: DaskWorkerGroup) -> None:
    out = calc.rows_async(numbers(8))
    assert isinstance(out, DataProtoFuture)
    assert len(out.futures) == 4
    assert out.get().batch["x"].tolist() == [100, 101, 102, 103, 104, 105, 106, 107]
    assert calc.rows_async(data=out).get().batch["x"].tolist() == [200, 201, 202, 203, 204, 205, 206, 207]


def test_lists_of_placed_data_are_dereferenced_on_the_rank(client: Client) -> None:
    with make_group(client, Calc) as group:
        pieces = client.scatter(numbers(8).chunk(4))
        futures = group.listed_later(pieces)
        assert client.gather(futures) == [("DataProto", [2 * rank, 2 * rank + 1]) for rank in range(4)]
        sums = [client.submit(pow, rank, 2) for rank in range(4)]
        assert group.listed(sums, y=[1, 1, 1, 1]) == [1, 3, 9, 19]


# ---------------------------------------------------------------------- meshes


class Mesh(Worker):
    """``train`` as (dp, tp), ``infer`` as (tp, dp): the same names of rows go to different ranks."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)
        self._register_dispatch_collect_info("infer", dp_rank=self.rank % 2, is_collect=self.rank >= 2)
        self.seen: list[Any] = []
        self.asked: list[str] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        self.asked.append(f"dispatch {mesh_name}")
        return super()._query_dispatch_info(mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        self.asked.append(f"collect {mesh_name}")
        return super()._query_collect_info(mesh_name)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train(self, data: Any) -> Any:
        return self._tag(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="infer"))
    def infer(self, data: Any) -> Any:
        return self._tag(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="infer"), blocking=False)
    def infer_later(self, data: DataProto) -> DataProto:
        return self._tag(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="unheard of"))
    def elsewhere(self, data: Any) -> Any:
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def shift(self, data: TensorDict) -> TensorDict:
        assert data.batch_size == torch.Size([4])
        return TensorDict({"ids": data["ids"] + 100 * (self.rank // 2 + 1)}, batch_size=data.batch_size)

    def _tag(self, data: DataProto) -> DataProto:
        self.seen.append(data.batch["x"].tolist())
        return DataProto.from_dict(
            tensors={"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)},
            non_tensors=dict(data.non_tensor_batch),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self) -> tuple[list[Any], list[str]]:
        seen, self.seen = self.seen, []
        return seen, self.asked


def test_peers_share_a_chunk_and_masked_ranks_are_collected(client: Client) -> None:
    with make_group(client, Mesh) as group:
        out = group.train(numbers(4))
        assert out.batch["x"].tolist() == [0, 1, 2, 3]
        assert out.batch["rank"].tolist() == [0, 0, 2, 2]
        assert out.non_tensor_batch["id"].tolist() == [f"row {i}" for i in range(4)]
        assert [seen for seen, _ in group.take()] == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]
        out = group.infer(data=numbers(4))
        assert out.batch["x"].tolist() == [0, 1, 2, 3]
        assert out.batch["rank"].tolist() == [2, 2, 3, 3]
        assert [seen for seen, _ in group.take()] == [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]]
        assert group._dispatch_info == {"train": [0, 0, 1, 1], "infer": [0, 1, 0, 1]}
        assert group._collect_info == {"train": [True, False, True, False], "infer": [False, False, True, True]}


def test_ranks_are_asked_once_about_each_mesh(inproc_client: Client) -> None:
    with make_group(inproc_client, Mesh) as group:
        for _ in range(3):
            group.infer(numbers(4))
            group.infer_later(numbers(4)).get()
            group.train(numbers(4))
        for _, asked in group.take():
            assert sorted(asked) == ["collect infer", "collect train", "dispatch infer", "dispatch train"]


def test_futures_of_a_mesh_are_those_of_its_collected_ranks(inproc_client: Client) -> None:
    with make_group(inproc_client, Mesh) as group:
        out = group.infer_later(numbers(4))
        assert isinstance(out, DataProtoFuture)
        assert len(out.futures) == 2
        assert out.get().batch["rank"].tolist() == [2, 2, 3, 3]
        assert group.train(out).batch["rank"].tolist() == [0, 0, 2, 2]


def test_a_mesh_that_nobody_registered(inproc_client: Client) -> None:
    with make_group(inproc_client, Mesh) as group:
        with pytest.raises(errors.RankFailedError) as caught:
            group.elsewhere(numbers(4))
        assert "mesh 'unheard of' is not registered on rank" in str(caught.value)
        assert "infer" in str(caught.value.__cause__) and "train" in str(caught.value.__cause__)


def test_jagged_columns_through_a_mesh(client: Client) -> None:
    rows = [torch.arange(length) for length in (3, 1, 4, 1, 5, 9, 2, 6)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with make_group(client, Mesh) as group:
        out = group.shift(TensorDict({"ids": jagged}, batch_size=8))
        assert isinstance(out, TensorDict)
        assert out.batch_size == torch.Size([8])
        expected = [row + (100 if i < 4 else 200) for i, row in enumerate(rows)]
        assert [row.tolist() for row in out["ids"].unbind()] == [row.tolist() for row in expected]
    assert [row.tolist() for row in jagged.unbind()] == [row.tolist() for row in rows]


class DeepMesh(Worker):
    """Eight ranks: ``infer`` is dp 2 x tp 4, ``train`` is pp 2 x dp 2 x tp 2; the last stage has the results."""

    def __init__(self) -> None:
        self.infer = (self.rank // 4, self.rank % 4)
        self.train = (self.rank // 4, self.rank // 2 % 2, self.rank % 2)
        dp, tp = self.infer
        self._register_dispatch_collect_info("infer", dp_rank=dp, is_collect=tp == 0)
        pp, dp, tp = self.train
        self._register_dispatch_collect_info("train", dp_rank=dp, is_collect=tp == 0 and pp == 1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="infer"))
    def generate(self, data: Any) -> Any:
        dp, tp = self.infer
        return add(data, (tp + 1) * dp)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def update(self, data: Any) -> Any:
        pp, dp, tp = self.train
        return add(data, (tp + 1) * (dp + 2) * (pp + 3))


def add(data: Any, amount: int) -> Any:
    if isinstance(data, DataProto):
        return DataProto.from_dict(tensors={"a": data.batch["a"] + amount})
    return TensorDict({"a": data["a"] + amount}, batch_size=data.batch_size)


def test_two_meshes_over_eight_ranks(make_cluster: Callable[..., LocalCluster]) -> None:
    with Client(make_cluster(8, processes=False), timeout=LIMIT_S) as client, make_group(client, DeepMesh, 8) as group:
        data = DataProto.from_single_dict({"a": torch.tensor([1, 2])})
        assert group.generate(data).batch["a"].tolist() == [1, 3]
        assert group.generate(data.to_tensordict())["a"].tolist() == [1, 3]
        data = DataProto.from_single_dict({"a": torch.tensor([3, 4])})
        assert group.update(data).batch["a"].tolist() == [11, 16]
        assert group.update(data.to_tensordict())["a"].tolist() == [11, 16]
        assert group._dispatch_info["infer"] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert group._dispatch_info["train"] == [0, 0, 1, 1, 0, 0, 1, 1]


# ---------------------------------------------------------------------- inheritance


class Base(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inherited(self) -> str:
        return f"base {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overridden(self) -> str:
        return "base"


class Derived(Base):
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def overridden(self) -> str:
        return f"derived, after {super().overridden()}"


def test_marked_methods_are_inherited_and_overridden(inproc_client: Client) -> None:
    with make_group(inproc_client, Derived, 2) as group:
        assert group.inherited() == ["base 0", "base 1"]
        assert group.overridden() == "derived, after base"


class Clash(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None: ...


class ZeroRows(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    def most_rows_lost(self, data: DataProto) -> DataProto:
        return data


@pytest.mark.parametrize(
    ("cls", "complaint"),
    [
        (Clash, r"Clash\.close is marked with @register, but groups have a member 'close' of their own; rename"),
        (ZeroRows, "ZeroRows.most_rows_lost splits its arguments over all ranks but runs on rank 0 only"),
    ],
)
def test_classes_that_cannot_be_driven_are_refused_before_any_rank_is_made(
    inproc_client: Client, cls: type, complaint: str
) -> None:
    with pytest.raises(errors.RegistrationError, match=complaint):
        make_group(inproc_client, cls)
    assert not inproc_client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))


def test_object_arrays_pass_through_unchanged(calc: DaskWorkerGroup) -> None:
    column = np.empty(4, dtype=object)
    column[:] = [[1], [2, 3], [], [4]]
    for rank, got, _ in calc.each(column):
        assert type(got) is np.ndarray and got.dtype == object and got.shape == (4,), rank
        assert got.tolist() == [[1], [2, 3], [], [4]]
