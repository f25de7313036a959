"""Being inside a Dask task: knowing it, and giving the task's thread back while waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distributed import get_worker, rejoin, secede
from distributed.threadpoolexecutor import thread_state

__all__ = ["inside_task", "thread_released"]


def inside_task() -> bool:
    """Whether this thread runs a Dask task that occupies a slot of its worker's thread pool."""
    if not getattr(thread_state, "proceed", False):
        return False
    try:
        get_worker()
    except ValueError:
        return False
    return getattr(thread_state, "key", None) is not None


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
