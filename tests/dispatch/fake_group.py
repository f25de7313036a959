"""A group without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
