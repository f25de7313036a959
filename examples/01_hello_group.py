"""A group of two ranks: a class, a pool, and calls that run on every rank at once.

Run it with ``python examples/01_hello_group.py``.
"""

from __future__ import annotations

import os

from distributed import Client, LocalCluster

from dask_controller import DaskClassWithInitArgs, DaskResourcePool, DaskWorkerGroup, Dispatch, Worker, register


class Greeter(Worker):
    """What one rank is. ``self.rank`` and ``self.world_size`` are there before ``__init__`` runs."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def greet(self, name: str) -> str:
        self.calls += 1
        return f"{self.greeting}, {name}! from rank {self.rank} of {self.world_size}, call {self.calls}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first_rank_only(self) -> int:
        return self.rank


def main() -> None:
    # Two Dask workers ("hosts"), one rank each. No memory limit: torch alone would take up a small one.
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster):
        pool = DaskResourcePool([2], use_gpu=False)
        with DaskWorkerGroup(pool, DaskClassWithInitArgs(Greeter, "Hello"), name_prefix="greeters") as group:
            print(group)
            # One call here is one call on every rank; the results come back in rank order.
            print(group.greet("Ada"))
            # Ranks are objects that live on: they remember.
            print(group.greet("Grace"))
            # They are in processes of their own, not in this one.
            pids = group.process_id()
            print("ranks in processes of their own:", len({*pids, os.getpid()}) == 3)
            # The mode of a method says who runs it and what comes back: here one rank, one value.
            print("rank that answered:", group.first_rank_only())


# Hosts are new processes that import this file: without the guard each would start a cluster again.
if __name__ == "__main__":
    main()
