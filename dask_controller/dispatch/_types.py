"""The shapes that the modules of this package agree on: the group as they see it, and the two functions of a mode.

Types only, nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypedDict

__all__ = ["CollectFn", "DispatchFn", "DispatchPair", "Dispatched", "WorkerGroupLike"]

#: What a dispatch function returns: positional arguments, each a list with one element per rank, and keyword arguments
#: of the same form. Sequence and mapping types are the function's own choice.
Dispatched: TypeAlias = tuple[Any, Any]

#: ``dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs)``
DispatchFn: TypeAlias = Callable[..., Dispatched]

#: ``collect_fn(worker_group, output) -> result``
CollectFn: TypeAlias = Callable[..., Any]


class DispatchPair(TypedDict):
    """The two functions behind a dispatch mode."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


class WorkerGroupLike(Protocol):
    """All that dispatch and collect functions may ask of a group."""

    #: Mesh name to the data-parallel index of every rank, filled at the first call over that mesh.
    _dispatch_info: dict[str, list[int]]
    #: Mesh name to whether the result of a rank is collected.
    _collect_info: dict[str, list[bool]]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def _query_dispatch_info(self, mesh_name: str) -> list[int]: ...

    def _query_collect_info(self, mesh_name: str) -> list[bool]: ...
