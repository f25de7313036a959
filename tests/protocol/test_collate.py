"""Mini-batches: every row once an epoch, repeatable with a seed, and the global random state left alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dask_controller.errors import BatchMismatchError, ChunkError, KeyConflictError, UnsupportedTypeError
from dask_controller.protocol import DataProto, collate_fn
from tests.protocol.batches import assert_same_batch, fingerprint, zoo

SHUFFLE = {"shuffle": True}


def order(batches: Any) -> list[list[int]]:
    return [batch.batch["index"].tolist() for batch in batches]


def test_every_row_once_per_epoch_in_order() -> None:
    dp = zoo(6)
    batches = list(dp.make_iterator(2, 2))
    assert order(batches) == [[0, 1], [2, 3], [4, 5]] * 2
    assert_same_batch(DataProto.concat(batches[:3]), dp)


def test_a_seed_fixes_the_order_and_epochs_differ() -> None:
    dp = zoo(12)
    first = order(dp.make_iterator(3, 2, seed=1, dataloader_kwargs=SHUFFLE))
    assert first == order(dp.make_iterator(3, 2, seed=1, dataloader_kwargs=SHUFFLE))
    assert first != order(dp.make_iterator(3, 2, seed=2, dataloader_kwargs=SHUFFLE))
    assert sorted(sum(first[:4], [])) == list(range(12)) and first[:4] != first[4:]
    with_objects = list(dp.make_iterator(3, 1, seed=1, dataloader_kwargs=SHUFFLE))
    assert [b.non_tensor_batch["number"].tolist() for b in with_objects] == first[:4]


def global_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


@pytest.mark.parametrize("seed", [None, 3])
def test_the_global_random_state_is_left_alone(seed: int | None) -> None:
    before = global_state()
    list(zoo(4).make_iterator(2, 2, seed=seed, dataloader_kwargs=SHUFFLE))
    list(zoo(4).make_iterator(2, 1, seed=seed))
    assert global_state() == before
    torch.manual_seed(0)
    one = order(zoo(64).make_iterator(64, 1, dataloader_kwargs=SHUFFLE))
    torch.manual_seed(0)
    assert one != order(zoo(64).make_iterator(64, 1, dataloader_kwargs=SHUFFLE))


def test_sizes_that_do_not_fit_are_refused_at_once() -> None:
    dp = zoo(5)
    with pytest.raises(ChunkError, match="5 rows.*mini-batches of 2.*drop_last"):
        dp.make_iterator(2, 1)
    assert order(dp.make_iterator(2, 1, dataloader_kwargs={"drop_last": True})) == [[0, 1], [2, 3]]
    for size in (0, -1, 1.5):
        with pytest.raises(ChunkError, match="mini_batch_size"):
            dp.make_iterator(size, 1)  # type: ignore[arg-type]
    with pytest.raises(ChunkError, match="epochs"):
        dp.make_iterator(5, -1)
    with pytest.raises(UnsupportedTypeError):
        dp.make_iterator(5, 1, dataloader_kwargs=[1])  # type: ignore[arg-type]
    assert list(dp.make_iterator(5, 0)) == []


def test_mini_batches_are_independent() -> None:
    dp = zoo(4)
    before = fingerprint(dp)
    batches = list(dp.make_iterator(2, 2))
    batches[0].meta_info["nested"]["a"].append(5)
    batches[0].batch["float"] += 1
    batches[0].pop(["index"])
    assert fingerprint(dp) == before and batches[2].meta_info["nested"]["a"] == [1, {"b": 2}]
    assert torch.equal(batches[2].batch["float"], dp.batch["float"][:2])


def test_batches_without_tensors_and_own_collate() -> None:
    dp = DataProto.from_dict(non_tensors={"o": [[1], [2], [3], [4]]})
    assert [b.non_tensor_batch["o"].tolist() for b in dp.make_iterator(2, 1)] == [[[1], [2]], [[3], [4]]]
    assert list(dp.make_iterator(2, 1, dataloader_kwargs={"collate_fn": len})) == [2, 2]
    mine = torch.Generator().manual_seed(0)
    assert len(list(dp.make_iterator(2, 1, dataloader_kwargs={"generator": mine, **SHUFFLE}))) == 2


def test_collate_fn_with_a_plain_dataloader() -> None:
    dp = zoo(6)
    batches = list(DataLoader(dp, batch_size=3, collate_fn=collate_fn, generator=torch.Generator()))  # type: ignore[arg-type]
    joined = DataProto.concat(batches)
    assert joined.batch["index"].tolist() == list(range(6))
    assert torch.equal(joined.batch["jagged"].values(), dp.batch["jagged"].values())
    assert joined.non_tensor_batch["ids"].shape == (6,) and joined.non_tensor_batch["ids"].tolist()[1] == [1, 1]


def test_collate_fn_says_what_does_not_fit() -> None:
    with pytest.raises(BatchMismatchError, match="empty"):
        collate_fn([])
    with pytest.raises(KeyConflictError):
        collate_fn([zoo(1)[0], DataProto.from_dict(non_tensors={"ids": [1]})[0]])
    with pytest.raises(BatchMismatchError, match="'x'"):
        collate_fn([DataProto.from_dict({"x": torch.zeros(1, 2, n)})[0] for n in (2, 3)])
    objects = collate_fn([DataProto.from_dict(non_tensors={"o": [[1, 2]]})[0]] * 2)
    assert objects.batch is None and objects.non_tensor_batch["o"].shape == (2,)
