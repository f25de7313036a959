"""BatchData: one face for all types that can be cut and joined; anything else is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from dask_controller.errors import BatchMismatchError, ChunkError, KeyConflictError, UnsupportedTypeError
from dask_controller.protocol import BatchData, DataProto
from tests.protocol.batches import assert_same_batch, fingerprint, zoo


def td(rows: int) -> TensorDict:
    jagged = torch.nested.nested_tensor(
        [torch.ones(n) for n in range(1, rows + 1)] or [torch.ones(0)], layout=torch.jagged
    )
    columns = {"x": torch.arange(rows)} | ({"j": jagged} if rows else {})
    return TensorDict(columns, batch_size=[rows])


@pytest.mark.parametrize(("rows", "chunks"), [(5, 3), (2, 4), (6, 4), (0, 2)])
def test_tensordicts(rows: int, chunks: int) -> None:
    data = td(rows)
    before = fingerprint(data)
    pieces = BatchData(data).chunk(chunks=chunks)
    assert len(pieces) == chunks and all(isinstance(piece, TensorDict) for piece in pieces)
    assert BatchData(pieces).is_concatable()
    joined = BatchData(pieces).concat()
    assert isinstance(joined, TensorDict) and joined["x"].tolist() == list(range(rows))
    assert fingerprint(data) == before


def test_data_protos() -> None:
    dp = zoo(5)
    assert BatchData(dp).is_chunkable() and not BatchData(dp).is_concatable()
    pieces = BatchData(dp).chunk(chunks=3)
    assert all(type(piece) is DataProto for piece in pieces)
    assert_same_batch(BatchData(tuple(pieces)).concat(), dp)


@pytest.mark.parametrize("value", [None, 1, "text", [1], {"x": torch.zeros(2)}, torch.zeros(2)], ids=repr)
def test_other_values(value: Any) -> None:
    assert not BatchData(value).is_chunkable() and not BatchData(value).is_concatable()
    with pytest.raises(UnsupportedTypeError, match="cannot be cut"):
        BatchData(value).chunk(2)
    with pytest.raises(UnsupportedTypeError):
        BatchData(value).concat()


def test_what_cannot_be_joined() -> None:
    assert not BatchData([]).is_concatable()
    with pytest.raises(BatchMismatchError, match="empty"):
        BatchData([]).concat()
    mixed = [zoo(1), td(1)]
    assert not BatchData(mixed).is_concatable()
    with pytest.raises(UnsupportedTypeError, match=r"one type.*\['DataProto', 'TensorDict'\]"):
        BatchData(mixed).concat()
    with pytest.raises(KeyConflictError):
        BatchData([td(1), TensorDict({"y": torch.zeros(1)}, [1])]).concat()
    with pytest.raises(ChunkError):
        BatchData(zoo(2)).chunk(0)
    with pytest.raises(BatchMismatchError, match="batch_size"):
        BatchData(TensorDict({}, batch_size=[])).chunk(2)
