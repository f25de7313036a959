"""The suite's own tools: hosts know the tests' classes, and leaks are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client, Event, LocalCluster, get_worker

from tests.helpers import CliCluster, assert_no_leaks, find_leaks, forget_failures, stop_processes


class Local:
    """A class of a test module, whose state must survive the trip."""

    made = 0

    def __init__(self, value: int) -> None:
        self.value = value
        Local.made += 1

    def double(self) -> Local:
        return Local(2 * self.value)


class LocalError(Exception):
    """An exception of a test module."""


class Counter:
    """An actor."""

    def pid(self) -> int:
        return os.getpid()


def make_and_double(value: int) -> Local:
    return Local(value).double()


def fail() -> None:
    raise LocalError("on purpose")


def wait_for(name: str) -> None:
    Event(name).wait()


def environment() -> tuple[str, str | None]:
    return get_worker().address, os.environ.get("OMP_NUM_THREADS")


def check_classes_travel(client: Client) -> None:
    sent = client.submit(Local.double, Local(4), pure=False).result(timeout=30)
    assert type(sent) is Local and sent.value == 8
    nested = client.submit(lambda pair: pair[0].double(), (Local(1), "x"), pure=False).result(timeout=30)
    assert type(nested) is Local and nested.value == 2
    made = client.submit(make_and_double, 3, pure=False).result(timeout=30)
    assert type(made) is Local and made.value == 6
    with pytest.raises(LocalError, match="on purpose"):
        client.submit(fail, pure=False).result(timeout=30)
    forget_failures(client)

    class Inner:
        def __init__(self, value: int) -> None:
            self.value = value

    inner = client.submit(Inner, 5, pure=False).result(timeout=30)
    assert type(inner) is Inner and inner.value == 5


def test_classes_of_tests_travel_to_processes(client: Client) -> None:
    check_classes_travel(client)


def test_classes_of_tests_travel_through_the_scheduler(scheduler_only_client: Client) -> None:
    assert scheduler_only_client.direct_to_workers is False
    check_classes_travel(scheduler_only_client)


def test_classes_of_tests_travel_in_one_process(inproc_client: Client) -> None:
    check_classes_travel(inproc_client)
    assert set(inproc_client.run(os.getpid).values()) == {os.getpid()}


def test_classes_of_tests_travel_to_the_command_lines_hosts(cli_cluster: CliCluster, cli_client: Client) -> None:
    check_classes_travel(cli_client)
    pids = set(cli_client.run(os.getpid).values())
    assert len(pids) == 2 and os.getpid() not in pids
    assert len({process.pid for process in cli_cluster.hosts}) == 2
    assert "Start worker" in cli_cluster.logs()


def test_classes_of_tests_travel_encrypted(tls_client: Client) -> None:
    assert tls_client.scheduler.address.startswith("tls://")
    check_classes_travel(tls_client)


def test_hosts_have_a_slot_and_one_thread_each(client: Client) -> None:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    assert [(w["resources"], w["nthreads"]) for w in workers] == [({"GPU": 1}, 1)] * 4
    futures = [client.submit(environment, workers=[address], pure=False) for address in client.nthreads()]
    addresses, threads = zip(*client.gather(futures), strict=True)
    assert len(set(addresses)) == 4 and set(threads) == {os.environ["OMP_NUM_THREADS"]}


def test_a_key_that_stays_is_found(client: Client) -> None:
    future = client.submit(make_and_double, 1, key="kept-key")
    future.result(timeout=30)
    with pytest.raises(AssertionError, match=r"scheduler: key 'kept-key' is memory"):
        assert_no_leaks(client, timeout_s=0)
    del future
    assert_no_leaks(client)


def test_a_slot_that_stays_taken_is_found(client: Client) -> None:
    future = client.submit(wait_for, "open", key="holder", resources={"GPU": 1})
    client.submit(make_and_double, 1, pure=False, resources={"GPU": 1}).result(timeout=30)
    assert any("1 GPU of " in leak for leak in find_leaks(client))
    Event("open", client=client).set()
    future.result(timeout=30)


def test_an_actor_that_stays_is_found(client: Client) -> None:
    actor = client.submit(Counter, actor=True, key="kept-actor").result(timeout=30)
    assert actor.pid().result(timeout=30) != os.getpid()
    assert any("actor 'kept-actor'" in leak for leak in find_leaks(client))


def test_data_that_the_scheduler_does_not_know_are_found(client: Client) -> None:
    def put(dask_worker) -> None:  # type: ignore[no-untyped-def]
        dask_worker.data["stray"] = 1

    def drop(dask_worker) -> None:  # type: ignore[no-untyped-def]
        del dask_worker.data["stray"]

    client.run(put)
    with pytest.raises(AssertionError, match=r"data 'stray'"):
        assert_no_leaks(client, timeout_s=0)
    client.run(drop)


def test_clusters_to_break(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(1, processes=False)
    with Client(cluster) as client:
        assert len(client.nthreads()) == 1


def test_processes_that_will_not_end_are_killed_with_their_children(tmp_path: Path) -> None:
    child = "import signal; signal.pause()"
    code = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
        stop_processes([process], timeout_s=0.2)
        # The child held the pipe's other end: end-of-file means that it is gone too.
        assert process.stdout.read() == b""
    assert process.returncode == -9 and pid != process.pid


@pytest.mark.slow
def test_a_leak_is_an_error_and_the_next_test_starts_clean(tmp_path: Path) -> None:
    """Runs a small suite of its own with this suite's conftest."""
    (tmp_path / "test_leaky.py").write_text(
        """
import tests.helpers

KEPT = []
tests.helpers.LEAK_TIMEOUT_S = 0.5

def test_leaves_a_key(client):
    KEPT.append(client.submit(sum, [1], key="left-key"))
    KEPT[0].result(timeout=30)

def test_after_it(client):
    assert client.submit(sum, [2], key="other-key").result(timeout=30) == 2
"""
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"),
            *("--rootdir", str(tmp_path), "-c", str(root / "pyproject.toml"), str(tmp_path)),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "key 'left-key' is memory" in done.stdout
