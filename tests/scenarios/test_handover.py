"""Futures between groups, tasks and clients: as arguments, rank to rank, after the producer is gone (B5-B7)."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
from distributed import Client, LocalCluster, as_completed, default_client, futures_of, wait
from distributed import Worker as DaskWorker
from distributed.comm import tcp

from dask_controller import DaskWorkerGroup, DataProto, DataProtoFuture, errors
from dask_controller.protocol import future as future_module
from dask_controller.runtime import shm
from tests.helpers import forget_failures
from tests.protocol.batches import assert_same_batch
from tests.scenarios.data_ranks import (
    LIMIT_S,
    Rows,
    Traffic,
    batch_of,
    make_group,
    until,
    wait_for_file,
)

MB = 2**20


# ---------------------------------------------------------------------- B5 futures as arguments


def test_scattered_batches_are_arguments(client: Client) -> None:
    data = batch_of(8)
    with make_group(client, Rows, 4) as group:
        for future in (client.scatter(data), client.scatter(data, hash=False), client.scatter(data, broadcast=True)):
            assert group.sizes(future) == [2] * 4
            assert group.sizes(data=future) == [2] * 4
            assert_same_batch(group.echo(future), data)
            assert_same_batch(group.echo_later(future).get(timeout=LIMIT_S), data)
            assert_same_batch(group.add(future, data), group.add(data, data))
            for _, name, got in group.show(future):
                assert name == "DataProto"
                assert_same_batch(got, data)
            del future
        halves = client.scatter(data.chunk(2), hash=False)
        assert_same_batch(group.echo(DataProtoFuture.from_futures(halves)), data)


def test_a_task_still_running_is_an_argument(client: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def slow(path: str, rows: int) -> DataProto:
        wait_for_file(path)
        return batch_of(rows)

    with make_group(client, Rows, 2) as group:
        future = client.submit(slow, str(go), 6, pure=False)
        late = group.echo_later(future)
        assert not late.done()
        go.touch()
        assert_same_batch(late.get(timeout=LIMIT_S), batch_of(6))


class Plus:
    """A function that carries a future."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, rank: int, rows: DataProto) -> DataProto:
        return DataProto.from_dict({"x": rows.batch["x"] + self.value})


@pytest.mark.parametrize("shared_memory", ["1 GiB", 0])
def test_a_non_blocking_call_with_a_large_batch_does_not_wait_for_a_future(
    shared_memory: object, client: Client, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def slow(path: str) -> int:
        wait_for_file(path)
        return 3

    data = DataProto.from_dict({"x": torch.zeros(2, MB)})
    with (
        dask.config.set({"controller.shared-memory-limit": shared_memory}),
        make_group(client, Rows, 2) as group,
    ):
        future = client.submit(slow, str(go), pure=False)
        # Were it to wait, the file would never be made.
        late = group.apply_later(Plus(future), data)
        assert not late.done()
        data.batch["x"] += 5  # the call has returned: the batch is the caller's again
        go.touch()
        assert torch.equal(late.get(timeout=LIMIT_S).batch["x"], torch.full((2, MB), 3.0))


def test_dataframe_partitions_are_arguments(client: Client) -> None:
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"a": range(40), "b": [f"s{i}" for i in range(40)]})
    persisted = dd.from_pandas(frame, npartitions=4).persist()
    futures = sorted(futures_of(persisted), key=lambda future: future.key[-1])
    assert len(futures) == 4
    with make_group(client, Rows, 4) as group:
        # One partition for each rank.
        parts = group.apply_each(futures)
        assert pd.concat(parts).reset_index(drop=True).to_dict() == frame.to_dict()
        # All partitions for every rank.
        for _, name, got in group.show(futures):
            assert name == "list" and sum(len(part) for part in got) == 40
        with pytest.raises(errors.UnsupportedTypeError, match="cannot be cut into rows"):
            group.sizes(futures[0])


def test_results_of_non_blocking_calls_are_dask_futures(client: Client) -> None:
    data = batch_of(8)
    with make_group(client, Rows, 4) as group:
        later = group.echo_later(data)
        assert wait(later.futures, timeout=LIMIT_S).not_done == set()
        assert [len(part) for part in client.gather(later.futures)] == [2] * 4
        completed = [future.key for future in as_completed(later.futures, timeout=LIMIT_S)]
        assert sorted(completed) == sorted(future.key for future in later.futures)
        assert client.submit(len, later.futures[1], pure=False).result(timeout=LIMIT_S) == 2
        totals = client.map(lambda part: int(part.batch["x"].sum()), later.futures, pure=False)
        assert client.submit(sum, totals, pure=False).result(timeout=LIMIT_S) == 28
        # Each value lies on its own rank's host.
        who_has = client.who_has(later.futures)
        assert [list(who_has[future.key])[0] for future in later.futures] == group.hosts
        del totals


def test_tasks_may_be_queued_behind_a_running_rank(client: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with make_group(client, Rows, 2) as group:
        later = group.hold(partial(_wait_on_rank, str(go), None), batch_of(6))
        total = client.submit(lambda a, b: len(a) + len(b), *later.futures, pure=False)
        half = client.submit(len, later.futures[0], pure=False)
        # A task of its own passes by: the host has its thread free.
        assert client.submit(int, "7", pure=False, workers=[group.hosts[0]]).result(timeout=LIMIT_S) == 7
        assert not later.done() and total.status == "pending"
        go.touch()
        assert total.result(timeout=LIMIT_S) == 6 and half.result(timeout=LIMIT_S) == 3


def _wait_on_rank(path: str, only: int | None, rank: int) -> None:
    if only is None or rank == only:
        wait_for_file(path)


# ---------------------------------------------------------------------- B6 hand-over


@pytest.mark.parametrize("cluster", ["client", "scheduler_only_client"])
def test_batches_go_from_rank_to_rank(cluster: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(cluster)
    data = batch_of(12, meta_info={"step": 3})
    with make_group(client, Rows, 2) as a, make_group(client, Rows, 2) as b:
        assert not set(a.hosts) & set(b.hosts)
        first = a.echo_later(data)
        assert_same_batch(b.echo(first), data)
        assert_same_batch(b.echo(data=first), data)
        second = b.echo_later(first)
        third = a.echo_later(second)  # none of the three has been waited for
        for later in (first, second, third):
            for _ in range(2):
                assert_same_batch(later.get(timeout=LIMIT_S), data)
        assert_same_batch(b.add(first, third), a.add(data, data))
        # Inside other values, and to every rank.
        for _, _, got in b.show({"deep": [first]}):
            assert_same_batch(got["deep"][0], data)
        a.close()
        for later in (first, third):
            assert_same_batch(later.get(timeout=LIMIT_S), data)
            assert_same_batch(b.echo(later), data)
            assert b.sizes(later) == [6, 6]


@pytest.mark.parametrize(("producers", "consumers"), [(1, 3), (3, 1), (2, 2)])
def test_groups_of_different_size_hand_over(producers: int, consumers: int, client: Client) -> None:
    data = batch_of(6)
    with make_group(client, Rows, producers) as a, make_group(client, Rows, consumers) as b:
        later = a.echo_later(data)
        assert b.sizes(later) == [6 // consumers] * consumers
        assert [row for rows in b.first_rows(later) for row in rows] == list(range(6))
        assert_same_batch(b.echo(later), data)
        shuffled = DataProtoFuture.concat([later.chunk(3)[i] for i in (2, 0, 1)])
        assert b.echo(shuffled).batch["x"].tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("shared_memory", ["1 GiB", 0])
@pytest.mark.parametrize("cluster", ["client", "scheduler_only_client"])
def test_no_payload_passes_through_the_controller(
    cluster: str, shared_memory: object, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = request.getfixturevalue(cluster)
    fetched: list[str] = []
    real = future_module.call_host

    async def call_host(client: Client, address: str, op: str, **options: Any) -> Any:
        fetched.append(op)
        return await real(client, address, op, **options)

    monkeypatch.setattr(future_module, "call_host", call_host)
    data = DataProto.from_dict({"x": torch.rand(4, MB)})  # 16 MB
    with (
        dask.config.set({"controller.shared-memory-limit": shared_memory}),
        make_group(client, Rows, 2) as a,
        make_group(client, Rows, 2) as b,
    ):
        later = a.echo_later(data)
        wait(later.futures, timeout=LIMIT_S)
        with Traffic() as traffic:
            assert b.sizes(later) == [2, 2]
            again = b.echo_later(later)
            assert a.sizes(DataProtoFuture.concat(again.chunk(2)[::-1])) == [2, 2]
            assert client.gather(a.sizes_later(again)) == [2, 2]
            assert client.submit(len, again.futures[0], pure=False).result(timeout=LIMIT_S) == 2
        assert "fetch" not in fetched
        assert traffic.read < 200_000 and traffic.written < 200_000
        with Traffic() as traffic:
            assert torch.equal(again.get(timeout=LIMIT_S).batch["x"], data.batch["x"])
        # Now it comes: what was counted before can be counted.
        assert fetched.count("fetch") == 2
        if not shared_memory or cluster == "scheduler_only_client":
            assert traffic.read > 16 * MB


def _count_reads(install: bool) -> int:
    """Runs on a host: begin to count what it reads from connections, or end and tell."""
    if install:
        real = tcp.read_bytes_rw

        async def read_bytes_rw(stream: Any, n: int) -> Any:
            read_bytes_rw.total += n
            return await real(stream, n)

        read_bytes_rw.total, read_bytes_rw.real = 0, real
        tcp.read_bytes_rw = read_bytes_rw
        return 0
    counted = tcp.read_bytes_rw
    tcp.read_bytes_rw = counted.real
    return counted.total


def test_each_rank_fetches_only_the_rows_it_needs(client: Client) -> None:
    data = DataProto.from_dict({"x": torch.rand(9, MB // 4)})  # 1 MB a row
    with make_group(client, Rows, 1) as a, make_group(client, Rows, 3) as b:
        later = a.echo_later(data)
        wait(later.futures, timeout=LIMIT_S)
        client.run(_count_reads, True, workers=b.hosts)
        try:
            assert b.sizes(later) == [3, 3, 3]
        finally:
            read = client.run(_count_reads, False, workers=b.hosts)
        assert all(nbytes < 3.2 * MB for nbytes in read.values()), read


def test_a_failed_producer_fails_its_consumers(client: Client) -> None:
    def fail_on_one(rank: int, rows: DataProto) -> DataProto:
        if rank == 1:
            raise ValueError("no rows from here")
        return rows

    with make_group(client, Rows, 2, name_prefix="producer") as a, make_group(client, Rows, 2) as b:
        later = a.apply_later(fail_on_one, batch_of(4))
        began = time.monotonic()
        for call in (
            lambda: later.get(timeout=LIMIT_S),
            lambda: b.echo(later),
            lambda: b.echo_later(later).get(timeout=LIMIT_S),
            lambda: b.echo(later.chunk(2)[1]),
        ):
            with pytest.raises(errors.RankFailedError, match=r"(?s)rank 1.*no rows from here") as caught:
                call()
            assert set(caught.value.failures) == {1}
            assert caught.value.hosts == {1: a.hosts[1]}
            assert isinstance(caught.value.__cause__, ValueError)
        assert time.monotonic() - began < LIMIT_S
        # Neither group is worse for it.
        assert b.count() == [0, 0]
        assert_same_batch(b.echo(a.echo_later(batch_of(4))), batch_of(4))
        later = caught = None
        forget_failures(client)


def _kill_host_of(group: DaskWorkerGroup, rank: int) -> None:
    os.kill(group.status()[rank]["pid"], signal.SIGKILL)


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_a_lost_producer_is_named(route: str, make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    cluster = make_cluster(3)
    with Client(cluster, timeout=30, direct_to_workers=False if route == "scheduler" else None) as client:
        client.wait_for_workers(3, timeout=60)
        with make_group(client, Rows, 2, name_prefix="producer") as a, make_group(client, Rows, 1) as b:
            assert a.route == route
            ready = a.echo_later(batch_of(4))
            assert_same_batch(b.echo(ready), batch_of(4))
            running = a.hold(partial(_wait_on_rank, str(tmp_path / "never"), 1), batch_of(4))
            until(lambda: a.status()[1]["running"], "rank 1 runs")
            lost_host = a.hosts[1]
            _kill_host_of(a, 1)
            began = time.monotonic()
            # What had been made on the lost host, and what was being made there.
            with pytest.raises(errors.RankLostError) as lost:
                running.get(timeout=LIMIT_S)
            assert (lost.value.rank, lost.value.host, lost.value.method) == (1, lost_host, "hold")
            with pytest.raises(errors.ChunkLostError, match=r"rank 1 of group 'producer'") as gone:
                ready.get(timeout=LIMIT_S)
            assert (gone.value.rank, gone.value.host) == (1, lost_host)
            with pytest.raises(errors.RankLostError, match="rank 1"):
                b.echo(running)
            with pytest.raises(errors.RankFailedError, match=r"rank 1 of group 'producer'") as failed:
                b.echo(ready)
            (cause,) = failed.value.failures.values()
            assert isinstance(cause, errors.ChunkLostError) and cause.rank == 1
            assert time.monotonic() - began < LIMIT_S
            # The rows of rank 0 are still there, and the consumer works.
            half = ready.chunk(2)[0]
            assert_same_batch(half.get(timeout=LIMIT_S), batch_of(4)[:2])
            assert_same_batch(b.echo(half), batch_of(4)[:2])


def _kept(dask_worker: DaskWorker) -> list[str]:
    return [str(key) for key in dask_worker.data if "echo_later" in str(key)]


def test_released_futures_are_reported_not_awaited(client: Client) -> None:
    with make_group(client, Rows, 2) as a:
        later = a.echo_later(batch_of(4))
        wait(later.futures, timeout=LIMIT_S)
        client.cancel(later.futures)
        until(lambda: not any(client.run(_kept).values()), "the hosts have let go")
        with pytest.raises(errors.ChunkLostError, match="rank [01]"):
            later.get(timeout=LIMIT_S)
        with pytest.raises(errors.RankFailedError, match="rank [01] of group"):
            a.echo(later)


def test_results_that_outlive_their_group_keep_their_memory_and_give_it_back(client: Client) -> None:
    data = DataProto.from_dict({"x": torch.rand(4, MB)})  # 16 MB
    other = DataProto.from_dict({"x": torch.zeros(4, MB)})
    for _ in range(3):
        with make_group(client, Rows, 2) as group:
            kept = group.echo_later(data)  # on the hosts, in memory that the controller made
            here = group.echo(data)  # in memory that the hosts made
        # Whatever is handed over next must not overwrite it.
        with make_group(client, Rows, 2) as group:
            for _ in range(4):
                group.echo(other)
            assert torch.equal(kept.get(timeout=LIMIT_S).batch["x"], data.batch["x"])
            assert torch.equal(here.batch["x"], data.batch["x"])
            del kept, here
    until(lambda: not _segments_in_use(), "the controller's memory is free")
    until(lambda: not any(client.run(_segments_in_use).values()), "the hosts' memory is free")


def _segments_in_use() -> int:
    gc.collect()
    return 0 if shm._own is None else shm._own.num_in_use


# ---------------------------------------------------------------------- B7 two clients


def test_a_group_keeps_to_its_own_client(client: Client) -> None:
    data = batch_of(4)
    assert client.scheduler is not None
    with Client(client.scheduler.address, timeout=30) as other:
        assert default_client() is other
        with make_group(client, Rows, 2) as a, make_group(client, Rows, 2) as b:
            assert a.client is client
            before = a.echo_later(data)
            assert before.futures[0].client is client
            pending = b.echo_later(before)
            other.close()
            assert_same_batch(pending.get(timeout=LIMIT_S), data)
            assert_same_batch(before.get(timeout=LIMIT_S), data)
            assert_same_batch(b.echo(before), data)
            assert_same_batch(a.echo(data), data)
            assert [rank["state"] for rank in a.status()] == ["ready"] * 2
            assert_same_batch(b.echo_later(a.echo_later(data)).get(timeout=LIMIT_S), data)


def test_a_future_of_another_client_is_an_argument(client: Client) -> None:
    data = batch_of(4)
    assert client.scheduler is not None
    with Client(client.scheduler.address, timeout=30, set_as_default=False) as other:
        assert default_client() is client
        with make_group(client, Rows, 2) as a, make_group(other, Rows, 2) as b:
            assert (a.client, b.client) == (client, other)
            assert_same_batch(a.echo(other.scatter(data, hash=False)), data)
            later = a.echo_later(data)
            assert_same_batch(b.echo(later), data)
            assert_same_batch(b.echo_later(later).get(timeout=LIMIT_S), data)
            back = a.echo_later(b.echo_later(later))
            assert_same_batch(back.get(timeout=LIMIT_S), data)


def test_two_threads_hand_over_at_once(client: Client) -> None:
    failures: list[BaseException] = []

    def work(a: DaskWorkerGroup, b: DaskWorkerGroup, rows: int) -> None:
        try:
            for _ in range(20):
                assert_same_batch(b.echo_later(a.echo_later(batch_of(rows))).get(timeout=LIMIT_S), batch_of(rows))
        except BaseException as error:
            failures.append(error)

    with make_group(client, Rows, 2) as a, make_group(client, Rows, 2) as b:
        threads = [threading.Thread(target=work, args=order) for order in ((a, b, 4), (b, a, 6))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
