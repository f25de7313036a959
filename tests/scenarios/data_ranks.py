"""Ranks for the data scenarios, and what their tests share."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from distributed import Client
from distributed.comm import tcp

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

__all__ = ["LIMIT_S", "MeshRows", "Rows", "Traffic", "batch_of", "checksums", "make_group", "until", "wait_for_file"]

#: Nothing in these tests takes long; a wait that lasts this long hangs.
LIMIT_S = 30.0


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Ask again and again until the answer is true, and return it."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.01)
    return answer


def wait_for_file(path: str) -> None:
    """Block the calling thread until a file is there."""
    until(lambda: os.path.exists(path), f"{path} is there")


def make_group(client: Client, cls: type, ranks: int, *args: Any, **options: Any) -> DaskWorkerGroup:
    """Return a group on hosts that need no GPU slot."""
    pool = DaskResourcePool([ranks], use_gpu=False)
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(cls, *args), client=client, **options)


class Traffic:
    """Counts every byte that this process reads from and writes to TCP connections while the block runs.

    In the tests' clusters the scheduler lives in the controller's process, so that its bytes count as well.
    """

    def __init__(self) -> None:
        self.read = 0
        self.written = 0

    def __enter__(self) -> Traffic:
        self._read, self._write = tcp.read_bytes_rw, tcp.TCP.write

        async def read_bytes_rw(stream: Any, n: int) -> Any:
            self.read += n
            return await self._read(stream, n)

        async def write(comm: Any, *args: Any, **kwargs: Any) -> Any:
            nbytes = await self._write(comm, *args, **kwargs)
            self.written += nbytes
            return nbytes

        tcp.read_bytes_rw, tcp.TCP.write = read_bytes_rw, write
        return self

    def __exit__(self, *args: object) -> None:
        tcp.read_bytes_rw, tcp.TCP.write = self._read, self._write


def batch_of(rows: int, **options: Any) -> DataProto:
    """A batch whose rows tell their number, in tensors and in object columns."""
    return DataProto.from_dict(
        tensors={
            "x": torch.arange(rows, dtype=torch.float32),
            "pair": torch.arange(2 * rows, dtype=torch.int16).view(rows, 2),
        },
        non_tensors={"id": [f"row {i}" for i in range(rows)], "list": [[i] * (i % 3) for i in range(rows)]},
        **options,
    )


def checksums(data: DataProto) -> dict[str, str]:
    """One digest for each column, over dtype, shape and every byte."""
    out = {}
    for key, column in data.batch.items():
        raw = column.contiguous().reshape(-1).view(torch.uint8).numpy()
        out[key] = hashlib.sha256(f"{column.dtype} {tuple(column.shape)}".encode() + raw.tobytes()).hexdigest()
    for key, column in data.non_tensor_batch.items():
        raw = repr(column.tolist()).encode() if column.dtype == object else np.ascontiguousarray(column).tobytes()
        out[key] = hashlib.sha256(f"{column.dtype} {column.shape}".encode() + raw).hexdigest()
    return out


class Rows(Worker):
    """Gives back what it gets, or what a function of the test makes of it."""

    def __init__(self) -> None:
        self.calls = 0
        self.held: Any = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: Any) -> Any:
        self.calls += 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo_later(self, data: Any) -> Any:
        self.calls += 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, left: DataProto, right: DataProto) -> DataProto:
        self.calls += 1
        return DataProto.from_dict({"x": left.batch["x"] + right.batch["x"]}, dict(left.non_tensor_batch))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def sizes(self, data: Any) -> int:
        self.calls += 1
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def sizes_later(self, data: Any) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def digests(self, data: DataProto) -> dict[str, str]:
        return checksums(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def first_rows(self, data: DataProto) -> list[float]:
        return list(data.batch["x"].tolist())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, func: Callable[..., Any], *data: Any) -> Any:
        return func(self.rank, *data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, blocking=False)
    def apply_later(self, func: Callable[..., Any], *data: Any) -> Any:
        return func(self.rank, *data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def apply_each(self, data: Any) -> Any:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def show(self, value: Any) -> tuple[int, str, Any]:
        return self.rank, type(value).__name__, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests_of_all(self, data: DataProto) -> dict[str, str]:
        return checksums(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
    def kinds(self, value: Any) -> Any:
        return type(value).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
    def fetch_on_rank(self, later: Any) -> list[float]:
        return list(later.get(timeout=LIMIT_S).batch["x"].tolist())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, blocking=False)
    def hold(self, wait: Callable[[int], None], data: Any) -> Any:
        wait(self.rank)
        return data

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def on_zero(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.calls


class MeshRows(Worker):
    """A mesh of two data-parallel indices with two peers each; only the first peer of each is collected."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)
        self.seen: list[float] = []

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def echo(self, data: DataProto) -> DataProto:
        self.seen = data.batch["x"].tolist()
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def echo_later(self, data: DataProto) -> DataProto:
        self.seen = data.batch["x"].tolist()
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def apply(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"rank": self.rank, "metrics": {"loss": self.rank}}).union(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def what_was_seen(self) -> list[float]:
        return self.seen
