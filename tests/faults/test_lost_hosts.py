"""What dies while a group lives: hosts, the controller, its client, the scheduler; and Ctrl-C (D1, D3)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster, wait

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    Dispatch,
    Worker,
    destroy_detached,
    errors,
    list_detached,
    register,
)
from dask_controller.runtime.probe import describe_host
from tests.helpers import assert_no_leaks, find_leaks, forget_failures, run_cli_cluster, stop_processes

pytestmark = pytest.mark.timeout(180)

#: Within this time every loss must be noticed. Far above what it takes, far below every time limit of Dask itself.
PROMPT_S = 10.0
LIMIT_S = 30.0


def wait_for_file(path: str) -> None:
    deadline = time.monotonic() + 2 * LIMIT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not made")
        time.sleep(0.005)


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.02)
    return answer


class Part(Worker):
    def __init__(self, use_gloo: bool = False) -> None:
        if use_gloo:
            dist.init_process_group("gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold(self, path: str) -> int:
        wait_for_file(path)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def hold_later(self, path: str) -> int:
        wait_for_file(path)
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": 2 * data.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def hold_rows(self, data: DataProto) -> DataProto:
        if self.rank == 1:
            wait_for_file(data.meta_info["path"])
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_rows(self, data: DataProto) -> int:
        return int(data.batch["x"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce(self, path: str) -> float:
        if self.rank == 1:
            wait_for_file(path)
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)


def make_group(client: Client, ranks: int, *args: Any, use_gpu: bool = True, **options: Any) -> DaskWorkerGroup:
    pool = DaskResourcePool([ranks], use_gpu=use_gpu)
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(Part, *args), client=client, **options)


def pids(group: DaskWorkerGroup) -> list[int]:
    return [rank["pid"] for rank in group.status(timeout_s=LIMIT_S)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def batch(rows: int, **meta_info: Any) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)}, meta_info=meta_info)


def is_running(group: DaskWorkerGroup, method: str, ranks: set[int]) -> bool:
    now = {rank["rank"] for rank in group.status() if method in [r["method"] for r in rank.get("running", ())]}
    return now >= ranks


@pytest.fixture
def cluster_client(make_cluster: Callable[..., LocalCluster]) -> Iterator[Client]:
    """A client of three hosts that the test may kill."""
    with Client(make_cluster(3), timeout=30) as client:
        yield client


class Background(threading.Thread):
    """A call in a thread of its own, for what it returns or raises."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.function(*self.args)
        except BaseException as error:
            self.error = error

    def raised(self, limit_s: float) -> BaseException:
        self.join(limit_s)
        assert not self.is_alive(), f"the call still waits after {limit_s} s"
        assert self.error is not None, f"the call returned {self.result!r}"
        return self.error


def check_lost(error: BaseException, group: DaskWorkerGroup, method: str, rank: int = 1) -> None:
    assert type(error) is errors.RankLostError, repr(error)
    assert (error.rank, error.host, error.method) == (rank, group.hosts[rank], method)
    assert error.lost == {rank: group.hosts[rank]}
    text = str(error)
    assert f"rank {rank}" in text and group.hosts[rank] in text and method in text and "new group" in text


def check_broken(group: DaskWorkerGroup, rank: int = 1) -> None:
    until(lambda: f"broken, lost ranks [{rank}]" in repr(group), "the group says that it is broken", PROMPT_S)
    began = time.monotonic()
    with pytest.raises(errors.RankLostError) as caught:
        group.who()
    check_lost(caught.value, group, "who", rank)
    with pytest.raises(errors.RankLostError):
        group.double(batch(3))
    with pytest.raises(errors.RankLostError):
        group.workers[0].who()
    assert time.monotonic() - began < PROMPT_S


def rebuild(client: Client, ranks: int = 3) -> None:
    """An ordered new start: the nanny has brought back empty hosts, all slots are free, and nothing is left behind."""
    client.wait_for_workers(ranks, timeout=LIMIT_S)
    with make_group(client, ranks) as group:
        assert group.who() == list(range(ranks))
    assert_no_leaks(client, timeout_s=LIMIT_S)


# ---------------------------------------------------------------------- D1: a host is killed


@pytest.mark.slow
def test_killed_while_idle(cluster_client: Client) -> None:
    group = make_group(cluster_client, 3)
    assert group.who() == [0, 1, 2]
    kill(pids(group)[1])
    check_broken(group)
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < PROMPT_S
    rebuild(cluster_client)


def test_killed_during_a_call(cluster_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    group = make_group(cluster_client, 3)
    victim = pids(group)[1]
    call = Background(group.hold, str(path))
    until(lambda: is_running(group, "hold", {0, 1, 2}), "hold runs")
    kill(victim)
    check_lost(call.raised(PROMPT_S), group, "hold")
    check_broken(group)
    # The others still run the call; closing waits for them no longer than it was told to.
    began = time.monotonic()
    group.close(timeout_s=0.5)
    assert time.monotonic() - began < PROMPT_S
    path.touch()
    rebuild(cluster_client)


def test_killed_between_dispatch_and_collect(cluster_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    group = make_group(cluster_client, 3)
    victim = pids(group)[1]
    numbers = group.hold_later(str(path))
    rows = group.hold_rows(batch(6, path=str(path)))
    until(lambda: is_running(group, "hold_later", {0, 1, 2}), "hold_later runs")
    kill(victim)
    began = time.monotonic()
    # Of the calls in flight, what the lost rank owed fails at once: plain futures and batches alike.
    with pytest.raises(errors.RankLostError) as caught:
        numbers[1].result(timeout=PROMPT_S)
    check_lost(caught.value, group, "hold_later")
    with pytest.raises(errors.RankLostError) as caught:
        rows.get(timeout=PROMPT_S)
    check_lost(caught.value, group, "hold_rows")
    assert time.monotonic() - began < PROMPT_S
    # What the others owe arrives.
    path.touch()
    assert [numbers[0].result(timeout=LIMIT_S), numbers[2].result(timeout=LIMIT_S)] == [0, 2]
    assert torch.equal(rows.futures[2].result(timeout=LIMIT_S).batch["x"], torch.tensor([4, 5]))
    check_broken(group)
    group.close()
    del numbers, rows, caught
    forget_failures(cluster_client)
    rebuild(cluster_client)


def test_killed_after_it_has_answered(cluster_client: Client) -> None:
    group = make_group(cluster_client, 3)
    victim = pids(group)[1]
    rows = group.double(batch(6))
    assert torch.equal(rows.get(timeout=LIMIT_S).batch["x"], 2 * torch.arange(6))
    kill(victim)
    check_broken(group)
    began = time.monotonic()
    with pytest.raises((errors.ChunkLostError, errors.RankLostError)) as caught:
        rows.get()
    assert time.monotonic() - began < PROMPT_S
    assert (caught.value.rank, caught.value.host) == (1, group.hosts[1])
    assert "rank 1" in str(caught.value) and "double" in str(caught.value)
    # Rows of the others can still be had.
    assert torch.equal(rows.chunk(3)[0].get(timeout=LIMIT_S).batch["x"], torch.tensor([0, 2]))
    group.close()
    del rows, caught
    rebuild(cluster_client)


@pytest.mark.slow
def test_a_consumer_whose_producer_is_killed(cluster_client: Client) -> None:
    producer = make_group(cluster_client, 1)
    with make_group(cluster_client, 2) as consumer:
        victim = pids(producer)[0]
        rows = producer.double(batch(6))
        wait(rows.futures, timeout=LIMIT_S)
        kill(victim)
        began = time.monotonic()
        with pytest.raises((errors.ChunkLostError, errors.RankFailedError)) as caught:
            consumer.sum_rows(rows)
        assert time.monotonic() - began < PROMPT_S
        assert "rank 0" in str(caught.value) and "double" in str(caught.value) and producer.name in str(caught.value)
        # The consumer is not the one that broke.
        assert consumer.who() == [0, 1]
        check_broken(producer, 0)
        producer.close()
        del rows, caught
    rebuild(cluster_client)


@pytest.mark.slow
def test_killed_while_the_others_wait_for_it_in_a_collective(cluster_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "never"
    group = make_group(cluster_client, 3, True)
    victim = pids(group)[1]
    call = Background(group.reduce, str(path))
    until(lambda: is_running(group, "reduce", {0, 1, 2}), "reduce runs")
    kill(victim)
    check_lost(call.raised(PROMPT_S), group, "reduce")
    # gloo tells the others that their peer is gone, and their calls end.
    until(
        lambda: all(rank["running"] == [] for rank in group.status() if rank["rank"] != 1), "the others' calls settle"
    )
    check_broken(group)
    group.close()
    rebuild(cluster_client)


@pytest.mark.slow
def test_a_broken_group_that_is_dropped_frees_the_hosts(cluster_client: Client) -> None:
    group = make_group(cluster_client, 3)
    kill(pids(group)[2])
    check_broken(group, 2)
    del group
    gc.collect()
    rebuild(cluster_client)


@pytest.mark.slow
def test_several_hosts_killed_at_once(cluster_client: Client) -> None:
    group = make_group(cluster_client, 3)
    for pid in pids(group):
        kill(pid)
    until(lambda: "broken, lost ranks [0, 1, 2]" in repr(group), "all are lost", PROMPT_S)
    with pytest.raises(errors.RankLostError) as caught:
        group.who()
    assert caught.value.lost == dict(enumerate(group.hosts))
    group.close()
    rebuild(cluster_client)


@pytest.mark.slow
def test_a_killed_host_through_the_scheduler(make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    path = tmp_path / "go"
    with Client(make_cluster(3), timeout=30, direct_to_workers=False) as client:
        group = make_group(client, 3)
        assert group.route == "scheduler"
        victim = pids(group)[1]
        made = group.double(batch(6))
        wait(made.futures, timeout=LIMIT_S)
        call = Background(group.hold, str(path))
        until(lambda: is_running(group, "hold", {0, 1, 2}), "hold runs")
        kill(victim)
        check_lost(call.raised(PROMPT_S), group, "hold")
        check_broken(group)
        began = time.monotonic()
        with pytest.raises((errors.ChunkLostError, errors.RankLostError), match="rank 1"):
            made.get()
        assert time.monotonic() - began < PROMPT_S
        path.touch()
        group.close()
        del made, call
        rebuild(client)


# ---------------------------------------------------------------------- D3: the controller is killed


def run_controller(address: str, body: str) -> subprocess.Popen[str]:
    """A controller of its own process; ``body`` is the inside of its main function."""
    code = f"""
import os, signal, sys, threading, time
from distributed import Client
from tests.faults.test_lost_hosts import *

def main(client):
{textwrap.indent(textwrap.dedent(body), "    ")}

if __name__ == "__main__":
    with Client({address!r}, timeout=30) as client:
        main(client)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


@pytest.fixture
def controllers() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*args: Any) -> subprocess.Popen[str]:
        processes.append(run_controller(*args))
        return processes[-1]

    yield start
    stop_processes(processes, timeout_s=0.1)  # type: ignore[arg-type]
    for process in processes:
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = Background(process.stdout.readline)
    line.join(2 * LIMIT_S)
    assert not line.is_alive(), "the controller says nothing"
    return str(line.result).strip()


def occupied(client: Client) -> list[str]:
    """What of ours is left on the hosts."""
    facts = client.run(describe_host)
    return [f"{host}: {f['ranks']} {f['leases']}" for host, f in facts.items() if f["ranks"] or f["leases"]]


def take_gpu_on(client: Client, hosts: list[str]) -> None:
    tasks = [client.submit(os.getpid, workers=[host], resources={"GPU": 1}, pure=False) for host in hosts]
    assert len(set(client.gather(tasks))) == len(hosts)


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_controller_leaves_nothing(
    busy: bool, cluster_client: Client, controllers: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "go"
    process = controllers(
        cluster_client.scheduler.address,
        f"""
        group = make_group(client, 3)
        kept = group.double(batch(6))
        kept.get()
        if {busy}:
            held = group.hold_later({str(path)!r})
            until(lambda: is_running(group, "hold_later", {{0, 1, 2}}), "hold_later runs")
        print("ready", flush=True)
        threading.Event().wait()
        """,
    )
    assert read_line(process) == "ready"
    assert len(occupied(cluster_client)) == 3
    process.kill()
    if busy:
        # A method cannot be taken off its thread: the slot is held while it runs, and no longer.
        until(
            lambda: all(
                rank["state"] == "closing" for f in cluster_client.run(describe_host).values() for rank in f["ranks"]
            ),
            "the ranks know that they end",
            PROMPT_S,
        )
        assert len(occupied(cluster_client)) == 3
        path.touch()
    until(lambda: not occupied(cluster_client), "ranks and leases are gone", PROMPT_S)
    until(lambda: not find_leaks(cluster_client), "nothing is left on the cluster", PROMPT_S)
    take_gpu_on(cluster_client, list(cluster_client.nthreads()))
    rebuild(cluster_client)


@pytest.mark.slow
def test_a_detached_group_survives_its_killed_controller(
    cluster_client: Client, controllers: Callable[..., subprocess.Popen[str]]
) -> None:
    process = controllers(
        cluster_client.scheduler.address,
        """
        group = make_group(client, 2, name_prefix="survivor", detached=True)
        other = make_group(client, 1)
        print(*group.hosts, flush=True)
        threading.Event().wait()
        """,
    )
    hosts = read_line(process).split()
    assert len(hosts) == 2
    process.kill()
    until(lambda: len(occupied(cluster_client)) == 2, "the group that is not detached is gone", PROMPT_S)
    assert list_detached(cluster_client) == ["survivor"]
    group = DaskWorkerGroup.from_detached("survivor", client=cluster_client)
    assert group.hosts == hosts
    assert group.who() == [0, 1]
    assert torch.equal(group.double(batch(4)).get(timeout=LIMIT_S).batch["x"], 2 * torch.arange(4))
    group.close()
    assert len(occupied(cluster_client)) == 2
    destroy_detached("survivor", client=cluster_client)
    assert list_detached(cluster_client) == []
    until(lambda: not occupied(cluster_client), "ranks and leases are gone", PROMPT_S)
    rebuild(cluster_client)


# ---------------------------------------------------------------------- the client, the cluster, the scheduler


def test_the_client_closes_while_calls_wait(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    assert client.cluster is not None
    with Client(client.scheduler.address, timeout=30, set_as_default=False) as own:
        group = make_group(own, 2)
        rows = group.hold_rows(batch(6, path=str(path)))
        get = Background(rows.get)
        call = Background(group.hold, str(path))
        until(lambda: is_running(group, "hold_rows", {1}), "hold_rows runs")
    assert type(call.raised(PROMPT_S)) is errors.GroupClosedError
    assert type(get.raised(PROMPT_S)) is errors.GroupClosedError
    with pytest.raises(errors.GroupClosedError, match="client is closed"):
        group.who()
    group.close()
    path.touch()


def test_the_group_closes_while_calls_wait(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    group = make_group(client, 2)
    rows = group.hold_rows(batch(6, path=str(path)))
    numbers = group.hold_later(str(path))
    get = Background(rows.get)
    call = Background(group.hold, str(path))
    until(lambda: is_running(group, "hold_rows", {1}), "hold_rows runs")
    group.close(timeout_s=0.2)
    for error in (call.raised(PROMPT_S), get.raised(PROMPT_S)):
        assert type(error) is errors.GroupClosedError and group.name in str(error)
    with pytest.raises(errors.GroupClosedError):
        numbers[1].result(timeout=PROMPT_S)
    path.touch()
    del rows, numbers, get, call, error
    forget_failures(client)


@pytest.mark.slow
def test_the_cluster_closes_while_a_call_waits(make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    path = tmp_path / "go"
    cluster = make_cluster(2)
    with Client(cluster, timeout=30) as client:
        group = make_group(client, 2)
        rows = group.hold_rows(batch(6, path=str(path)))
        get = Background(rows.get)
        call = Background(group.hold, str(path))
        until(lambda: is_running(group, "hold_rows", {1}), "hold_rows runs")
        closing = Background(cluster.close, 20)
        for waiting in (call, get):
            assert isinstance(waiting.raised(LIMIT_S), (errors.RankLostError, errors.GroupClosedError))
        path.touch()
        closing.join(LIMIT_S)
        group.close()


@pytest.mark.slow
def test_the_scheduler_is_killed_while_a_call_waits(tmp_path: Path) -> None:
    path = tmp_path / "go"
    with run_cli_cluster(tmp_path, 2) as cluster, Client(cluster.address, timeout=30) as client:
        group = make_group(client, 2)
        rows = group.hold_rows(batch(6, path=str(path)))
        get = Background(rows.get)
        call = Background(group.hold, str(path))
        until(lambda: is_running(group, "hold_rows", {1}), "hold_rows runs")
        cluster.scheduler.kill()
        cluster.scheduler.wait(LIMIT_S)
        for waiting in (call, get):
            assert isinstance(waiting.raised(LIMIT_S), (errors.RankLostError, errors.GroupClosedError))
        path.touch()
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < LIMIT_S


# ---------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_returns_at_once_and_the_group_goes_on(
    client: Client, controllers: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "go"
    process = controllers(
        client.scheduler.address,
        f"""
        group = make_group(client, 2)

        def tell():
            until(lambda: is_running(group, "hold", {{0, 1}}), "hold runs")
            print("holding", flush=True)

        teller = threading.Thread(target=tell)
        teller.start()
        try:
            group.hold({str(path)!r})
        except KeyboardInterrupt:
            # The call goes on, and what comes after it waits for it.
            print("interrupted", is_running(group, "hold", {{0, 1}}), os.path.exists({str(path)!r}), flush=True)
        after = group.hold_later({str(path)!r})
        print("pending", not any(f.done() for f in after), flush=True)
        open({str(path)!r}, "w").close()
        print(client.gather(after), group.who(), flush=True)
        teller.join()
        group.close()
        """,
    )
    assert read_line(process) == "holding"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert read_line(process) == "interrupted True False"
    assert time.monotonic() - began < PROMPT_S
    assert read_line(process) == "pending True"
    assert read_line(process) == "[0, 1] [0, 1]"
    assert process.wait(LIMIT_S) == 0
