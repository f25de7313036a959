"""One call to some ranks, from the moment it is issued to the last answer.

Owns the bookkeeping of a call (who has answered, with what, who failed, who was lost) and the errors that come of
it. Plain state, changed on the client's event loop and awaited by the user's thread; no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as ConcurrentFuture
from typing import Any

from dask_controller.errors import RankFailedError, RankLostError, RemoteError
from dask_controller.protocol.serialize import Packed
from dask_controller.runtime.futures import KeptFacts, ResultInfo
from dask_controller.worker.failure import restore_failure

__all__ = ["Call", "failed_error", "lost_error"]


def failed_error(
    method: str,
    group: str,
    failures: Mapping[int, BaseException],
    hosts: Mapping[int, str],
    traces: Mapping[int, str],
    running: Sequence[int],
) -> RankFailedError:
    """The error for user code that raised, with the first failing rank's exception as its cause."""
    first = next(iter(failures))
    error = failures[first]
    lines = [f"{method}() failed on rank {first} ({hosts[first]}, group {group!r}): {_one_line(error)}"]
    for rank, other in failures.items():
        if rank != first:
            lines.append(f"  also failed: rank {rank} ({hosts[rank]}): {_one_line(other)}")
    if running:
        lines.append(f"  no answer yet from ranks {list(running)}; the call goes on there, later calls wait for it")
    if traces.get(first):
        lines.append(f"Traceback on rank {first}:\n{traces[first].rstrip()}")
    return RankFailedError("\n".join(lines), method, failures, {r: hosts[r] for r in failures}, running)


def lost_error(method: str, group: str, lost: Mapping[int, str], reason: str, *, sent: bool = True) -> RankLostError:
    """The error for ranks whose host is gone; ``sent`` says whether the call had left."""
    rank = next(iter(lost))
    others = "" if len(lost) == 1 else f" (lost in all: ranks {sorted(lost)})"
    doing = "between calls" if not method else f"during {method}()" if sent else f"before {method}() was called"
    return RankLostError(
        f"rank {rank} of group {group!r} was lost {doing}: its host {lost[rank]} is gone{others}: {reason}. The group "
        "cannot be used any more: close it, see the log of the Dask worker (out of memory, a signal, scaled down?), "
        "and make a new group",
        method,
        rank,
        lost[rank],
        lost,
    )


def _one_line(error: BaseException) -> str:
    # By type, not by attribute: a SyntaxError, for one, has a ``text`` that is no message.
    name, text = (error.type_name, error.text) if isinstance(error, RemoteError) else (type(error).__name__, str(error))
    return f"{name}: {text.splitlines()[0]}" if text.strip() else name


class Call:
    """A call that is on its way or done.

    Parameters
    ----------
    call_id : int
        Number of the call in its group.
    method : str
        Method name.
    group : str
        Name of the group.
    hosts : mapping of int to str
        Ranks called, with the address of their host.
    infos : mapping of int to ResultInfo
        For a non-blocking call: the records of the results that ranks will keep.
    """

    def __init__(
        self,
        call_id: int,
        method: str,
        group: str,
        hosts: Mapping[int, str],
        infos: Mapping[int, ResultInfo] | None = None,
    ) -> None:
        self.call_id = call_id
        self.method = method
        self.group = group
        self.hosts = dict(hosts)
        self.infos = dict(infos or {})
        self.pending = set(hosts)
        self.values: dict[int, Packed | None] = {}
        self.failures: dict[int, BaseException] = {}
        self.traces: dict[int, str] = {}
        #: Set with the answers by rank, or with the one error of the call.
        self.done: ConcurrentFuture[dict[int, Packed | None]] = ConcurrentFuture()
        #: Set when every host has taken the arguments off the controller's memory.
        self.accepted: ConcurrentFuture[None] = ConcurrentFuture()
        self._unaccepted = set(hosts.values())
        #: Address to bytes of arguments that the host holds until the call is over.
        self.in_flight: dict[str, int] = {}
        #: Settles the call when other ranks do not answer after the first failure; holds it for as long as it stands.
        self.timer: asyncio.TimerHandle | None = None
        #: Objects that must live until the call is over, such as the futures it reads.
        self.keep: list[Any] = []

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return not self.pending

    def accept(self, host: str) -> None:
        """The host has read the call off the wire."""
        self._unaccepted.discard(host)
        if not self._unaccepted and not self.accepted.done():
            self.accepted.set_result(None)

    def answer(
        self,
        rank: int,
        value: Packed | None,
        kept: KeptFacts | None,
        failure: dict[str, Any] | None,
        fail_future: Callable[[str, BaseException], None],
    ) -> None:
        """Take a rank's answer."""
        if rank not in self.pending:
            return
        self.pending.discard(rank)
        info = self.infos.get(rank)
        if failure is not None:
            self.failures[rank] = restore_failure(failure)
            self.traces[rank] = failure["traceback"]
            if info is not None:
                error = failed_error(self.method, self.group, {rank: self.failures[rank]}, self.hosts, self.traces, ())
                self._fail_info(info, error, fail_future)
        else:
            self.values[rank] = value
            if info is not None and kept is not None:
                info.done.set_result(kept)

    def lose(self, lost: Mapping[int, str], reason: str, fail_future: Callable[[str, BaseException], None]) -> None:
        """The hosts of some ranks are gone."""
        mine = {rank: host for rank, host in lost.items() if rank in self.pending}
        if not mine:
            return
        error = lost_error(self.method, self.group, mine, reason)
        for rank in mine:
            self.pending.discard(rank)
            info = self.infos.get(rank)
            if info is not None:
                self._fail_info(info, error, fail_future)
        for host in mine.values():
            self.accept(host)
        if not self.done.done():
            self.done.set_exception(error)

    def abandon(self, error: BaseException, fail_future: Callable[[str, BaseException], None]) -> None:
        """The call will never be sent, or its answers will never be heard."""
        for rank in list(self.pending):
            info = self.infos.get(rank)
            if info is not None:
                self._fail_info(info, error, fail_future)
        self.pending.clear()
        for host in list(self._unaccepted):
            self.accept(host)
        if not self.done.done():
            self.done.set_exception(error)

    def settle(self) -> None:
        """Set :attr:`done` from the answers so far."""
        if self.done.done():
            return
        if self.failures:
            self.done.set_exception(
                failed_error(self.method, self.group, self.failures, self.hosts, self.traces, sorted(self.pending))
            )
        else:
            self.done.set_result(self.values)

    @staticmethod
    def _fail_info(info: ResultInfo, error: BaseException, fail_future: Callable[[str, BaseException], None]) -> None:
        if not info.done.done():
            info.done.set_exception(error)
            fail_future(info.key, error)
