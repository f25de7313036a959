"""One pool of slots, cut in two: a trainer on one part, a generator on the other, and Dask knows what is taken.

A slot is a Dask resource called "GPU". It is only a name to Dask, so this runs without any GPU.
"""

from __future__ import annotations

import os

from distributed import Client, LocalCluster, wait

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    Dispatch,
    Worker,
    register,
    split_resource_pool,
)


class Member(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> str:
        return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def main() -> None:
    # With a real GPU in each host: dask worker --resources "GPU=1". One host for each GPU.
    options = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options, resources={"GPU": 1}) as cluster, Client(cluster) as client:
        train_pool, generate_pool = split_resource_pool(DaskResourcePool([3]), [2, 1])
        trainer = DaskWorkerGroup(train_pool, DaskClassWithInitArgs(Member), name_prefix="trainer")
        generator = DaskWorkerGroup(generate_pool, DaskClassWithInitArgs(Member), name_prefix="generator")
        with trainer, generator:
            # Each part is a world of its own: ranks start at 0, and the rendezvous is another.
            print("trainer:", trainer.where())
            print("generator:", generator.where())
            print("no host in both:", not set(trainer.hosts) & set(generator.hosts))
            print("own rendezvous:", trainer.master_port != generator.master_port)

            # All slots are held. A task that asks for one waits; a task that asks for none runs beside the ranks.
            needs_gpu = client.submit(lambda: "had a slot", resources={"GPU": 1}, pure=False)
            print("plain task:", client.submit(lambda: "ran at once", pure=False).result())
            print("task that needs a slot, while the groups live:", needs_gpu.status)
        wait(needs_gpu)
        print("task that needs a slot, after they closed:", needs_gpu.result())


if __name__ == "__main__":
    main()
