"""Two classes in one process per rank: they share the host, and see each other's objects."""

from __future__ import annotations

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
    register,
)


class Actor(Worker):
    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self, step: float) -> float:
        self.scale += step
        return self.scale.item()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def act(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"action": batch.batch["x"] * self.scale})


class Reference(Worker):
    def __init__(self) -> None:
        self.scale = torch.tensor(1.0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def copy_actor(self) -> float:
        # The sibling in this very process: no bytes travel.
        self.scale = self.get_fused_worker_by_name("actor").scale.clone()
        return self.scale.item()


def main() -> None:
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster):
        roles = {"actor": DaskClassWithInitArgs(Actor, 2.0), "reference": DaskClassWithInitArgs(Reference)}
        with DaskWorkerGroup(DaskResourcePool([2], use_gpu=False), create_colocated_worker_cls(roles)) as group:
            # Three ways to the same ranks. A dict of groups, one per role, for code that wants one group each:
            actor = group.spawn(roles)["actor"]
            print("by spawn:", actor.learn(0.5))
            # the role as an attribute:
            print("by role:", group.reference.copy_actor())
            # and the role as a prefix:
            print("by prefix:", group.actor_learn(1.0))
            # One rank by itself, any of its methods, marked or not:
            print("on rank 0 alone:", group.reference.workers[0].copy_actor())
            print("actions:", actor.act(DataProto.from_dict(tensors={"x": torch.ones(4)})).batch["action"].tolist())


if __name__ == "__main__":
    main()
