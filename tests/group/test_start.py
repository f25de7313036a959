"""Groups that cannot start: one prompt error that says why, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster

from dask_controller import (
    ClassWithInitArgs,
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    Dispatch,
    ResourcePool,
    Worker,
    errors,
    register,
)
from dask_controller.group import start
from dask_controller.runtime import probe
from tests.helpers import assert_no_leaks, forget_failures

LIMIT_S = 30.0


def wait_for_file(path: str) -> None:
    deadline = time.monotonic() + 2 * LIMIT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not made")
        time.sleep(0.005)


class Good(Worker):
    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: DataProto) -> DataProto:
        self.calls += 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def listed(self, x: Any) -> Any:
        self.calls += 1
        return x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, x: Any) -> None:
        self.calls += 1

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, data: DataProto) -> Any:
        self.calls += 1
        return function(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self) -> tuple[Any, int]:
        return self.value, self.calls

    def unmarked(self) -> int:
        return self.rank


class BadInit(Worker):
    """Fails in ``__init__`` on rank 1; what the other ranks do meanwhile is said by ``how``."""

    def __init__(self, how: str, path: str = "") -> None:
        if how == "barrier":
            dist.init_process_group("gloo")
        if self.rank == 1:
            raise ValueError("rank 1 does not want to")
        if how == "barrier":
            dist.barrier()
        elif how == "hold":
            wait_for_file(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self) -> int:
        return self.rank


class SlowInit(Worker):
    def __init__(self, path: str, slow_rank: int) -> None:
        if self.rank == slow_rank:
            wait_for_file(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self) -> int:
        return self.rank


def pool(ranks: int, **options: Any) -> DaskResourcePool:
    return DaskResourcePool([ranks], **options)


def slots_are_free(client: Client, ranks: int = 4) -> None:
    """The whole cluster is free for the next group, at once, and empty after it."""
    with DaskWorkerGroup(pool(ranks), DaskClassWithInitArgs(Good), client=client, placement_timeout_s=LIMIT_S) as group:
        assert group.who() == [(rank, ranks) for rank in range(ranks)]
    assert_no_leaks(client, timeout_s=LIMIT_S)


# ---------------------------------------------------------------------- arguments that cannot work


def test_not_a_class() -> None:
    with pytest.raises(errors.RegistrationError, match=r"needs a class.*instance"):
        DaskClassWithInitArgs("Good", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((pool(1), Good), r"must be wrapped: DaskClassWithInitArgs"),
        ((pool(1), None), r"needs a DaskResourcePool and a DaskClassWithInitArgs"),
        ((None, DaskClassWithInitArgs(Good)), r"needs a DaskResourcePool and a DaskClassWithInitArgs"),
        ((ResourcePool([1]), DaskClassWithInitArgs(Good)), r"must be a DaskResourcePool, got ResourcePool"),
        (([1], DaskClassWithInitArgs(Good)), r"must be a DaskResourcePool, got list"),
    ],
)
def test_wrong_arguments(arguments: Any, complaint: str, inproc_client: Client) -> None:
    with pytest.raises(errors.RegistrationError, match=complaint):
        DaskWorkerGroup(*arguments)


def test_an_option_that_does_not_exist(inproc_client: Client) -> None:
    with pytest.raises(TypeError, match="ray_wait_register_center_timeout"):
        DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good), ray_wait_register_center_timeout=3)  # type: ignore[call-arg]


def test_a_plain_class_with_init_args_will_do(inproc_client: Client) -> None:
    with DaskWorkerGroup(pool(2), ClassWithInitArgs(Good, value=5)) as group:
        assert group.read() == [(5, 0)] * 2


@pytest.mark.parametrize(
    "name",
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"],
)
def test_protected_variables(name: str, inproc_client: Client) -> None:
    assert name in Worker.env_keys()
    with pytest.raises(errors.RegistrationError, match=rf"worker_env may not set {name}"):
        DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good), worker_env={"FINE": "1", name: "1"})


def test_bad_names_of_variables(inproc_client: Client) -> None:
    with pytest.raises(errors.RegistrationError, match="bad name 'A=B'"):
        DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good), worker_env={"A=B": "1"})


@pytest.mark.parametrize("limit", ["start_timeout_s", "placement_timeout_s"])
@pytest.mark.parametrize("value", [-1, "3s", True])
def test_time_limits_are_numbers(limit: str, value: Any, inproc_client: Client) -> None:
    with pytest.raises(errors.RegistrationError, match="a time limit is a number of seconds"):
        DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good), **{limit: value})


# ---------------------------------------------------------------------- clients


def test_no_client() -> None:
    with pytest.raises(errors.PlacementError, match=r"no Dask client.*Groups never start a cluster"):
        DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good))


def test_a_closed_client(client: Client) -> None:
    own = Client(client.scheduler.address, timeout=30, set_as_default=False)
    own.close()
    with pytest.raises(errors.PlacementError, match="client is closed"):
        DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good), client=own)


def test_an_asynchronous_client(client: Client) -> None:
    async def attempt() -> None:
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=False) as own:
            with pytest.raises(errors.PlacementError, match="synchronous client"):
                DaskWorkerGroup(pool(1), DaskClassWithInitArgs(Good), client=own)

    asyncio.run(attempt())


# ---------------------------------------------------------------------- hosts


def test_more_ranks_than_hosts(client: Client) -> None:
    began = time.monotonic()
    with pytest.raises(errors.InsufficientResourcesError) as caught:
        DaskWorkerGroup(pool(5), DaskClassWithInitArgs(Good), client=client)
    # Waiting would not help: there are four slots, all of them free.
    assert time.monotonic() - began < LIMIT_S - 5
    assert (caught.value.asked, caught.value.present, caught.value.free) == (5, 4, 4)
    assert "5" in str(caught.value) and "4" in str(caught.value)
    slots_are_free(client)


def test_other_versions(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {**probe.own_versions(), "torch": "1.0.1", "python": "2.7"}
    monkeypatch.setattr(probe, "own_versions", lambda: mine)
    with pytest.raises(errors.VersionMismatchError) as caught:
        DaskWorkerGroup(pool(2), DaskClassWithInitArgs(Good), client=client)
    text = str(caught.value)
    theirs = torch.__version__.split("+")[0]
    assert f"torch: 1.0.1 here, {theirs} on 2 host(s)" in text and "python: 2.7 here" in text
    assert "numpy" not in text
    assert any(address in text for address in client.nthreads())
    monkeypatch.undo()
    slots_are_free(client)


def test_another_patch_release_is_no_other_version(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {**probe.own_versions(), "numpy": ".".join(np.__version__.split(".")[:2]) + ".99"}
    monkeypatch.setattr(probe, "own_versions", lambda: mine)
    slots_are_free(client)


def test_a_host_that_stops_answering_while_slots_are_taken(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(start, "call_host", silence)
    began = time.monotonic()
    with pytest.raises(errors.PlacementError) as caught:
        DaskWorkerGroup(pool(2), DaskClassWithInitArgs(Good), client=client, placement_timeout_s=0.5)
    assert time.monotonic() - began < LIMIT_S
    assert "tcp://" in str(caught.value)
    monkeypatch.undo()
    slots_are_free(client)


# ---------------------------------------------------------------------- __init__


@pytest.mark.parametrize("how", ["plain", "barrier"])
def test_init_raises_on_one_rank(how: str, client: Client) -> None:
    began = time.monotonic()
    with pytest.raises(errors.RankFailedError) as caught:
        DaskWorkerGroup(pool(4), DaskClassWithInitArgs(BadInit, how), client=client)
    assert time.monotonic() - began < LIMIT_S
    error = caught.value
    assert error.method == "__init__" and isinstance(error.__cause__, ValueError)
    assert "rank 1 does not want to" in str(error) and "rank 1" in str(error) and error.hosts[1] in str(error)
    assert str(error.failures[1]) == "rank 1 does not want to"
    slots_are_free(client)


def test_init_raises_while_others_wait_for_ever(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    began = time.monotonic()
    with dask.config.set({"controller.close-timeout": 0.5}), pytest.raises(errors.RankFailedError) as caught:
        DaskWorkerGroup(pool(4), DaskClassWithInitArgs(BadInit, "hold", str(path)), client=client)
    assert time.monotonic() - began < LIMIT_S
    assert set(caught.value.failures) == {1} and caught.value.running == (0, 2, 3)
    # A thread cannot be ended from outside. The slots of these ranks are held until they return, and then free.
    busy = [rank for host in client.run(probe.describe_host).values() for rank in host["ranks"]]
    assert {(rank["rank"], rank["state"]) for rank in busy} == {(rank, "closing") for rank in (0, 2, 3)}
    path.touch()
    slots_are_free(client)


def test_init_that_does_not_return(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    # What hosts import when they are first asked is not to count against the two seconds.
    client.run(probe.describe_host)
    began = time.monotonic()
    with dask.config.set({"controller.close-timeout": 0.5}), pytest.raises(errors.GroupStartTimeoutError) as caught:
        DaskWorkerGroup(pool(4), DaskClassWithInitArgs(SlowInit, str(path), 2), client=client, start_timeout_s=2)
    took = time.monotonic() - began
    assert 1.5 < took < LIMIT_S
    text = str(caught.value)
    assert "did not return on ranks [2]" in text and "done on [0, 1, 3]" in text and "start_timeout_s" in text
    path.touch()
    slots_are_free(client)


def test_a_host_that_dies_during_init(make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    path = tmp_path / "never"

    class Suicide(Worker):
        def __init__(self, path: str) -> None:
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for_file(path)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def who(self) -> int:
            return self.rank

    with Client(make_cluster(2), timeout=30) as client:
        client.run(probe.describe_host)
        began = time.monotonic()
        with dask.config.set({"controller.close-timeout": 0.5}), pytest.raises(errors.RankLostError) as caught:
            DaskWorkerGroup(pool(2), DaskClassWithInitArgs(Suicide, str(path)), client=client)
        assert time.monotonic() - began < LIMIT_S
        assert (caught.value.rank, caught.value.method) == (1, "__init__")
        path.touch()
        client.wait_for_workers(2, timeout=LIMIT_S)
        slots_are_free(client, 2)


def test_arguments_of_init_that_cannot_travel(client: Client) -> None:
    import threading

    with pytest.raises(errors.UnsupportedTypeError, match="lock"):
        DaskWorkerGroup(pool(2), DaskClassWithInitArgs(Good, threading.Lock()), client=client)
    slots_are_free(client)


def test_futures_among_the_arguments_of_init(client: Client) -> None:
    future = client.submit(sum, [1, 2], pure=False)
    failed = client.submit(lambda: 1 / 0, pure=False)
    with DaskWorkerGroup(pool(2), DaskClassWithInitArgs(Good, [future]), client=client) as group:
        assert group.read() == [([3], 0)] * 2
    with pytest.raises(ZeroDivisionError):
        DaskWorkerGroup(pool(2), DaskClassWithInitArgs(Good, failed), client=client)
    del group, future, failed
    forget_failures(client)
    slots_are_free(client)


# ---------------------------------------------------------------------- calls that never reach a rank


@pytest.fixture
def group(inproc_client: Client) -> Iterator[DaskWorkerGroup]:
    with DaskWorkerGroup(pool(4), DaskClassWithInitArgs(Good), client=inproc_client) as group:
        yield group


def _batch(rows: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)})


@pytest.mark.parametrize(
    ("method", "args", "error"),
    [
        ("rows", (_batch(7),), errors.DispatchError),
        ("rows", (_batch(8), _batch(4)), errors.DispatchError),
        ("rows", ([1, 2, 3],), errors.DispatchError),
        ("rows", (), errors.DispatchError),
        ("listed", ([1, 2, 3],), errors.DispatchError),
        ("listed", (5,), errors.DispatchError),
        ("apply", (_batch(4), _batch(4)), errors.DispatchError),
        ("apply", (len, _batch(5)), errors.DispatchError),
        ("take", (), errors.DispatchError),
        ("take", (1, 2), errors.DispatchError),
        ("take", ((x for x in ()),), errors.UnsupportedTypeError),
    ],
)
def test_wrong_arguments_never_reach_a_rank(group: DaskWorkerGroup, method: str, args: Any, error: Any) -> None:
    with pytest.raises(error):
        getattr(group, method)(*args)
    assert group.read() == [(None, 0)] * 4


def test_names_that_the_group_does_not_have(group: DaskWorkerGroup) -> None:
    with pytest.raises(errors.NotRegisteredError, match=r"(?s)unmarked.*@register"):
        group.unmarked()
    with pytest.raises(AttributeError, match=r"no member 'lister'; did you mean listed"):
        group.lister([1])
    with pytest.raises(AttributeError) as caught:
        group.something_else_entirely()
    assert "did you mean" not in str(caught.value)
