"""A group without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_controller.protocol.future import DataProtoFuture
from dask_controller.protocol.plan import keys_of, pieces_of


class FakeGroup:
    """All that dispatch and collect functions may see of a group."""

    def __init__(self, world_size: int, mapping: Sequence[int] = (), mask: Sequence[bool] = ()) -> None:
        self.world_size = world_size
        self.mapping = mapping
        self.mask = mask
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self.asked: list[tuple[str, str]] = []

    def _query_dispatch_info(self, mesh_name: str) -> Any:
        self.asked.append(("dispatch", mesh_name))
        return self.mapping

    def _query_collect_info(self, mesh_name: str) -> Any:
        self.asked.append(("collect", mesh_name))
        return self.mask


def rows_asked(future: DataProtoFuture, lengths: dict[str, int]) -> list[int]:
    """How many rows a plan takes from each run of rows, when the parts have `lengths`."""
    keys = keys_of(future._node)
    numbering = {key: i for i, key in enumerate(keys)}
    (strand,) = future._node.strands(numbering, {i: lengths[str(key)] for i, key in enumerate(keys)})
    pieces, order = pieces_of(strand.rows)
    assert order is None
    return [piece.num_rows for piece in pieces]
