"""all_gather_data_proto over gloo, with one thread per rank: no processes, no cluster."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dask_controller.errors import KeyConflictError, UnsupportedTypeError
from dask_controller.protocol import DataProto
from dask_controller.protocol import gather as gather_module
from dask_controller.protocol.gather import all_gather_data_proto
from tests.protocol.batches import assert_same_batch, zoo

WORLD = 3


class FakeDist:
    """The three collectives the function uses, over a store shared by threads; every rank sees its own group."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def get_world_size(self, group: Group) -> int:
        return WORLD

    def get_backend(self, group: Group) -> str:
        return "gloo"

    def all_gather_object(self, out: list[Any], mine: Any, group: Group) -> None:
        import pickle

        out[:] = [pickle.loads(each) for each in group.exchange(pickle.dumps(mine))]

    def all_gather(self, out: list[torch.Tensor], mine: torch.Tensor, group: Group) -> None:
        for target, raw in zip(out, group.exchange(mine.numpy().tobytes()), strict=True):
            if target.numel():
                target.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


class Group:
    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank, self.round = store, rank, 0

    def exchange(self, raw: bytes) -> list[bytes]:
        self.round += 1
        self.store.set(f"{self.round}/{self.rank}", raw + b"!")  # the store refuses empty values
        return [self.store.get(f"{self.round}/{rank}")[:-1] for rank in range(WORLD)]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Group], Any]], list[Any]]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(gather_module, "dist", FakeDist(store))

    def run(function: Callable[[int, Group], Any]) -> list[Any]:
        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(lambda rank: function(rank, Group(store, rank)), range(WORLD)))

    return run


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 0, 3), (0, 0, 0)])
def test_all_rows_of_all_ranks_in_rank_order(on_ranks: Any, sizes: tuple[int, ...]) -> None:
    whole = zoo(sum(sizes))
    starts = [sum(sizes[:rank]) for rank in range(WORLD)]

    def gather(rank: int, group: Group) -> DataProto:
        mine = whole[starts[rank] : starts[rank] + sizes[rank]]
        mine.meta_info["rank"] = rank
        assert all_gather_data_proto(mine, group) is None
        return mine

    for rank, result in enumerate(on_ranks(gather)):
        assert result.meta_info.pop("rank") == rank
        assert_same_batch(result, whole)


def test_object_columns_alone(on_ranks: Any) -> None:
    def gather(rank: int, group: Group) -> list[Any]:
        mine = DataProto.from_dict(non_tensors={"o": [[rank]] * (rank + 1)})
        all_gather_data_proto(mine, group)
        return mine.non_tensor_batch["o"].tolist()

    assert on_ranks(gather) == [[[0], [1], [1], [2], [2], [2]]] * 3


def test_every_rank_hears_of_a_mismatch(on_ranks: Any) -> None:
    def gather(rank: int, group: Group) -> str:
        mine = DataProto.from_dict({"x": torch.zeros(2, 1 + (rank == 2))})
        with pytest.raises(KeyConflictError, match="rank 2") as caught:
            all_gather_data_proto(mine, group)
        return str(caught.value)

    assert len(set(on_ranks(gather))) == 1


def test_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="dict"):
        all_gather_data_proto({}, None)  # type: ignore[arg-type]


def test_a_real_gloo_group_of_one(tmp_path: Any) -> None:
    if dist.is_initialized():
        pytest.skip("another test holds the process group")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dp = zoo(3)
        all_gather_data_proto(dp, dist.group.WORLD)
        assert_same_batch(dp, zoo(3))
    finally:
        dist.destroy_process_group()
