"""Where user code runs: the seam between a rank and the thread or process that carries it.

Owns the :class:`Executor` interface and the inline implementation, in which the user's object lives in the Dask
worker's own process: plain methods run on one thread of the rank, in order, one at a time; coroutine methods run on
an event loop of the rank's own, started in order and free to overlap. Neither is Dask's loop nor one of its threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from dask_controller.worker.runner import Outcome, ResolvedRef, Runner, Work

__all__ = ["Executor", "InlineExecutor", "Running"]


@dataclass(frozen=True)
class Running:
    """What an executor is doing now."""

    method: str
    since: float  # time.monotonic()


class Executor(Protocol):
    """Carries the calls of one rank."""

    def submit(self, work: Work, refs: ConcurrentFuture[list[list[ResolvedRef]]] | None) -> None:
        """Queue a call. Returns at once; calls start in the order of submission.

        ``refs`` gives the data the call refers to, once they have arrived; the call keeps its place in the order
        while it waits for them.
        """

    def stop(self) -> None:
        """End after the calls queued so far. Returns at once; ``on_end`` of the constructor is called at the end."""

    def running(self) -> list[Running]:
        """The calls being carried out now."""

    def queued(self) -> int:
        """Calls that have not started."""

    def stack(self) -> str:
        """The Python stack of the rank's thread, for reports."""


class InlineExecutor:
    """Runs calls in this process.

    Parameters
    ----------
    name : str
        Names the threads.
    prepare : callable
        Called first on the rank's thread.
    on_end : callable
        Called last on the rank's thread, after :meth:`stop`.
    """

    def __init__(self, name: str, prepare: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._runner = Runner()
        self._queue: SimpleQueue[tuple[Work, ConcurrentFuture[list[list[ResolvedRef]]] | None] | None] = SimpleQueue()
        self._prepare = prepare
        self._on_end = on_end
        self._name = name
        self._current: Running | None = None
        self._async_running: dict[int, Running] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        # Daemon: a rank stuck in user code must not keep the host from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, refs: ConcurrentFuture[list[list[ResolvedRef]]] | None) -> None:
        self._queue.put((work, refs))

    def stop(self) -> None:
        self._queue.put(None)

    def running(self) -> list[Running]:
        current = self._current
        return ([current] if current is not None else []) + list(self._async_running.values())

    def queued(self) -> int:
        return self._queue.qsize()

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _run(self) -> None:
        try:
            self._prepare()
            while (item := self._queue.get()) is not None:
                self._one(*item)
                del item
        finally:
            self._stop_loop()
            self._runner.target = None
            self._on_end()

    def _one(self, work: Work, refs: ConcurrentFuture[list[list[ResolvedRef]]] | None) -> None:
        self._current = Running(work.method, time.monotonic())
        try:
            if refs is not None:
                try:
                    work.refs = refs.result()
                except BaseException as error:
                    from dask_controller.worker.failure import describe_failure

                    work.reply(Outcome(failure=describe_failure(error)))
                    return
            if self._runner.is_async(work.method):
                self._start_async(work)
            else:
                # A fresh context per call: what a method leaves in context variables must not reach the next one.
                work.reply(contextvars.copy_context().run(self._runner.run, work))
        finally:
            self._current = None

    # ------------------------------------------------------------------ coroutine methods

    def _start_async(self, work: Work) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            context = contextvars.copy_context()
            self._loop_thread = threading.Thread(
                target=context.run, args=(self._loop.run_forever,), name=f"{self._name}-async", daemon=True
            )
            self._loop_thread.start()
        self._async_running[work.call_id] = Running(work.method, time.monotonic())
        asyncio.run_coroutine_threadsafe(self._run_async(work), self._loop)

    async def _run_async(self, work: Work) -> None:
        try:
            outcome = await self._runner.run_async(work)
        finally:
            self._async_running.pop(work.call_id, None)
        work.reply(outcome)

    def _stop_loop(self) -> None:
        loop, thread = self._loop, self._loop_thread
        if loop is None or thread is None:
            return

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            loop.stop()

        asyncio.run_coroutine_threadsafe(cancel_all(), loop)
        # A coroutine that blocks its loop cannot be cancelled; the thread is a daemon and is left to itself.
        thread.join(timeout=5)
        if not thread.is_alive():
            loop.close()


_: type[Executor] = InlineExecutor
del _
