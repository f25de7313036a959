"""A batch whose rows the ranks cannot share evenly: an error, or padding that leaves no trace."""

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
    errors,
    register,
)


class Squarer(Worker):
    def __init__(self) -> None:
        self.rows_seen = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def square(self, batch: DataProto) -> DataProto:
        self.rows_seen = len(batch)
        return DataProto.from_dict(
            tensors={"square": batch.batch["x"] ** 2},
            non_tensors={"name": batch.non_tensor_batch["name"]},
            meta_info={"metrics": {"rank": self.rank}},
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows(self) -> int:
        return self.rows_seen


def main() -> None:
    options = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster):
        with DaskWorkerGroup(DaskResourcePool([3], use_gpu=False), DaskClassWithInitArgs(Squarer)) as group:
            columns = {"tensors": {"x": torch.arange(10.0)}, "non_tensors": {"name": list("abcdefghij")}}
            try:
                group.square(DataProto.from_dict(**columns))
            except errors.DispatchError as error:
                print("without padding:", error)

            batch = DataProto.from_dict(**columns, auto_padding=True)
            result = group.square(batch)
            # 10 rows on 3 ranks: 4 each, of which the last 2 repeat the last row ...
            print("rows on each rank:", group.rows())
            # ... and are taken out of the result again. The caller's batch has its 10 rows as before.
            print("rows sent and received:", len(batch), len(result))
            print("squares:", result.batch["square"].tolist())
            print("names:", "".join(result.non_tensor_batch["name"]))
            # "metrics" of all ranks are put together in rank order.
            print("metrics:", result.meta_info["metrics"])


if __name__ == "__main__":
    main()
