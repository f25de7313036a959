"""Memory, keys, threads and sockets stay flat over many calls and many groups, and all goes when a group is dropped."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import Client
from distributed import Worker as DaskWorker

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Worker,
    errors,
    register,
)
from dask_controller.group.call import Call
from dask_controller.group.engine import Engine
from dask_controller.group.outgoing import Outgoing
from dask_controller.runtime.channel import DirectChannel, SchedulerChannel
from dask_controller.runtime.futures import ResultInfo
from dask_controller.runtime.probe import describe_host
from tests.helpers import assert_no_leaks, find_leaks, forget_failures

LIMIT_S = 30.0
ROWS = 131_072  # 1 MiB of int64
WATCHED = (Call, ResultInfo, Outgoing, DataProtoFuture, DataProto, torch.Tensor)


class Echo(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_one(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_one_later(self, data: DataProto) -> DataProto:
        return self.add_one(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def number_later(self, value: int) -> int:
        return value + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, data: DataProto) -> None:
        raise ValueError(f"{len(data)} rows are too many")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, data: DataProto) -> DataProto:
        raise ValueError(f"{len(data)} rows are too many")


def make_group(client: Client, ranks: int = 2, **options: Any) -> DaskWorkerGroup:
    return DaskWorkerGroup(DaskResourcePool([ranks]), DaskClassWithInitArgs(Echo), client=client, **options)


def _host_state(dask_worker: DaskWorker) -> dict[str, int]:
    from dask_controller.runtime.service import ensure_service

    gc.collect()
    service = ensure_service(dask_worker)
    return {
        "keys": len(dask_worker.data),
        "tasks": len(dask_worker.state.tasks),
        "sessions": len(service.sessions),
        "ranks": len(service.ranks),
        "leases": len(service.leases),
        "tensors": sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "MiB": _mebibytes(),
    }


def _mebibytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss >> 20)


def state(client: Client, tasks_are_done: int) -> dict[str, Any]:
    """Everything that must not grow, asked for until the releases on their way have arrived."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        gc.collect()
        tasks = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        if tasks <= tasks_are_done or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    counts = Counter(type(o) for o in gc.get_objects())
    return {
        "scheduler tasks": tasks,
        "futures": len(client.futures),
        **{kind.__name__: counts[kind] for kind in WATCHED},
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "MiB": _mebibytes(),
        **{f"host {i}": found for i, found in enumerate(client.run(_host_state).values())},
    }


def _excess(before: dict[str, Any], after: dict[str, Any], slack: int) -> list[str]:
    out = []
    for name, value in after.items():
        if isinstance(value, dict):
            out += [f"{name}: {line}" for line in _excess(before[name], value, slack)]
        # Few steps say nothing of memory: the allocator keeps what it has.
        elif value > before[name] + (max(slack, 100) if name == "MiB" else slack):
            out.append(f"{name}: {before[name]} before, {value} after")
    return out


def check_flat(client: Client, step: Callable[[int], None], warm_up: int, steps: int) -> None:
    """Repeat ``step`` and fail if anything has grown in proportion to the number of steps."""
    for number in range(warm_up):
        step(number)
    tasks = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
    before = state(client, tasks_are_done=tasks)
    for number in range(steps):
        step(number)
    # Thread pools and connection pools may still fill up by a few; what grows per step is far above that.
    slack = max(steps // 10, 4)
    deadline = time.monotonic() + LIMIT_S
    while grown := _excess(before, state(client, before["scheduler tasks"] + slack), slack):
        assert time.monotonic() < deadline, f"after {steps} steps: {grown}"


def batch(rows: int = ROWS) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)})


def blocking_step(group: DaskWorkerGroup) -> Callable[[int], None]:
    data = batch()

    def step(number: int) -> None:
        out = group.add_one(data)
        assert out.batch["x"][number].item() == number + 1 and len(out) == ROWS

    return step


def hand_over_step(producer: DaskWorkerGroup, consumer: DaskWorkerGroup) -> Callable[[int], None]:
    data = batch()

    def step(number: int) -> None:
        out = consumer.add_one_later(producer.add_one_later(data))
        if number % 10 == 0:
            assert out.get(timeout=LIMIT_S).batch["x"][number].item() == number + 2
        # Most are dropped, some of them before they are there.

    return step


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_dispatch_and_collect(steps: int, client: Client) -> None:
    with make_group(client) as group:
        check_flat(client, blocking_step(group), 20, steps)


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_hand_over(steps: int, client: Client) -> None:
    with make_group(client) as producer, make_group(client) as consumer:
        check_flat(client, hand_over_step(producer, consumer), 20, steps)
        # All of them were carried out, in the end.
        assert consumer.number_later(1)[1].result(timeout=LIMIT_S) == 2


def test_through_the_scheduler(scheduler_only_client: Client) -> None:
    client = scheduler_only_client
    with make_group(client) as producer, make_group(client) as consumer:
        check_flat(client, blocking_step(producer), 10, 60)
        check_flat(client, hand_over_step(producer, consumer), 10, 60)


def test_results_that_are_never_asked_for(client: Client) -> None:
    with make_group(client) as group:

        def step(number: int) -> None:
            group.number_later(number)
            if number % 20 == 0:
                assert client.gather(group.number_later(number)) == [number, number + 1]

        check_flat(client, step, 50, 500)


def test_calls_that_fail(client: Client) -> None:
    data = batch(4096)
    with make_group(client) as group:

        def step(number: int) -> None:
            with pytest.raises(errors.RankFailedError, match="too many"):
                group.fail(data)
            with pytest.raises(errors.RankFailedError, match="too many"):
                group.fail_later(data).get(timeout=LIMIT_S)
            forget_failures(client)

        check_flat(client, step, 10, 100)


def test_arguments_that_are_futures(client: Client) -> None:
    with make_group(client) as group:

        def step(number: int) -> None:
            future = client.scatter(batch(1024), hash=False)
            assert [len(x) for x in group.execute_all_sync("add_one", future)] == [1024] * 2

        check_flat(client, step, 5, 40)


@pytest.mark.parametrize("ending", ["close", "with", "drop"])
def test_groups_one_after_another(ending: str, client: Client) -> None:
    data = batch(4096)

    def step(number: int) -> None:
        group = make_group(client, 2, placement_timeout_s=LIMIT_S)
        later = group.add_one_later(data)
        assert len(later.get(timeout=LIMIT_S)) == 4096
        if ending == "close":
            group.close()
        elif ending == "with":
            with group:
                pass

    check_flat(client, step, 3, 20)
    deadline = time.monotonic() + LIMIT_S
    while left := [
        o for o in gc.get_objects() if type(o) in (DaskWorkerGroup, Engine, DirectChannel, SchedulerChannel)
    ]:
        assert time.monotonic() < deadline, left
        del left
        time.sleep(0.02)
        gc.collect()


@pytest.mark.parametrize("how", ["idle", "with results", "in a cycle", "with calls on their way"])
def test_dropping_a_group_frees_everything(how: str, client: Client) -> None:
    group = make_group(client, 4)
    data = batch(4096)
    later = group.add_one_later(data)
    if how != "idle":
        assert len(later.get(timeout=LIMIT_S)) == 4096
    if how == "with calls on their way":
        for _ in range(50):
            group.add_one_later(data)
    if how == "in a cycle":
        group.__dict__["myself"] = group
    assert find_leaks(client)
    del group, later
    assert_no_leaks(client)
    assert not [rank for host in client.run(describe_host).values() for rank in host["ranks"]]
    with make_group(client, 4, placement_timeout_s=LIMIT_S) as group:
        assert len(group.add_one(data)) == 4096


def test_results_outlive_their_group(client: Client) -> None:
    group = make_group(client, 2)
    later = group.add_one_later(batch(8))
    assert later.get(timeout=LIMIT_S).batch["x"].tolist() == list(range(1, 9))
    group.close()
    del group
    assert later.get(timeout=LIMIT_S).batch["x"].tolist() == list(range(1, 9))
    del later
    assert_no_leaks(client)


def test_a_client_that_closes_before_its_group(client: Client) -> None:
    def step(number: int) -> None:
        with Client(client.scheduler.address, timeout=30, set_as_default=False) as own:
            group = make_group(own, 2, placement_timeout_s=LIMIT_S)
            assert len(group.add_one(batch(8))) == 8
        if number % 2:
            group.close()

    check_flat(client, step, 3, 20)
