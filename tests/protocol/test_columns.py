"""Columns that torch or tensordict cannot cut by themselves, in this or in older releases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dask_controller.errors import UnsupportedTypeError
from dask_controller.protocol import DataProto
from dask_controller.protocol.columns import map_rows, object_column, row_indices, stack_nested, take_tensordict
from dask_controller.protocol.meta import equal_values

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")


def nested(layout: torch.layout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(float(n)).to(dtype) for n in (3, 1, 0, 4)], layout=layout)


def lists(column: Any) -> list[Any]:
    return [row.tolist() for row in column.unbind()]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_rows_of_nested_tensors(layout: torch.layout, dtype: torch.dtype) -> None:
    dp = DataProto.from_dict({"n": nested(layout, dtype), "x": torch.arange(4)})
    whole = lists(dp.batch["n"])
    for picked, rows in [(dp[1:3], [1, 2]), (dp[[3, 0, 0]], [3, 0, 0]), (dp[::-1], [3, 2, 1, 0]), (dp[:0], [])]:
        column = picked.batch.get("n")
        assert column.layout == layout and column.dtype == dtype
        assert picked.batch["x"].tolist() == rows
        if rows:
            assert lists(column) == [whole[row] for row in rows]
    assert "(4, jagged)" in dp.get_data_info()
    dp.print_size()
    joined = DataProto.concat(dp.chunk(3))
    assert lists(joined.batch["n"]) == whole and lists(dp.repeat(2).batch["n"])[:2] == [whole[0], whole[0]]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_stacking_nested_rows_by_hand(layout: torch.layout) -> None:
    like = nested(layout, torch.bfloat16)
    again = stack_nested(list(like.unbind()), like)
    assert again.layout == layout and again.dtype is torch.bfloat16 and lists(again) == lists(like)
    nothing = stack_nested([], like)
    assert nothing.layout == layout and nothing.dtype is torch.bfloat16 and nothing.size(0) == 0


def test_indexing_that_tensordict_refuses_is_done_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    td = TensorDict({"n": nested(torch.jagged), "deep": {"x": torch.arange(4)}}, batch_size=[4])
    expected = take_tensordict(td, np.array([3, 0]))

    def refuse(self: Any, index: Any) -> Any:
        raise RuntimeError("slice(): not supported for NestedTensor on dim=0")

    monkeypatch.setattr(TensorDict, "__getitem__", refuse)
    taken = take_tensordict(td, np.array([3, 0]))
    assert lists(taken.get("n")) == lists(expected.get("n")) and equal_values(taken.get("deep"), expected.get("deep"))


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint7, torch.bits8, torch.bits16, torch.float4_e2m1fn_x2], ids=str)
def test_dtypes_that_torch_cannot_index(dtype: torch.dtype) -> None:
    column = torch.arange(8, dtype=torch.uint8).view(dtype)
    rows = len(column)
    dp = DataProto.from_dict({"x": column})
    picked = dp[list(range(rows))[::-1]].batch["x"]
    assert picked.dtype == dtype
    flipped = picked.view(torch.uint8).view(rows, -1).flip(0).reshape(-1)
    assert flipped.tolist() == list(range(8))


def test_map_rows_keeps_nesting_and_device() -> None:
    td = TensorDict({"a": {"b": torch.arange(2)}}, batch_size=[2], device="cpu")
    doubled = map_rows(td, lambda column: torch.cat([column, column]), 4)
    assert doubled["a", "b"].tolist() == [0, 1, 0, 1] and doubled.device == torch.device("cpu")


def test_row_indices_and_columns() -> None:
    assert row_indices(range(3), 5).tolist() == [0, 1, 2]
    assert row_indices(np.array([-1], dtype=np.int8), 5).tolist() == [4]
    assert row_indices(np.array([3], dtype=np.uint64), 5).tolist() == [3]
    with pytest.raises(UnsupportedTypeError, match="1-D float64"):
        row_indices(np.zeros(0), 5)
    assert object_column(torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert object_column(iter("ab")).tolist() == ["a", "b"]
