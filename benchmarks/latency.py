"""How long a call takes that does nothing, by number of ranks.

Beside it, in the same run: plain Dask actors on the same hosts whose futures are gathered one by one, and
``client.submit`` plus ``client.gather`` of tasks pinned to the same hosts.
"""

from __future__ import annotations

from typing import Any

from distributed import Client

from benchmarks.common import Table, cluster, in_turns, median_ms, p95_ms
from dask_controller import DaskClassWithInitArgs, DaskResourcePool, DaskWorkerGroup, Dispatch, Worker, register

COLUMNS = ("ranks", "ours_ms", "ours_p95", "actors_ms", "submit_ms", "actors/ours", "submit/ours")


class Idle(Worker):
    """Does nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        """Do nothing."""


class IdleActor:
    """A plain Dask actor that does nothing."""

    def noop(self) -> None:
        """Do nothing."""


def _noop_task(_: int) -> None:
    return None


def measure(client: Client, ranks: int, rounds: int, calls: int) -> dict[str, Any]:
    """Time one number of ranks.

    Parameters
    ----------
    client : Client
        Of a cluster with at least `ranks` hosts.
    ranks : int
        How many hosts are called.
    rounds, calls : int
        Turns of each contender, and calls in a turn.

    Returns
    -------
    dict
        A row of the table.
    """
    hosts = sorted(client.scheduler_info(n_workers=-1)["workers"])[:ranks]
    actor_futures = [
        client.submit(IdleActor, actor=True, workers=[host], allow_other_workers=False, pure=False) for host in hosts
    ]
    actors = [future.result() for future in actor_futures]
    counter = iter(range(1 << 62))

    def call_actors() -> None:
        for pending in [actor.noop() for actor in actors]:
            pending.result()

    def submit_tasks() -> None:
        number = next(counter)
        client.gather([client.submit(_noop_task, number, workers=[host], pure=False) for host in hosts])

    with DaskWorkerGroup(DaskResourcePool([ranks], use_gpu=False), DaskClassWithInitArgs(Idle)) as group:
        fast = in_turns({"ours": group.noop, "actors": call_actors}, rounds, calls, warmup=20)
        slow = in_turns({"submit": submit_tasks}, 1, max(10, calls // 5))
    ours = median_ms(fast["ours"])
    row = {
        "ranks": ranks,
        "ours_ms": ours,
        "ours_p95": p95_ms(fast["ours"]),
        "actors_ms": median_ms(fast["actors"]),
        "submit_ms": median_ms(slow["submit"]),
    }
    return {**row, "actors/ours": row["actors_ms"] / ours, "submit/ours": row["submit_ms"] / ours}


def run(quick: bool) -> list[Table]:
    """Measure 1, 2, 4 and 8 ranks."""
    table = Table("Latency of a blocking ONE_TO_ALL no-op", COLUMNS)
    rounds, calls = (3, 30) if quick else (10, 50)
    with cluster(8) as client:
        for ranks in (1, 2, 4, 8):
            table.add(**measure(client, ranks, rounds, calls))
    return [table]
