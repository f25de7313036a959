"""Batches that are worked on where they lie, values placed once, memory hand-over and limits, on real groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed import Client

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Worker,
    register,
)
from dask_controller.errors import BatchMismatchError, DataProtoError, KeyConflictError, RankFailedError
from dask_controller.runtime.shm import SegmentPool
from tests.scenarios.data_ranks import until, wait_for_file

MIB = 1 << 20


class Rows(Worker):
    """Gives back what it gets."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def keep(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> float:
        return float(data.batch["x"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def slow_total(self, data: DataProto) -> float:
        wait_for_file(data.meta_info["gate"])
        return float(data.batch["x"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def value_id(self, value: Any) -> tuple[int, Any]:
        return id(value["weights"]), float(value["weights"].sum())


def group_of(client: Client, ranks: int) -> DaskWorkerGroup:
    return DaskWorkerGroup(DaskResourcePool([ranks], use_gpu=False), DaskClassWithInitArgs(Rows), client=client)


def batch(rows: int = 8) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(rows), "y": torch.arange(2 * rows).reshape(rows, 2)},
        non_tensors={"name": np.array([f"row {i}" for i in range(rows)], dtype=object)},
    )


@pytest.fixture
def groups(client: Client) -> Iterator[tuple[DaskWorkerGroup, DaskWorkerGroup]]:
    with group_of(client, 2) as one, group_of(client, 2) as other:
        yield one, other


def tenfold(part: DataProto, factor: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": part.batch["x"] * factor})


def test_looking_at_a_batch_that_stays(groups: tuple[DaskWorkerGroup, DaskWorkerGroup]) -> None:
    future = groups[0].keep(batch())
    assert future.keys(timeout=30) == ["x", "y", "name"]
    assert len(future) == 8
    assert future["x"].tolist() == list(range(8))
    assert future["name"].tolist() == [f"row {i}" for i in range(8)]
    assert future[3].non_tensor_batch["name"] == "row 3"


def test_rows_and_columns_reach_the_other_group_as_chosen(groups: tuple[DaskWorkerGroup, DaskWorkerGroup]) -> None:
    one, other = groups
    future = one.keep(batch())
    got = other.echo(future.select_idxs([7, 0, 3, 3]).select(["x"], ["name"]))
    assert got.batch["x"].tolist() == [7, 0, 3, 3] and list(got.batch.keys()) == ["x"]
    assert got.non_tensor_batch["name"].tolist() == ["row 7", "row 0", "row 3", "row 3"]
    assert other.echo(future[2:6]).batch["x"].tolist() == [2, 3, 4, 5]
    assert other.echo(future.repeat(2, interleave=False)).batch["x"].tolist() == [*range(8), *range(8)]
    mask = torch.arange(8) % 2 == 0
    assert other.echo(future[mask]).batch["x"].tolist() == [0, 2, 4, 6]
    future.reorder(list(range(7, -1, -1)))
    assert other.echo(future).batch["x"].tolist() == list(range(7, -1, -1))


def test_columns_taken_out_and_put_back(groups: tuple[DaskWorkerGroup, DaskWorkerGroup]) -> None:
    one, other = groups
    future = one.keep(batch())
    taken = future.pop(["y"])
    assert (future.keys(), taken.keys()) == (["x", "name"], ["y"])
    # Both come from the same rows, in whatever form they travelled meanwhile.
    back = other.echo(future.union(other.keep(taken)))
    assert back.batch["x"].tolist() == list(range(8)) and back.batch["y"][:, 1].tolist() == list(range(1, 16, 2))
    assert other.echo(future.rename("x", "z")).batch["z"].tolist() == list(range(8))
    with pytest.raises(BatchMismatchError, match="8 and 4 rows"):
        future.union(taken[:4]).get()


def test_functions_run_where_the_rows_are(groups: tuple[DaskWorkerGroup, DaskWorkerGroup]) -> None:
    one, other = groups
    future = one.keep(batch())
    mapped = future.map(tenfold, 10)
    assert mapped.get(timeout=30).batch["x"].tolist() == list(range(0, 80, 10))
    holders = one.client.who_has(mapped.futures)
    assert sorted(address for (address,) in holders.values()) == sorted(one.hosts)
    assert other.echo(future[1:5].map(tenfold, factor=3)).batch["x"].tolist() == [3, 6, 9, 12]
    future.reorder(list(range(7, -1, -1)))
    assert future.map(tenfold, 1).get(timeout=30).batch["x"].tolist() == list(range(7, -1, -1))


def test_several_futures_as_one(groups: tuple[DaskWorkerGroup, DaskWorkerGroup]) -> None:
    one, other = groups
    joined = DataProtoFuture.concat([one.keep(batch(2)), other.keep(batch(4)), one.keep(batch(2))])
    assert other.echo(joined).batch["x"].tolist() == [0, 1, 0, 1, 2, 3, 0, 1]
    assert [len(part) for part in joined.chunk(3)] == [3, 3, 2]
    assert joined.chunk(2)[1].chunk(2)[0].get(timeout=30).batch["x"].tolist() == [2, 3]


def test_mistakes_have_the_errors_of_a_batch_at_hand(groups: tuple[DaskWorkerGroup, DaskWorkerGroup]) -> None:
    one, other = groups
    future = one.keep(batch())
    with pytest.raises(KeyConflictError, match="no column 'nam'; did you mean 'name'"):
        future["nam"]
    with pytest.raises(BatchMismatchError, match="row 99 does not exist in a batch of 8 rows"):
        future.select_idxs([99]).get()
    with pytest.raises(BatchMismatchError, match="row 99 does not exist"):
        other.echo(future.select_idxs([99, 0]))
    with pytest.raises(RankFailedError, match="KeyConflictError"):
        other.echo(future.select(["nope"]))
    with pytest.raises(DataProtoError, match="1-D list of ints or bools"):
        future.select_idxs([[1], [2]])
    assert other.echo(future).batch["x"].tolist() == list(range(8)), "both groups still work"


def test_a_value_is_placed_once_and_passed_as_often_as_wished(client: Client) -> None:
    with group_of(client, 2) as group:
        placed = group.put({"weights": torch.ones(MIB)})
        assert sorted(next(iter(client.who_has([placed]).values()))) == sorted(group.hosts)
        first, second = group.value_id(placed), group.value_id(placed)
        assert first == second and [total for _, total in first] == [MIB, MIB]
        del placed


def test_calls_beyond_the_bytes_in_flight_wait(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    data = DataProto.from_dict(tensors={"x": torch.ones(MIB // 2)}, meta_info={"gate": str(gate)})  # 2 MiB
    results: list[float] = []
    with dask.config.set({"controller.bytes-in-flight": 3 * MIB}), group_of(client, 1) as group:
        flow, host = group._members.engine.flow, group.hosts[0]

        def call() -> None:
            results.extend(client.gather(group.slow_total(data)))

        threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: flow.in_flight(host) > 2 * MIB, "the first call is in flight")
        threads[-1].join(0.2)
        assert flow.in_flight(host) < 3 * MIB and results == []
        gate.touch()
        for thread in threads:
            thread.join(30)
        assert results == [MIB // 2] * 4
        assert flow.in_flight(host) == 0


@pytest.mark.parametrize("limit", ["256 MiB", "0"])
def test_large_values_are_equal_by_memory_and_by_socket(
    client: Client, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []
    write = SegmentPool.write

    def spy(self: SegmentPool, *args: Any) -> Any:
        out = write(self, *args)
        written.append(out is not None)
        return out

    monkeypatch.setattr(SegmentPool, "write", spy)
    data = DataProto.from_dict(tensors={"x": torch.arange(MIB), "y": torch.randn(4, MIB).T.contiguous()})
    with dask.config.set({"controller.shared-memory-limit": limit}):
        with group_of(client, 2) as one, group_of(client, 2) as other:
            for _ in range(3):
                future = one.keep(data)
                for got in (one.echo(data), other.echo(future), future.get(timeout=30), other.echo(future[::-1])[::-1]):
                    assert torch.equal(got.batch["x"], data.batch["x"]) and torch.equal(got.batch["y"], data.batch["y"])
                got.batch["x"][0] = 7
                assert int(data.batch["x"][0]) == 0, "what comes back is the caller's own"
                del future, got
    assert any(written) is (limit != "0")


def test_arguments_may_be_overwritten_as_soon_as_a_call_returns(client: Client) -> None:
    x = torch.zeros(2 * MIB, dtype=torch.float64)
    for limit in ("256 MiB", "0"):
        with dask.config.set({"controller.shared-memory-limit": limit}), group_of(client, 2) as group:
            pending = []
            for number in range(4):
                x.fill_(number)
                pending.append(group.keep(DataProto.from_dict(tensors={"x": x})))
            x.fill_(-1)
            assert [float(p.get(timeout=30).batch["x"].mean()) for p in pending] == [0.0, 1.0, 2.0, 3.0]
            del pending
