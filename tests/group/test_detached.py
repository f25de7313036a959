"""Groups that outlive their program, and groups that are made or used inside Dask tasks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    Dispatch,
    Worker,
    create_colocated_worker_cls,
    destroy_detached,
    errors,
    list_detached,
    register,
)
from dask_controller.group import detached as detached_groups
from tests.helpers import assert_no_leaks

#: A second program has to import torch first.
PROGRAM_LIMIT_S = 100.0
LIMIT_S = 30.0


class Counter(Worker):
    def __init__(self, start: int = 0) -> None:
        self.total = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> tuple[int, int]:
        self.total += amount
        return self.rank, self.total

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def add_later(self, amount: int) -> int:
        self.total += amount
        return self.total

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 2})

    def unmarked(self) -> tuple[int, str | None]:
        return self.rank, os.environ.get("RANK")


def make_group(client: Client, name: str | None, ranks: int = 2, **options: Any) -> DaskWorkerGroup:
    pool = DaskResourcePool(
        [ranks], use_gpu=options.pop("use_gpu", False), detached=options.pop("pool_detached", False)
    )
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(Counter, start=10), client=client, name_prefix=name, **options)


@pytest.fixture
def clean(client: Client) -> Iterator[Client]:
    """A client whose detached groups end with the test, also where it fails."""
    yield client
    for name in list_detached(client):
        destroy_detached(name, client)


def run_program(text: str, *arguments: str, expect: int = 0) -> str:
    """Run a program of its own, whose ``__main__`` is what is written here, and return what it printed."""
    program = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT_S,
        env={**os.environ, "DASK_CONTROLLER__PROBE_TIMEOUT": "100s"},
    )
    assert program.returncode == expect, program.stderr
    return program.stdout


MAKER = """
    import json, os, signal, sys
    from distributed import Client
    from dask_controller import DaskClassWithInitArgs, DaskResourcePool, DaskWorkerGroup, Dispatch, Worker, register

    class Model(Worker):
        def __init__(self, start):
            self.total = start

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def add(self, amount):
            self.total += amount
            return self.rank, self.total

    address, ending = sys.argv[1:]
    client = Client(address)
    group = DaskWorkerGroup(
        DaskResourcePool([2]), DaskClassWithInitArgs(Model, 100), name_prefix="model", detached=True,
        worker_env={"TEST_DETACHED": "yes"},
    )
    print(json.dumps([group.add(1), group.worker_names, group.hosts, group.master_port]), flush=True)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ending == "closed":
        group.close()
        client.close()
"""


@pytest.mark.parametrize("ending", ["closed", "returned", "killed"])
def test_a_group_outlives_the_program_that_made_it(clean: Client, ending: str) -> None:
    client = clean
    printed = run_program(MAKER, client.scheduler.address, ending, expect=-signal.SIGKILL if ending == "killed" else 0)
    first, names, hosts, port = json.loads(printed)
    assert first == [[0, 101], [1, 101]]

    assert list_detached(client) == ["model"]
    # Its class came from a __main__ that is gone.
    group = DaskWorkerGroup.from_detached("model", client=client)
    assert (group.worker_names, group.hosts, group.master_port, group.world_size) == (names, hosts, port, 2)
    assert group.add(2) == [(0, 103), (1, 103)]
    assert group.execute_all_sync("add", [1, 2]) == [(0, 104), (1, 105)]
    assert [status["state"] for status in group.status()] == ["ready", "ready"]
    group.close()
    with pytest.raises(errors.GroupClosedError):
        group.add(1)

    # Letting go of it is all that close() does, and so is dropping it.
    again = DaskWorkerGroup(worker_names=names, client=client)
    assert again.add(0) == [(0, 104), (1, 105)]
    del again
    # Its slots are taken.
    with pytest.raises(errors.InsufficientResourcesError, match="'model'") as caught:
        make_group(client, None, 4, use_gpu=True, placement_timeout_s=0.6)
    assert sorted(caught.value.held) == sorted(hosts)
    del caught

    destroy_detached("model", client)
    assert list_detached(client) == []
    assert_no_leaks(client)
    with make_group(client, None, 4, use_gpu=True, placement_timeout_s=LIMIT_S) as group:
        assert len(group.add(0)) == 4
    assert set(client.run(os.environ.get, "TEST_DETACHED").values()) == {None}


# ---------------------------------------------------------------------- within one program


def test_attaching_by_name_by_rank_names_and_by_handles(clean: Client) -> None:
    group = make_group(clean, "counter", detached=True)
    assert group.add(1) == [(0, 11), (1, 11)]
    handles = group.workers
    for attach in (
        lambda: DaskWorkerGroup.from_detached("counter", client=clean),
        lambda: DaskWorkerGroup.from_detached(worker_names=group.worker_names, client=clean),
        lambda: DaskWorkerGroup.from_detached(worker_handles=handles, client=clean),
        lambda: DaskWorkerGroup(worker_handles=handles, client=clean),
        lambda: DaskWorkerGroup.from_detached(
            worker_names=group.worker_names, dask_cls_with_init=DaskClassWithInitArgs(Counter), client=clean
        ),
    ):
        with attach() as attached:
            assert attached.name == "counter"
            assert attached.add(0) == [(0, 11), (1, 11)]
            assert attached.execute_all_sync("unmarked") == [(0, "0"), (1, "1")]
            assert clean.gather(attached.add_later(0)) == [11, 11]
    # Its first handle is as good as ever.
    assert group.add(1) == [(0, 12), (1, 12)]


def test_a_group_on_a_detached_pool_is_detached(clean: Client) -> None:
    make_group(clean, "on pool", pool_detached=True).close()
    assert list_detached(clean) == ["on pool"]
    with DaskWorkerGroup.from_detached("on pool", client=clean) as group:
        assert group.add(0) == [(0, 10), (1, 10)]


def test_roles_of_a_detached_group(clean: Client) -> None:
    cia = create_colocated_worker_cls({"a": DaskClassWithInitArgs(Counter, 1), "b": DaskClassWithInitArgs(Counter, 2)})
    DaskWorkerGroup(DaskResourcePool([2], use_gpu=False), cia, client=clean, name_prefix="roles", detached=True).close()
    with DaskWorkerGroup.from_detached("roles", client=clean) as group:
        assert group.spawn({"a", "b"})["b"].add(1) == [(0, 3), (1, 3)]
        assert group.a_add(1) == [(0, 2), (1, 2)]


def test_two_clients_drive_one_group(clean: Client) -> None:
    with Client(clean.scheduler.address, timeout=LIMIT_S, set_as_default=False) as other:
        first = make_group(other, "shared", detached=True)
        second = DaskWorkerGroup.from_detached("shared", client=clean)
        assert first.add(1) == [(0, 11), (1, 11)]
        assert second.add(1) == [(0, 12), (1, 12)]
        data = DataProto.from_dict(tensors={"x": torch.arange(4)})
        mine, theirs = second.double(data), first.double(data)
        assert mine.get().batch["x"].tolist() == theirs.get().batch["x"].tolist() == [0, 2, 4, 6]
        # A handle is fed with what the other one made.
        assert second.double(mine).get().batch["x"].tolist() == [0, 4, 8, 12]
        del mine, theirs
        assert list_detached(other) == list_detached(clean) == ["shared"]
    # The client that made it is gone.
    assert second.add(1) == [(0, 13), (1, 13)]
    with pytest.raises(errors.GroupClosedError, match="client"):
        first.add(1)
    second.close()


def test_a_name_is_taken_once(clean: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(clean, "counter", detached=True)
    with pytest.raises(errors.PlacementError, match="a detached group 'counter' exists already.*from_detached"):
        make_group(clean, "counter", detached=True)
    # Two programs that look at the same time both find the name free; one of them is refused afterwards.
    monkeypatch.setattr(detached_groups, "list_detached", lambda client: [])
    with pytest.raises(errors.PlacementError, match="a detached group 'counter' exists already"):
        make_group(clean, "counter", detached=True)
    monkeypatch.undo()
    assert list_detached(clean) == ["counter"]
    assert group.add(0) == [(0, 10), (1, 10)]
    # A group that is not detached may have the name, and room was left for it.
    with make_group(clean, "counter") as other:
        assert not set(other.hosts) & set(group.hosts)
    destroy_detached("counter", clean)
    make_group(clean, "counter", detached=True)
    assert list_detached(clean) == ["counter"]


def test_names_that_nobody_has(clean: Client) -> None:
    with pytest.raises(errors.PlacementError, match="no detached group 'none'; there are none"):
        destroy_detached("none", clean)
    group = make_group(clean, "counter", detached=True)
    for ask in (
        lambda: destroy_detached("countr", clean),
        lambda: DaskWorkerGroup.from_detached("countr", client=clean),
    ):
        with pytest.raises(errors.PlacementError, match=r"no detached group 'countr'; there are \['counter'\]"):
            ask()
    with pytest.raises(errors.PlacementError, match=r"no detached group has the ranks \['x'\].*'counter'"):
        DaskWorkerGroup.from_detached(worker_names=["x"], client=clean)
    with pytest.raises(errors.PlacementError, match="needs the name of a group or the names of its ranks"):
        DaskWorkerGroup.from_detached(client=clean)
    destroy_detached("counter", clean)
    with pytest.raises(errors.PlacementError, match="no detached group 'counter'"):
        destroy_detached("counter", clean)
    with pytest.raises(errors.RankError):
        group.add(1)


def test_an_ordinary_group_is_not_listed(client: Client) -> None:
    with make_group(client, "plain") as group:
        assert list_detached(client) == []
        with pytest.raises(errors.PlacementError, match="no detached group has the ranks"):
            DaskWorkerGroup.from_detached(worker_names=group.worker_names, client=client)


# ---------------------------------------------------------------------- inside Dask tasks


def attach_in_task(names: list[str], amount: int) -> Any:
    with DaskWorkerGroup.from_detached(worker_names=names) as group:
        later = group.add_later(0)
        return group.add(amount), group.client.gather(later), group.execute_rank_zero_sync("unmarked")


def test_a_task_attaches_to_a_group(clean: Client) -> None:
    # On all hosts: some task runs on a host of a rank, whose only thread it has.
    group = make_group(clean, "counter", 4, detached=True)
    for n, host in enumerate(group.hosts):
        task = clean.submit(attach_in_task, group.worker_names, 1, workers=[host], pure=False)
        added, before, unmarked = task.result(timeout=LIMIT_S)
        assert added == [(rank, 11 + n) for rank in range(4)]
        assert before == [10 + n] * 4
        assert unmarked == (0, "0")


def build_in_task(ranks: int, use_gpu: bool) -> Any:
    data = DataProto.from_dict(tensors={"x": torch.arange(2 * ranks)})
    pool = DaskResourcePool([ranks], use_gpu=use_gpu)
    with DaskWorkerGroup(pool, DaskClassWithInitArgs(Counter, 5)) as group:
        futures = group.double(data)
        twice = group.double(futures)
        return group.add(1), futures.get().batch["x"].tolist(), twice.get().batch["x"].tolist(), len(set(group.hosts))


@pytest.mark.parametrize("use_gpu", [False, True])
def test_a_task_makes_a_group_on_hosts_with_one_thread(client: Client, use_gpu: bool) -> None:
    assert {info["nthreads"] for info in client.scheduler_info()["workers"].values()} == {1}
    for _ in range(2):
        task = client.submit(build_in_task, 4, use_gpu, pure=False)
        added, once, twice, hosts = task.result(timeout=LIMIT_S)
        assert added == [(rank, 6) for rank in range(4)]
        assert once == [0, 2, 4, 6, 8, 10, 12, 14]
        assert twice == [0, 4, 8, 12, 16, 20, 24, 28]
        assert hosts == 4
        del task
    assert client.submit(sum, [1, 2]).result(timeout=LIMIT_S) == 3


def fail_in_task() -> Any:
    group = DaskWorkerGroup(DaskResourcePool([5], use_gpu=False), DaskClassWithInitArgs(Counter))
    return group.world_size


def test_a_task_whose_group_cannot_be_made_gives_its_thread_back(client: Client) -> None:
    tasks = [client.submit(fail_in_task, workers=[host], pure=False) for host in client.scheduler_info()["workers"]]
    for task in tasks:
        assert isinstance(task.exception(timeout=LIMIT_S), errors.InsufficientResourcesError)
    assert client.gather(client.map(abs, [-1, -2, -3, -4], pure=False)) == [1, 2, 3, 4]


def leave_in_task(name: str) -> list[str]:
    pool = DaskResourcePool([2], use_gpu=False)
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(Counter, 7), name_prefix=name, detached=True).worker_names


def test_a_task_leaves_a_detached_group_behind(clean: Client) -> None:
    names = clean.submit(leave_in_task, "left", pure=False).result(timeout=LIMIT_S)
    assert list_detached(clean) == ["left"]
    with DaskWorkerGroup.from_detached("left", client=clean) as group:
        assert group.worker_names == names
        assert group.add(1) == [(0, 8), (1, 8)]


def drop_in_task() -> int:
    group = DaskWorkerGroup(DaskResourcePool([2]), DaskClassWithInitArgs(Counter))
    return len(group.add(1))


def test_a_task_that_drops_its_group_leaves_nothing(client: Client) -> None:
    assert client.submit(drop_in_task, pure=False).result(timeout=LIMIT_S) == 2
    assert_no_leaks(client)


# ---------------------------------------------------------------------- hosts that go


def test_a_detached_group_that_lost_a_host_can_still_be_destroyed(
    make_cluster: Callable[..., LocalCluster],
) -> None:
    with Client(make_cluster(2), timeout=LIMIT_S) as client:
        group = make_group(client, "counter", 2, detached=True)
        pid = group.status()[1]["pid"]
        group.close()
        victim = group.hosts[1]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while victim in client.scheduler_info()["workers"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert list_detached(client) == ["counter"]
        with pytest.raises(errors.RankLostError, match=f"rank 1 of group 'counter' was lost.*{victim}"):
            DaskWorkerGroup.from_detached("counter", client=client)
        destroy_detached("counter", client)
        assert list_detached(client) == []
        assert_no_leaks(client)
