"""A result goes from one group to the next without passing through this program.

A method marked ``blocking=False`` returns a DataProtoFuture at once. Its rows stay on the hosts that made them.
"""

from __future__ import annotations

import time

import torch
from distributed import Client, LocalCluster

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    Dispatch,
    Worker,
    register,
)


class Generator(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate(self, prompts: DataProto) -> DataProto:
        time.sleep(1)  # something slow
        return DataProto.from_dict(tensors={"answer": prompts.batch["x"] * 10 + self.rank})


class Scorer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, answers: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"score": answers.batch["answer"] + 0.5})


def main() -> None:
    options = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        # On the inline executor a host carries one live group: two ranks and one need three hosts.
        generators = DaskWorkerGroup(DaskResourcePool([2], use_gpu=False), DaskClassWithInitArgs(Generator))
        scorers = DaskWorkerGroup(DaskResourcePool([1], use_gpu=False), DaskClassWithInitArgs(Scorer))
        with generators, scorers:
            answers = generators.generate(DataProto.from_dict(tensors={"x": torch.arange(6)}))
            scores = scorers.score(answers)  # may be called before the answers exist
            print("both calls returned at once:", not answers.done() and not scores.done())
            # get() waits, and brings the rows here. The answers were never here, only the scores.
            print("scores:", scores.get().batch["score"].tolist())
            # One ordinary distributed.Future per producing rank: what works on those, works on these.
            print("rows on each producer:", client.gather(client.map(len, answers.futures)))
            # Half of the rows: a new future, no data moved.
            first, second = answers.chunk(2)
            print("second half:", second.get().batch["answer"].tolist())
            del answers, scores, first, second  # dropping them frees the memory on the hosts


if __name__ == "__main__":
    main()
