"""Four ranks as a mesh: 2 data-parallel groups of 2 tensor-parallel ranks, which share their rows.

Each pair holds one half of a matrix per rank and adds up its partial products with ``torch.distributed``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from torch.distributed.device_mesh import init_device_mesh

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

WEIGHT = torch.arange(8.0).reshape(4, 2)


class ParallelLinear(Worker):
    def __init__(self) -> None:
        # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set: nothing else to configure.
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp_rank, self.tp_rank = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
        self.tp_group = mesh["tp"].get_group()
        self.half = slice(2 * self.tp_rank, 2 * self.tp_rank + 2)
        self.weight = WEIGHT[self.half]
        # Which rows this rank gets, and whether its results count: one of the pair is enough.
        self._register_dispatch_collect_info("linear", dp_rank=dp_rank, is_collect=self.tp_rank == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="linear"))
    def forward(self, batch: DataProto) -> DataProto:
        self.rows = batch.batch["x"][:, 0].tolist()
        product = batch.batch["x"][:, self.half] @ self.weight
        dist.all_reduce(product, group=self.tp_group)
        return DataProto.from_dict(tensors={"y": product})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def first_column(self) -> list[float]:
        return self.rows


def main() -> None:
    options = {"n_workers": 4, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster):
        with DaskWorkerGroup(DaskResourcePool([4], use_gpu=False), DaskClassWithInitArgs(ParallelLinear)) as group:
            x = torch.arange(16.0).reshape(4, 4)
            y = group.forward(DataProto.from_dict(tensors={"x": x})).batch["y"]
            print("rows on ranks 0 to 3, by their first column:", group.first_column())
            print("4 rows in, 4 rows out:", tuple(y.shape))
            print("equal to one matrix product:", torch.equal(y, x @ WEIGHT))


if __name__ == "__main__":
    main()
