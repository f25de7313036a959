"""One rank, addressed by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Future

    from dask_controller.group.group import DaskWorkerGroup

__all__ = ["RankHandle"]


class RankHandle:
    """A rank of a group: ``group.workers[r]``.

    ``handle.method(*args)`` calls any method of the rank's object, marked or not, on this rank alone, and returns its
    result; ``handle.execute_async("method", *args)`` returns a ``distributed.Future``. Such calls take their place in
    the rank's order like any other.
    """

    def __init__(self, group: DaskWorkerGroup, rank: int, name: str, host: str) -> None:
        self._group = group
        self.rank = rank
        self.name = name
        self.host = host

    def execute(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` on this rank and return its result. Blocks."""
        return self._group._call_ranks(method, [self.rank], args, kwargs, blocking=True)[0]

    def execute_async(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``method`` on this rank; its result stays on the rank's host. Does not block."""
        out: Future[Any] = self._group._call_ranks(method, [self.rank], args, kwargs, blocking=False)[0]
        return out

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.execute(name, *args, **kwargs)

        call.__name__ = name
        return call

    def __repr__(self) -> str:
        return f"<dask_controller.RankHandle {self.name!r}: rank {self.rank} on {self.host}>"
