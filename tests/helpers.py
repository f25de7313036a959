"""What tests share and may import: clusters, and the check that nothing leaked.

Fixtures stand in ``conftest.py``; this module has what they are made of. It imports neither torch nor the package, so
that a scheduler which is sent one of these functions loads next to nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster, Scheduler, Worker

#: How long a cluster may take to be clean after a test.
LEAK_TIMEOUT_S = 10.0

#: What clusters of the tests have in common. Hosts have no memory limit: a model in a rank is no reason to pause them.
CLUSTER_OPTIONS: Mapping[str, Any] = {
    "threads_per_worker": 1,
    "resources": {"GPU": 1},
    # No dashboard, and a free port for what is left: else the scheduler takes 8787, and warns where that is taken.
    "dashboard_address": ":0",
    "scheduler_kwargs": {"dashboard": False},
    "memory_limit": 0,
}


def make_local_cluster(n_workers: int = 4, *, processes: bool = True, **options: Any) -> LocalCluster:
    """Start a cluster on this machine whose hosts have one slot each."""
    return LocalCluster(n_workers=n_workers, processes=processes, **{**CLUSTER_OPTIONS, **options})


def assert_no_leaks(client: Client, timeout_s: float | None = None) -> None:
    """Fail unless the whole cluster holds no task, no data, no actor, and no slot is taken.

    Releases travel through the event loops of controller, scheduler and hosts, so the state is asked for until it is
    clean or the time is over. Objects of the calling test that keep futures alive must be gone before the call.
    """
    if timeout_s is None:
        timeout_s = LEAK_TIMEOUT_S
    deadline = time.monotonic() + timeout_s
    while True:
        # Futures in reference cycles (a traceback holds a frame that holds a future) are let go by the collector only.
        gc.collect()
        leaks = find_leaks(client)
        if not leaks:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind, {timeout_s:g} s after the test:\n  " + "\n  ".join(leaks))
        time.sleep(0.02)


def forget_failures(client: Client) -> None:
    """Let go of failed plain Dask futures whose ``result()`` was asked for.

    Such a future never goes by itself: the client's record of it keeps the exception, whose traceback has the frame of
    ``Future.result``, which has the future. A test that provokes this with futures that are not ours says so with this
    call.
    """
    # A copy: the client's event loop changes the dictionary meanwhile.
    for state in client.futures.copy().values():
        if state.exception is not None:
            state.exception.__traceback__ = None


def find_leaks(client: Client) -> list[str]:
    """Return one line for every thing that the cluster still holds."""
    leaks = client.run_on_scheduler(_scheduler_leaks)
    for found in client.run(_host_leaks).values():
        leaks += found
    return leaks


def _scheduler_leaks(dask_scheduler: Scheduler) -> list[str]:
    leaks = [
        f"scheduler: key {ts.key!r} is {ts.state}, wanted by {sorted(cs.client_key for cs in ts.who_wants or ())}"
        for ts in dask_scheduler.tasks.values()
    ]
    for ws in dask_scheduler.workers.values():
        leaks += [
            f"scheduler: {taken:g} {name} of {ws.address} taken" for name, taken in ws.used_resources.items() if taken
        ]
    return leaks


def _host_leaks(dask_worker: Worker) -> list[str]:
    leaks = [f"host {dask_worker.address}: task {key!r} is {ts.state}" for key, ts in dask_worker.state.tasks.items()]
    leaks += [
        f"host {dask_worker.address}: data {key!r}" for key in dask_worker.data if key not in dask_worker.state.tasks
    ]
    leaks += [f"host {dask_worker.address}: actor {key!r}" for key in dask_worker.state.actors]
    return leaks


class ClusterCache:
    """One cluster for the whole run, replaced when a test has left it unfit."""

    def __init__(self, local_directory: Path) -> None:
        self._local_directory = local_directory
        self._cluster: LocalCluster | None = None

    def get(self) -> LocalCluster:
        """Return the cluster, started if need be."""
        if self._cluster is None:
            self._cluster = make_local_cluster(local_directory=str(self._local_directory))
        return self._cluster

    def drop(self) -> None:
        """Close the cluster; the next :meth:`get` starts another."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close(timeout=10)

    def repair(self, client: Client) -> None:
        """Give the next test empty hosts: new processes, or another cluster where that fails."""
        try:
            client.restart(timeout=30)
        except Exception:
            self.drop()


@dataclass
class CliCluster:
    """A cluster of ``dask scheduler`` and ``dask worker`` processes, as a user starts them."""

    #: Where the scheduler listens.
    address: str
    #: Written by the scheduler; for ``Client(scheduler_file=...)`` and further hosts.
    scheduler_file: Path
    scheduler: subprocess.Popen[bytes]
    #: One per host, each with its nanny in front of it.
    hosts: list[subprocess.Popen[bytes]] = field(default_factory=list)
    folder: Path = Path()

    def logs(self) -> str:
        """Return what the processes have printed so far."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def run_cli_cluster(folder: Path, n_workers: int = 2) -> Iterator[CliCluster]:
    """Start a scheduler and hosts from the command line and stop them, whatever happens in between."""
    scheduler_file = folder / "scheduler.json"
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: what a killed nanny leaves behind can be found by its group.
                start_new_session=True,
            )
        processes.append(process)
        return process

    shared = ["--scheduler-file", str(scheduler_file), "--no-dashboard"]
    free = ["--port", "0", "--dashboard-address", ":0"]
    try:
        cluster = CliCluster("", scheduler_file, start("scheduler", "scheduler", *shared, *free), folder=folder)
        cluster.hosts = [
            start(
                f"host-{i}",
                *("worker", *shared, "--nthreads", "1", "--memory-limit", "0", "--resources", "GPU=1"),
                *("--local-directory", str(folder / f"host-{i}"), "--name", f"host-{i}"),
            )
            for i in range(n_workers)
        ]
        try:
            with Client(scheduler_file=str(scheduler_file), timeout=60, set_as_default=False) as client:
                client.wait_for_workers(n_workers, timeout=60)
                cluster.address = client.scheduler.address
        except Exception as error:
            raise RuntimeError(f"the cluster did not come up\n{cluster.logs()}") from error
        yield cluster
    finally:
        # Hosts before the scheduler: a host that has lost its scheduler takes its time to notice.
        stop_processes(processes[1:])
        stop_processes(processes[:1])


def stop_processes(processes: list[subprocess.Popen[bytes]], timeout_s: float = 10.0) -> None:
    """Ask processes to end, kill with all their children those that do not, and reap them."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            pass
        # Also after a proper end: each is the leader of its group, and whoever is left in it is an orphan.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
