"""Placement and environment: slots, impossible pools, uneven nodes, ports, masks, variables, torch on ranks (C1-C7)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.config
import pytest
import torch
import torch.distributed as dist
from distributed import Client, Future, LocalCluster, secede
from distributed import Worker as DaskWorker

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    Dispatch,
    Worker,
    errors,
    merge_resource_pool,
    register,
    split_resource_pool,
)
from dask_controller.group import start
from tests.helpers import assert_no_leaks

#: Nothing in these tests takes long; a wait that lasts this long hangs.
LIMIT_S = 30.0

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Ask again and again until the answer is true, and return it."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.01)
    return answer


class Env(Worker):
    """Tells what it knows of itself and what its process says."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names or VARIABLES]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def own(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mask(self) -> tuple[str, str | None]:
        return self.get_cuda_visible_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")


def make_group(
    client: Client, sizes: list[int] | DaskResourcePool, cls: type = Env, *, use_gpu: bool = True, **options: Any
) -> DaskWorkerGroup:
    pool = sizes if isinstance(sizes, DaskResourcePool) else DaskResourcePool(sizes, use_gpu=use_gpu)
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(cls), client=client, **options)


def increment(value: int) -> int:
    return value + 1


def add(left: int, right: int) -> int:
    return left + right


def state_on_hosts(client: Client, future: Future) -> set[str]:
    """The states of a task on the hosts that have heard of it."""

    def ask(key: str, dask_worker: DaskWorker) -> str | None:
        task = dask_worker.state.tasks.get(key)
        return None if task is None else task.state

    return {state for state in client.run(ask, future.key).values() if state is not None}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a starting group looks at what the hosts offer."""
    seen: list[int] = []
    probe = start.probe_hosts

    def counting(client: Client, addresses: Any, timeout_s: float) -> Any:
        seen.append(len(addresses))
        return probe(client, addresses, timeout_s)

    monkeypatch.setattr(start, "probe_hosts", counting)
    return seen


# ---------------------------------------------------------------------- C1 slots


def wait_constrained(client: Client, futures: list[Future]) -> None:
    """Until every task has reached a host and waits there for its resource."""
    for future in futures:
        until(lambda future=future: state_on_hosts(client, future) == {"constrained"}, f"{future} waits for its GPU")


@pytest.mark.parametrize("ending", ["closed", "dropped"])
def test_a_slot_is_held_for_the_life_of_the_group(client: Client, ending: str) -> None:
    group = make_group(client, [4], name_prefix="holder")
    holder_pool = group.resource_pool.pool_id
    with Client(client.scheduler.address, timeout=LIMIT_S, set_as_default=False) as other:
        gpu_tasks = [other.submit(increment, n, resources={"GPU": 1}, pure=False) for n in range(4)]
        wait_constrained(client, gpu_tasks)
        # Hosts go on with everything that asks no slot, submitted later or not.
        cpu_tasks = [other.submit(add, n, 1, pure=False) for n in range(8)]
        assert other.gather(cpu_tasks) == list(range(1, 9))
        assert not any(future.done() for future in gpu_tasks)

        begin = time.monotonic()
        with pytest.raises(errors.InsufficientResourcesError) as caught:
            make_group(client, [1], placement_timeout_s=1.0)
        assert time.monotonic() - begin < LIMIT_S
        error = caught.value
        assert (error.asked, error.present, error.free) == (1, 4, 0)
        assert sorted(error.held) == sorted(group.hosts)
        assert all("'holder'" in who and holder_pool in who for who in error.held.values())
        assert "'holder'" in str(error)
        assert "create_colocated_worker_cls" in str(error)
        del caught, error

        # The group lives on, and its slots are still taken.
        assert group.own() == [(rank, 4, rank, 4) for rank in range(4)]
        assert not any(future.done() for future in gpu_tasks)
        if ending == "closed":
            group.close()
        else:
            del group
            gc.collect()
        assert [future.result(timeout=LIMIT_S) for future in gpu_tasks] == [1, 2, 3, 4]
        del gpu_tasks, cpu_tasks
    with make_group(client, [4], placement_timeout_s=LIMIT_S) as second:
        assert second.own() == [(rank, 4, rank, 4) for rank in range(4)]


def test_a_new_group_waits_for_the_slots_of_one_that_closes(client: Client, looks: list[int]) -> None:
    first = make_group(client, [4])
    seen = len(looks)
    found: list[Any] = []

    def wait_for_slots() -> None:
        with make_group(client, [2], placement_timeout_s=LIMIT_S) as second:
            found.append(second.own())

    thread = threading.Thread(target=wait_for_slots)
    thread.start()
    until(lambda: len(looks) > seen + 1, "the second group has looked twice")
    assert not found
    first.close()
    thread.join(LIMIT_S)
    assert found == [[(0, 2, 0, 2), (1, 2, 1, 2)]]


def test_a_group_waits_for_a_task_that_holds_the_slot(client: Client, tmp_path: Any, looks: list[int]) -> None:
    path = str(tmp_path / "go")

    def hold(path: str) -> str:
        # The host's only thread is free for others; the resource is not.
        secede()
        deadline = time.monotonic() + LIMIT_S
        while not os.path.exists(path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return path

    hosts = list(client.scheduler_info()["workers"])
    tasks = [client.submit(hold, path, workers=[host], resources={"GPU": 1}, pure=False) for host in hosts]
    for task in tasks:
        until(lambda task=task: state_on_hosts(client, task) == {"long-running"}, "the task runs")
    with pytest.raises(errors.InsufficientResourcesError) as caught:
        make_group(client, [1], placement_timeout_s=0.6)
    assert len(caught.value.held) == 4
    for task in tasks:
        assert any(f"task {task.key}" in who for who in caught.value.held.values())
    del caught
    # Without a slot there is room.
    with make_group(client, [1], use_gpu=False) as group:
        assert group.own() == [(0, 1, 0, 1)]
    with open(path, "w"):
        pass
    client.gather(tasks)
    with make_group(client, [4], placement_timeout_s=LIMIT_S) as group:
        assert group.world_size == 4


# ---------------------------------------------------------------------- C2 impossible pools


@pytest.mark.parametrize(
    ("pool", "counts", "complaints"),
    [
        (lambda: DaskResourcePool([5]), (5, 4, 4), ["asks 5 GPU slots", "the whole cluster has 4 GPU slot(s)"]),
        (lambda: DaskResourcePool([3, 2]), (5, 4, 4), ["asks 5 GPU slots as [3, 2]", "has 4 GPU slot(s)"]),
        (lambda: DaskResourcePool([5], use_gpu=False), (5, 4, 4), ["asks 5 hosts", "4 host(s)"]),
        (
            lambda: DaskResourcePool([1], resource_name="FPGA"),
            (1, 0, 0),
            ["none of the 4 hosts declares the resource 'FPGA'; they declare GPU"],
        ),
        (
            lambda: DaskResourcePool([1], resource_name="gpu"),
            (1, 0, 0),
            ["none of the 4 hosts declares the resource 'gpu'", "Did you mean resource_name='GPU'?"],
        ),
    ],
    ids=["too many", "too many in two entries", "too many hosts", "no such resource", "near name"],
)
def test_a_pool_that_can_never_fit_is_refused_at_once(
    client: Client,
    looks: list[int],
    pool: Callable[[], DaskResourcePool],
    counts: tuple[int, int, int],
    complaints: list[str],
) -> None:
    with pytest.raises(errors.InsufficientResourcesError) as caught:
        make_group(client, pool(), placement_timeout_s=100, start_timeout_s=100)
    assert len(looks) == 1, "it waited for what cannot come"
    error = caught.value
    assert (error.asked, error.present, error.free) == counts
    for complaint in complaints:
        assert complaint in str(error)
    assert error.held == {}
    assert_no_leaks(client)


def test_an_impossible_pool_tells_who_holds_what_is_there(client: Client, looks: list[int]) -> None:
    with make_group(client, [3], name_prefix="holder") as group:
        del looks[:]
        with pytest.raises(errors.InsufficientResourcesError) as caught:
            make_group(client, [5], placement_timeout_s=100)
        assert len(looks) == 1
        assert (caught.value.asked, caught.value.present, caught.value.free) == (5, 4, 1)
        assert sorted(caught.value.held) == sorted(group.hosts)
        assert str(caught.value).count("'holder'") == 3


def test_two_slots_on_one_host_need_two_hosts(make_cluster: Callable[..., LocalCluster], looks: list[int]) -> None:
    with Client(make_cluster(1, processes=False, resources={"GPU": 2}), timeout=LIMIT_S) as client:
        with pytest.raises(errors.InsufficientResourcesError) as caught:
            make_group(client, [2], placement_timeout_s=100)
        assert len(looks) == 1
        (address,) = client.scheduler_info()["workers"]
        assert f"a host carries one rank, however much GPU it declares ({address} declares GPU=2)" in str(caught.value)
        assert 'Start one Dask worker per GPU, each with --resources "GPU=1"' in str(caught.value)
        assert_no_leaks(client)


def test_a_cluster_without_hosts(make_cluster: Callable[..., LocalCluster]) -> None:
    with Client(make_cluster(0, processes=False), timeout=LIMIT_S) as client:
        begin = time.monotonic()
        with pytest.raises(errors.InsufficientResourcesError, match="no Dask workers.*client.wait_for_workers"):
            make_group(client, [1], placement_timeout_s=0.5)
        assert time.monotonic() - begin < LIMIT_S


class FailsOnOne(Worker):
    def __init__(self) -> None:
        if self.rank == 1:
            raise ValueError("no weights")


def test_a_failed_start_gives_every_slot_back(client: Client) -> None:
    with pytest.raises(errors.RankFailedError, match="rank 1.*no weights"):
        make_group(client, [4], FailsOnOne)
    assert_no_leaks(client)
    with make_group(client, [4], placement_timeout_s=LIMIT_S) as group:
        assert group.world_size == 4


# ---------------------------------------------------------------------- C3 uneven nodes, parts of pools


def test_uneven_nodes(client: Client) -> None:
    with make_group(client, [2, 1]) as group:
        assert group.own() == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert group.environment(*names) == [["0", "3", "0", "2"], ["1", "3", "1", "2"], ["2", "3", "0", "1"]]
        addresses = {tuple(pair) for pair in group.environment("MASTER_ADDR", "MASTER_PORT")}
        assert addresses == {(group.master_address, group.master_port)}
        hosts = group.hosts
        assert len(set(hosts)) == 3
    # The same order each time, also for another pool of the same form.
    with make_group(client, [2, 1]) as group:
        assert group.hosts == hosts


def test_two_groups_on_parts_of_one_pool_at_once(client: Client) -> None:
    pool = DaskResourcePool([2, 1])
    with make_group(client, pool) as whole:
        hosts = whole.hosts
    first, second = split_resource_pool(pool, [1, 2])
    with make_group(client, first) as one, make_group(client, second) as two:
        assert one.own() == [(0, 1, 0, 1)]
        # The second part has what is left of the first node, and the second node.
        assert two.own() == [(0, 2, 0, 1), (1, 2, 0, 1)]
        assert one.hosts + two.hosts == hosts
        assert (one.master_address, one.master_port) != (two.master_address, two.master_port)
    merged = merge_resource_pool(second, first)
    with make_group(client, merged) as group:
        assert group.hosts == [*hosts[1:], hosts[0]]
        assert group.own() == [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]


def test_parts_by_size_and_parts_of_parts(client: Client) -> None:
    pool = DaskResourcePool([4])
    halves = split_resource_pool(pool, 2)
    quarters = split_resource_pool(halves[1], 1)
    with (
        make_group(client, halves[0]) as half,
        make_group(client, quarters[0]) as a,
        make_group(client, quarters[1]) as b,
    ):
        assert half.own() == [(0, 2, 0, 2), (1, 2, 1, 2)]
        assert a.own() == b.own() == [(0, 1, 0, 1)]
        hosts = half.hosts + a.hosts + b.hosts
        assert len(set(hosts)) == 4
    with make_group(client, pool) as group:
        assert group.hosts == hosts


def test_a_second_group_on_the_same_slots_is_refused_with_the_ways_out(client: Client) -> None:
    pool = DaskResourcePool([2])
    with make_group(client, pool, name_prefix="first") as group:
        with pytest.raises(errors.InsufficientResourcesError) as caught:
            make_group(client, pool, placement_timeout_s=0.6)
        text = str(caught.value)
        assert "'first'" in text
        assert "A host carries one live group. Close that group, start more Dask workers" in text
        assert "create_colocated_worker_cls" in text
        assert sorted(caught.value.held) == sorted(group.hosts)
        part = split_resource_pool(pool, 1)[1]
        with pytest.raises(errors.InsufficientResourcesError) as caught:
            make_group(client, part, placement_timeout_s=0.6)
        assert list(caught.value.held) == [group.hosts[1]]
        del caught
        hosts = group.hosts
    with make_group(client, pool, placement_timeout_s=LIMIT_S) as group:
        assert group.hosts == hosts


# ---------------------------------------------------------------------- C4 ports


class Gloo(Worker):
    """Joins a process group when it is told to."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join(self) -> int:
        dist.init_process_group("gloo")
        return dist.get_world_size()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def leave(self) -> None:
        dist.destroy_process_group()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def total(self, value: int) -> int:
        tensor = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(tensor)
        return int(tensor.item())


def test_groups_made_first_and_joined_later_never_meet_on_a_port(client: Client) -> None:
    for round_ in range(5):
        groups = [make_group(client, [1], Gloo, use_gpu=False) for _ in range(4)]
        assert len({group.master_port for group in groups}) == 4
        assert len({group.hosts[0] for group in groups}) == 4
        joined = [future for group in groups for future in group.join()]
        assert client.gather(joined) == [1] * 4
        totals = [group.total(10 * round_ + i) for i, group in enumerate(groups)]
        assert [client.gather(futures) for futures in totals] == [[10 * round_ + i] for i in range(4)]
        del joined, totals
        for group in groups:
            group.close()


def test_two_groups_of_two_join_at_the_same_time(client: Client) -> None:
    with make_group(client, [2], Gloo) as left, make_group(client, [2], Gloo) as right:
        for _ in range(5):
            joined = [*left.join(), *right.join()]
            assert client.gather(joined) == [2] * 4
            totals = [*left.total(1), *right.total(10)]
            assert client.gather(totals) == [3, 3, 30, 30]
            client.gather([*left.leave(), *right.leave()])


@pytest.fixture
def three_ports() -> Iterator[int]:
    """The first of three neighbouring ports; somebody else listens on the second."""
    for first in range(21_000, 60_000, 3):
        held: list[socket.socket] = []
        try:
            for port in range(first, first + 3):
                held.append(socket.create_server(("", port)))
        except OSError:
            for each in held:
                each.close()
            continue
        held[0].close()
        held[2].close()
        yield first
        held[1].close()
        return
    raise AssertionError("no three free ports")


def test_a_tiny_range_of_ports_with_one_taken(client: Client, three_ports: int) -> None:
    first, last = three_ports, three_ports + 2
    with dask.config.set({"controller.master-port-range": [first, last]}):
        with make_group(client, [1], Gloo) as one:
            with make_group(client, [1], Gloo) as two:
                assert sorted([one.master_port, two.master_port]) == [str(first), str(last)]
                assert client.gather([*one.join(), *two.join()]) == [1, 1]
                with pytest.raises(errors.ControllerError) as caught:
                    make_group(client, [1], Gloo)
                assert str(first) in str(caught.value) and str(last) in str(caught.value)
                assert "controller.master-port-range" in str(caught.value)
                del caught
            # Given back at once.
            with make_group(client, [1], Gloo) as three:
                assert three.master_port == str(last)
                assert client.gather(three.join()) == [1]


def test_the_rendezvous_can_be_chosen(client: Client, three_ports: int) -> None:
    with make_group(client, [2], Gloo, master_addr="127.0.0.1", master_port=three_ports) as group:
        assert (group.master_address, group.master_port) == ("127.0.0.1", str(three_ports))
        assert client.gather(group.join()) == [2, 2]
        assert client.gather(group.total(1)) == [3, 3]


# ---------------------------------------------------------------------- C5 device masks


def scale_with_masks(cluster: LocalCluster, masks: list[str | None]) -> None:
    """Start one host per mask, as a launcher does: the mask is in the environment of the process."""
    spec = cluster.new_spec
    for number, mask in enumerate(masks):
        environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        cluster.new_spec = {**spec, "options": {**spec["options"], "env": environment}}
        cluster.scale(number + 1)


def read_mask() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("masks", "ordinals"),
    [
        # Each host its own first device: dask-cuda's rotation, one device each, a uuid, no device at all.
        (["0,1,2", "1,2,0", "2,0,1"], {"0,1,2": 0, "1,2,0": 0, "2,0,1": 0}),
        (["3", "GPU-8a1c", ""], {"3": 0, "GPU-8a1c": 0, "": None}),
        # The first device of both is the same: the second rank takes another one.
        (["3,0", "3"], {"3,0": 1, "3": 0}),
    ],
    ids=["rotated", "single, uuid and none", "overlapping"],
)
def test_each_rank_uses_a_device_of_its_own_mask(
    make_cluster: Callable[..., LocalCluster], masks: list[str | None], ordinals: dict[str, int | None]
) -> None:
    cluster = make_cluster(0)
    scale_with_masks(cluster, masks)
    with Client(cluster, timeout=LIMIT_S) as client:
        client.wait_for_workers(len(masks), timeout=60)
        before = client.run(read_mask)
        assert sorted(map(str, before.values())) == sorted(map(str, masks))
        with make_group(client, [len(masks)]) as group:
            seen = group.mask()
            # As the host has it, whatever the rank's device is.
            assert [mask for mask, _ in seen] == [variable for _, variable in seen]
            assert [mask for mask, _ in seen] == [before[host] for host in group.hosts]
            devices = {mask: rank["device"] for (mask, _), rank in zip(seen, group.status(), strict=True)}
            assert devices == ordinals
            used = [mask.split(",")[i] for mask, i in devices.items() if i is not None]
            assert len(set(used)) == len(used)
            assert client.run(read_mask) == before
        assert client.run(read_mask) == before


# ---------------------------------------------------------------------- C6 environment


def read_environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def set_variables(**values: str) -> None:
    os.environ.update(values)


def drop_variables(*names: str) -> None:
    for name in names:
        os.environ.pop(name, None)


def test_each_group_has_its_own_variables_and_the_hosts_get_theirs_back(client: Client) -> None:
    names = [*VARIABLES, "TEST_OWN", "TEST_HOST"]
    client.run(set_variables, RANK="host's", TEST_HOST="host's")
    try:
        before = client.run(read_environment, *names)
        assert {tuple(found.items()) for found in before.values()} == {
            tuple({**dict.fromkeys(names), "RANK": "host's", "TEST_HOST": "host's"}.items())
        }
        with make_group(client, [2], worker_env={"TEST_OWN": "first", "TEST_HOST": "first"}) as group:
            expected = [["0", "2", "0", "2", "first", "first"], ["1", "2", "1", "2", "first", "first"]]
            assert group.environment(*VARIABLES[:4], "TEST_OWN", "TEST_HOST") == expected
            used = group.hosts
            # Other hosts are left alone.
            for host, found in client.run(read_environment, *names).items():
                assert found["TEST_OWN"] == ("first" if host in used else None)
        with make_group(client, [2, 2], worker_env={"TEST_OWN": "second"}) as group:
            assert set(used) <= set(group.hosts)
            for rank, values in enumerate(group.environment("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
                assert values == [str(rank), "4", str(rank % 2), "2"]
            assert group.environment("TEST_OWN", "TEST_HOST") == [["second", "host's"]] * 4
            assert group.environment("MASTER_PORT") == [[group.master_port]] * 4
        # A plain task sees what the host had.
        tasks = [client.submit(read_environment, *names, workers=[host], pure=False) for host in before]
        assert client.gather(tasks) == list(before.values())
    finally:
        client.run(drop_variables, *names)


@pytest.mark.parametrize("name", [*VARIABLES, "CUDA_VISIBLE_DEVICES"])
def test_protected_variables_are_refused_by_name(inproc_client: Client, looks: list[int], name: str) -> None:
    with pytest.raises(errors.RegistrationError, match=f"worker_env may not set {name}: the group sets"):
        make_group(inproc_client, [1], worker_env={name: "1", "FINE": "2"})
    assert not looks
    assert name in Worker.env_keys()


# ---------------------------------------------------------------------- C7 torch on ranks


class JoinsInInit(Worker):
    def __init__(self) -> None:
        super().__init__()
        dist.init_process_group("gloo")
        self.model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(self.model.weight, float(self.rank + 1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, value: int) -> tuple[int, int]:
        tensor = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(tensor)
        return int(tensor.item()), dist.get_world_size()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self) -> tuple[list[float], list[float]]:
        """One DDP step; the gradient of the mean over ranks of ``w . x`` is the mean of the ranks' inputs."""
        model = torch.nn.parallel.DistributedDataParallel(self.model)
        at_start = model.module.weight.detach().flatten().tolist()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.tensor([[float(self.rank), 2.0]])).sum().backward()
        optimiser.step()
        return at_start, model.module.weight.detach().flatten().tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_and_ddp_with_a_process_group_made_in_init(client: Client, size: int) -> None:
    with make_group(client, [size], JoinsInInit) as group:
        assert group.total(1) == [(size * (size + 1) // 2, size)] * size
        # DDP starts from rank 0's weights, and all ranks end with the same.
        mean = sum(range(size)) / size
        assert group.step() == [([1.0, 1.0], [1.0 - 0.5 * mean, 0.0])] * size


def test_groups_in_turn_on_the_same_hosts_each_make_their_process_group(client: Client) -> None:
    for _ in range(3):
        with make_group(client, [2], JoinsInInit) as group:
            assert group.total(2) == [(6, 2)] * 2
    with make_group(client, [4], Gloo) as group:
        assert client.gather(group.join()) == [4] * 4
    assert set(client.run(dist.is_initialized).values()) == {False}


class Bridge(Worker):
    """Two groups in one process group: the ranks of ``right`` come after those of ``left``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join(self, address: str, port: str, first: int, size: int) -> int:
        self.position = first + self.rank
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=self.position, world_size=size)
        return self.position

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send(self, to: int, value: int) -> None:
        dist.send(torch.tensor([value + self.position]), dst=to + self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive(self, source: int) -> int:
        tensor = torch.zeros(1, dtype=torch.long)
        dist.recv(tensor, src=source + self.rank)
        return int(tensor.item())

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def address(self) -> tuple[str, str]:
        return self.get_available_master_addr_port()


def test_two_groups_talk_directly_while_their_calls_overlap(client: Client) -> None:
    with make_group(client, [2], Bridge) as left, make_group(client, [2], Bridge) as right:
        address, port = left.address()
        joined = [*left.join(address, port, 0, 4), *right.join(address, port, first=2, size=4)]
        assert client.gather(joined) == [0, 1, 2, 3]
        for value in range(3):
            received = right.receive(source=0)
            sent = left.send(to=2, value=10 * value)
            assert client.gather(received) == [10 * value, 10 * value + 1]
            client.gather(sent)
        sent, received = right.send(to=0, value=100), left.receive(source=2)
        assert client.gather(received) == [102, 103]
        client.gather(sent)


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i * i, os.getpid()


class Loads(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, num_workers: int) -> tuple[list[int], bool]:
        """The data, and whether another process made them."""
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=num_workers, timeout=LIMIT_S if num_workers else 0
        )
        values: list[int] = []
        pids: set[int] = set()
        for squares, made_by in loader:
            values += squares.tolist()
            pids |= set(made_by.tolist())
        return values, os.getpid() not in pids


def test_a_data_loader_with_processes_of_its_own(client: Client) -> None:
    with make_group(client, [1], Loads) as group:
        assert group.load(0) == [([0, 1, 4, 9, 16, 25], False)]
        assert group.load(1) == [([0, 1, 4, 9, 16, 25], True)]
    # Afterwards the host is as its nanny started it.
    assert set(client.run(is_daemon).values()) == {True}


def is_daemon() -> bool:
    return multiprocessing.current_process().daemon
