"""Being inside a Dask task: knowing it, and giving the task's thread back while waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distributed import rejoin, secede
from distributed.threadpoolexecutor import thread_state as pool_state
from distributed.utils import thread_state as task_state  # type: ignore[attr-defined]

__all__ = ["inside_task", "thread_released"]


def inside_task() -> bool:
    """Whether this thread runs a Dask task that occupies a slot of its worker's thread pool."""
    # Dask keeps two records of a thread: the pool's, which a seceded thread has left, and the task's. Methods of actors
    # have both as well, but run in a pool of their own.
    in_pool = getattr(pool_state, "proceed", False)
    return in_pool and hasattr(task_state, "key") and not getattr(task_state, "actor", False)


@contextmanager
def thread_released() -> Iterator[None]:
    """Give the task's thread back to the worker for the length of the block, if this is a Dask task.

    A task that makes a group waits for actors, which may be placed on its own host and need a thread there.
    """
    if not inside_task():
        yield
        return
    secede()
    try:
        yield
    finally:
        rejoin()
