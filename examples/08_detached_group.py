"""A group that outlives the program that made it: a second program attaches to it by name.

This file is both programs. Run without arguments it is the first, which starts the second.
"""

from __future__ import annotations

import subprocess
import sys

from distributed import Client, LocalCluster

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    Dispatch,
    Worker,
    destroy_detached,
    list_detached,
    register,
)


class Counter(Worker):
    def __init__(self) -> None:
        self.total = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total


def first_program(address: str) -> None:
    with Client(address):
        cia = DaskClassWithInitArgs(Counter)
        group = DaskWorkerGroup(DaskResourcePool([2], use_gpu=False), cia, name_prefix="counter", detached=True)
        print("first program:", group.add(3), flush=True)
        group.close()  # of a detached group: only let go


def second_program(address: str) -> None:
    with Client(address) as client:
        print("second program finds:", list_detached(client))
        # The class travels with the group; this program would not even have to define it.
        group = DaskWorkerGroup.from_detached("counter")
        print("second program:", group.add(4), flush=True)


def main() -> None:
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster:
        address = cluster.scheduler_address
        first_program(address)
        subprocess.run([sys.executable, __file__, address], check=True, timeout=100)
        with Client(address) as client:
            print("still there:", list_detached(client))
            destroy_detached("counter", client)
            print("destroyed:", list_detached(client))


if __name__ == "__main__":
    second_program(sys.argv[1]) if len(sys.argv) > 1 else main()
