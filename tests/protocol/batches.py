"""Batches for the tests of this folder, and ways to compare them down to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.meta import equal_values
from dask_controller.protocol.serialize import pack

__all__ = ["assert_same_batch", "fingerprint", "zoo"]


def zoo(rows: int, jagged: bool = True, seed: int = 0) -> DataProto:
    """A batch with one column of every kind that needs care, distinct in every row."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.rand(rows, 4, generator=generator)
    tensors = {
        "index": torch.arange(rows),
        "float": floats,
        "bf16": floats.to(torch.bfloat16),
        "fp8": floats.to(torch.float8_e4m3fn),
        "fp4": torch.arange(rows, dtype=torch.uint8).view(-1, 1).view(torch.float4_e2m1fn_x2),
        "bool": floats > 0.5,
        "complex": torch.complex(floats, floats * 2),
        "nan": torch.full((rows,), float("nan")),
        "hollow": torch.zeros(rows, 0, 3, dtype=torch.int16),
        "strided": torch.arange(rows * 6).view(6, rows).t(),
        "expanded": torch.arange(3).expand(rows, 3),
    }
    if jagged:
        lengths = torch.tensor([(7 * index) % 5 for index in range(rows)], dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.arange(int(offsets[-1]), dtype=torch.float64).view(-1, 1).expand(-1, 2).contiguous()
        tensors["jagged"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return DataProto.from_dict(
        tensors,
        {
            "ids": [[index, index] for index in range(rows)],
            "text": [f"row {index}" for index in range(rows)],
            "number": np.arange(rows, dtype=np.float32),
            "matrix": np.arange(rows * 6, dtype=np.int16).reshape(rows, 2, 3),
            "fixed": np.array([f"n{index}" for index in range(rows)], dtype="<U5"),
        },
        {"step": 3, "nested": {"a": [1, {"b": 2}]}, "nan": float("nan"), "t": torch.arange(3), "name": "zoo"},
    )


def fingerprint(value: Any) -> tuple[bytes, ...]:
    """Every bit of a value; equal before and after says that nothing in it changed."""
    packed = pack(value)
    return (packed.header, *(bytes(frame) for frame in packed.frames))


def assert_same_batch(left: DataProto, right: DataProto, meta: bool = True) -> None:
    """Same columns, dtypes, trailing shapes and values."""
    assert len(left) == len(right)
    assert (left.batch is None) == (right.batch is None)
    if left.batch is not None:
        assert set(left.batch.keys()) == set(right.batch.keys())
        for key in right.batch.keys():
            ours, theirs = left.batch.get(key), right.batch.get(key)
            assert ours.dtype == theirs.dtype, key
            if not theirs.is_nested:
                assert ours.shape == theirs.shape, key
            assert equal_values(ours, theirs), key
    assert set(left.non_tensor_batch) == set(right.non_tensor_batch)
    for key, column in right.non_tensor_batch.items():
        ours = left.non_tensor_batch[key]
        assert ours.dtype == column.dtype and ours.shape == column.shape, key
        assert equal_values(ours, column), key
        if column.dtype == object:
            assert [type(item) for item in ours] == [type(item) for item in column]
    if meta:
        assert equal_values(left.meta_info, right.meta_info)
