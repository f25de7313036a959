"""Fixtures and hooks of the whole suite.

Clusters, from cheap to dear:

``inproc_client``
    Hosts are threads of the test's own process. Tenths of a second, made anew for each test.
``client``, ``scheduler_only_client``
    Four host processes, started once for the run. Each test gets its own client, and an error if it leaves anything
    behind.
``make_cluster``
    A factory of host processes for tests that kill, stop or starve them.
``tls_client``, ``cli_cluster``
    Encrypted connections; ``dask scheduler`` and ``dask worker`` started from the command line. Once per module.

Test modules on hosts: hosts import the classes of a test module by name, as they do with a user's installed package.
The repository's root is on their path through ``PYTHONPATH``, which every child process inherits however it is started.
(cloudpickle's pickling by value is no way out: Dask tries plain pickle first and asks only about the outermost object.)
Classes made inside a test function do travel by value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Before anything imports numpy or torch, and for every host: threads of a numerical library only fight each other here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(ROOT))]
)
# A machine's own Dask settings must not decide whether a test passes.
for _name in [name for name in os.environ if name.startswith("DASK_")]:
    del os.environ[_name]

import pytest
from distributed import Client, LocalCluster
from distributed.security import Security

from tests.helpers import CliCluster, ClusterCache, assert_no_leaks, make_local_cluster, run_cli_cluster

_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note whether the test itself passed: fixtures ask when they clean up."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def _check_leaks(request: pytest.FixtureRequest, client: Client) -> None:
    # After a failure the traceback keeps the test's objects alive; what it holds is then no leak.
    if request.node.stash.get(_passed, False):
        assert_no_leaks(client)


@pytest.fixture(scope="session")
def _clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterCache]:
    clusters = ClusterCache(tmp_path_factory.mktemp("hosts"))
    yield clusters
    clusters.drop()


@pytest.fixture(scope="module")
def local_cluster(_clusters: ClusterCache) -> LocalCluster:
    """Four host processes with one slot each, shared by the run: do not close it, do not leave anything on it."""
    return _clusters.get()


def _client_of(request: pytest.FixtureRequest, **options: Any) -> Iterator[Client]:
    clusters: ClusterCache = request.getfixturevalue("_clusters")
    # Not the fixture's value: the cluster may have been replaced since the module began.
    with Client(clusters.get(), timeout=30, **options) as client:
        client.wait_for_workers(4, timeout=30)
        yield client
        clean = False
        try:
            _check_leaks(request, client)
            clean = request.node.stash.get(_passed, False)
        finally:
            if not clean:
                clusters.repair(client)


@pytest.fixture
def client(local_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of :func:`local_cluster`. The test is in error if it passes and leaves something on the cluster."""
    yield from _client_of(request)


@pytest.fixture
def scheduler_only_client(local_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Client]:
    """As :func:`client`, for a controller that can reach the scheduler but not the hosts."""
    yield from _client_of(request, direct_to_workers=False)


@pytest.fixture
def inproc_client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """Four hosts with one slot each, all of them in this process."""
    with make_local_cluster(processes=False, local_directory=str(tmp_path)) as cluster:
        with Client(cluster, timeout=30) as client:
            yield client
            _check_leaks(request, client)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    """A function that starts clusters which the test may break; they are closed after it."""
    clusters: list[LocalCluster] = []

    def make(n_workers: int = 2, **options: Any) -> LocalCluster:
        clusters.append(make_local_cluster(n_workers, **{"local_directory": str(tmp_path), **options}))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close(timeout=10)


@pytest.fixture(scope="module")
def _tls_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    security = Security.temporary()
    with make_local_cluster(2, security=security, local_directory=str(tmp_path_factory.mktemp("tls"))) as cluster:
        yield cluster


@pytest.fixture
def tls_client(_tls_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of two host processes that talk ``tls://`` only."""
    with Client(_tls_cluster, timeout=30) as client:
        yield client
        _check_leaks(request, client)


@pytest.fixture(scope="module")
def cli_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliCluster]:
    """``dask scheduler`` and two ``dask worker --resources GPU=1``, each in a process of its own."""
    with run_cli_cluster(tmp_path_factory.mktemp("cli")) as cluster:
        yield cluster


@pytest.fixture
def cli_client(cli_cluster: CliCluster, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of :func:`cli_cluster`."""
    with Client(cli_cluster.address, timeout=30) as client:
        yield client
        _check_leaks(request, client)
