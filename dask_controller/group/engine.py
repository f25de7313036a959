"""The calls of a group: from arguments per rank to answers per rank.

Owns the channels to the hosts and every call in flight. The user's thread packs the arguments, hands the call to the
client's event loop in one step, and waits for one event; the loop sends one message per host and matches answers to
calls. Calls leave in the order in which they were issued, also when an early one waits for the data it refers to.
Does not own dispatch modes (``group/group.py``) or how the ranks came to be (``group/start.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as ConcurrentTimeoutError
from functools import partial
from typing import Any, cast

from distributed import Client, Future

from dask_controller.config import get_nbytes, get_seconds
from dask_controller.errors import GroupClosedError, RankError, RankTimeoutError
from dask_controller.group.call import Call, lost_error
from dask_controller.group.flow import Flow
from dask_controller.group.outgoing import Outgoing
from dask_controller.protocol.future import plan_reference
from dask_controller.protocol.serialize import unpack
from dask_controller.runtime import pending
from dask_controller.runtime.channel import Channel, call_host
from dask_controller.runtime.clients import CLIENT_CHECK_S, client_loop, is_open
from dask_controller.runtime.futures import KeptFacts, ResultInfo, attach_info

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """Carries calls to the ranks of one group.

    Parameters
    ----------
    client : distributed.Client
        The group's own client; not closed by the group.
    name : str
        Name of the group, for messages and keys.
    hosts : sequence of str
        Address of each rank's host, by rank.
    """

    def __init__(self, client: Client, name: str, hosts: Sequence[str], group_id: str | None = None) -> None:
        self.client = client
        self.loop = client_loop(client)
        self.name = name
        self.group_id = group_id or f"{name}-{uuid.uuid4().hex[:12]}"
        self.hosts = list(hosts)
        self.channels: dict[str, Channel] = {}
        self.route = "direct"
        self.lost: dict[int, str] = {}
        self.lost_reason = ""
        self.closed = False
        self.on_lost: list[Callable[[dict[int, str], str], None]] = []
        self._ids = itertools.count()
        self._calls: dict[int, Call] = {}
        self._issue_lock = threading.Lock()
        self._waiting: deque[tuple[Call, Outgoing, list[dict[str, Any]], bool]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._grace_s = get_seconds("failure-grace") or 0.0
        self._inline_limit = get_nbytes("inline-limit")
        self.flow = Flow(get_nbytes("bytes-in-flight"), self._inline_limit, get_seconds("paused-timeout") or 0.0)

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    # ------------------------------------------------------------------ the user's thread

    def issue(
        self,
        method: str,
        ranks: Sequence[int],
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Sequence[Any]],
        *,
        blocking: bool,
        collect: Sequence[bool] | None = None,
        materialize: bool = True,
        context: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[Call, list[Future[Any] | None]]:
        """Send a call to ``ranks``.

        Parameters
        ----------
        method : str
            Method name on the rank.
        ranks : sequence of int
            Ranks to call.
        args, kwargs
            For each argument, one value per called rank, in the order of ``ranks``.
        blocking : bool
            The caller will wait for the results, which are then sent; otherwise ranks keep them under Dask keys.
        collect : sequence of bool, optional
            Which of the called ranks give a result at all.
        context : sequence of mapping, optional
            Instructions to the ranks themselves, one per called rank.

        Returns
        -------
        call : Call
            To wait for.
        futures : list of Future or None
            For a non-blocking call, one per called rank; None where nothing is collected.

        Raises
        ------
        UnsupportedTypeError
            An argument cannot travel. No rank was called.
        RankLostError, GroupClosedError
            The group cannot be used any more.
        """
        self.check_usable(method)
        outgoing = Outgoing(materialize)
        positions = [[outgoing.add(per_rank[i]) for per_rank in args] for i in range(len(ranks))]
        named = [{name: outgoing.add(per_rank[i]) for name, per_rank in kwargs.items()} for i in range(len(ranks))]
        mask = list(collect) if collect is not None else [True] * len(ranks)
        hosts = {rank: self.hosts[rank] for rank in ranks}
        needed: dict[str, list[int]] = {}
        for i, rank in enumerate(ranks):
            mine = needed.setdefault(self.hosts[rank], [])
            mine += [p for p in (*positions[i], *named[i].values()) if p not in mine]
        sizes = {address: outgoing.nbytes_of(needed[address]) for address in needed}
        in_flight = self.flow.admit(sizes, lambda: self.check_usable(method), partial(self._refused, method))
        try:
            wait_accept = self._encode(outgoing, needed, blocking)
        except BaseException:
            self.flow.dismiss(in_flight)
            outgoing.discard()
            raise
        with self._issue_lock:
            call_id = next(self._ids)
            infos: dict[int, ResultInfo] = {}
            futures: list[Future[Any] | None] = []
            if not blocking:
                infos, futures = self._make_futures(call_id, method, ranks, mask)
            call = Call(call_id, method, self.name, hosts, infos)
            call.in_flight = in_flight
            calls = []
            for i, rank in enumerate(ranks):
                where = {p: k for k, p in enumerate(needed[self.hosts[rank]])}
                entry: dict[str, Any] = {
                    "rank": rank,
                    "method": method,
                    "args": [where[p] for p in positions[i]],
                    "kwargs": {name: where[p] for name, p in named[i].items()},
                    "out": ("send" if blocking else "keep") if mask[i] else "drop",
                }
                if rank in infos:
                    entry["key"] = infos[rank].key
                if context is not None:
                    entry["context"] = dict(context[i])
                calls.append(entry)
            self.loop.call_soon_threadsafe(self._enqueue, call, outgoing, calls, wait_accept)
        if wait_accept:
            self._wait(call.accepted, call, None)
        return call, futures

    def _encode(self, outgoing: Outgoing, needed: Mapping[str, Sequence[int]], blocking: bool) -> bool:
        """Make the arguments ready; returns whether the caller must wait until the hosts have read them."""
        outgoing.encode(needed, self.channels)
        if blocking or not (borrowed := outgoing.nbytes_borrowed):
            return False
        # The caller may write to its tensors as soon as a non-blocking call returns. One that refers to data still to
        # be made is sent only when they are there.
        waits = bool(self._waiting) or outgoing.has_references
        if borrowed > self._inline_limit and not waits and not self._shares_memory(needed):
            return True
        outgoing.own(self.channels)
        return False

    def _make_futures(
        self, call_id: int, method: str, ranks: Sequence[int], mask: Sequence[bool]
    ) -> tuple[dict[int, ResultInfo], list[Future[Any] | None]]:
        infos: dict[int, ResultInfo] = {}
        futures: list[Future[Any] | None] = []
        for rank, wanted in zip(ranks, mask, strict=True):
            if not wanted:
                futures.append(None)
                continue
            key = f"{method.strip('_') or method}-{self.group_id}-{call_id}-{rank}"
            infos[rank] = ResultInfo(key, rank, self.hosts[rank], method, self.name, self.route)
            future = pending.new_future(self.client, key)
            attach_info(future, infos[rank])
            futures.append(future)
        pending.announce(self.client, [info.key for info in infos.values()])
        return infos, futures

    def _refused(self, method: str, host: str, waited_s: float) -> RankTimeoutError:
        return RankTimeoutError(
            f"{method}() of group {self.name!r} was not sent: host {host} has been paused for {waited_s:.0f} s because "
            "its memory is nearly full, and takes no more data. Free memory there (drop futures, smaller batches), "
            "raise its memory_limit, or wait longer with controller.paused-timeout",
            method,
            waited_s,
            (),
            [rank for rank, address in enumerate(self.hosts) if address == host],
        )

    async def watch_paused(self) -> None:
        """Ask paused hosts whether they still are. Runs on the client's event loop."""
        for address in self.flow.paused():
            try:
                answer = await call_host(self.client, address, "paused", route=self.route)
            except OSError:
                continue  # its loss is noticed elsewhere
            if not answer:
                self.flow.resume(address)

    def check_usable(self, method: str) -> None:
        if self.closed:
            raise GroupClosedError(f"{method}() was called on group {self.name!r}, which is closed; make a new group")
        if not is_open(self.client):
            raise GroupClosedError(
                f"{method}() was called on group {self.name!r}, but its Dask client is {self.client.status}: keep the "
                "client open for as long as the group is used"
            )
        if self.lost:
            raise lost_error(method, self.name, self.lost, self.lost_reason, sent=False)

    def _shares_memory(self, addresses: Any) -> bool:
        return any(address.startswith("inproc://") for address in addresses)

    def wait(self, call: Call, timeout_s: float | None = None) -> dict[int, Any]:
        """Wait for a blocking call and unpack its results, by rank.

        Raises
        ------
        RankFailedError, RankLostError
            As soon as one rank fails or is lost, without waiting for the others.
        RankTimeoutError
            ``timeout_s`` seconds went by. The call goes on.
        """
        answers = self._wait(call.done, call, timeout_s)
        shared = {address for address, channel in self.channels.items() if channel.shares_memory}
        out: dict[int, Any] = {}
        for rank, packed in answers.items():
            if packed is None:
                out[rank] = None
            else:
                out[rank] = unpack(packed.copied() if self.hosts[rank] in shared else packed)
        return out

    def _wait(self, done: Any, call: Call, timeout_s: float | None) -> Any:
        waited = 0.0
        while True:
            step = CLIENT_CHECK_S if timeout_s is None else min(CLIENT_CHECK_S, max(timeout_s - waited, 0.0))
            try:
                return done.result(timeout=step)
            except (TimeoutError, ConcurrentTimeoutError):
                if done.done():
                    return done.result()  # the call itself failed with a TimeoutError
            waited += step
            if timeout_s is not None and waited >= timeout_s:
                pending_ranks = sorted(call.pending)
                raise RankTimeoutError(
                    f"{call.method}() of group {self.name!r} had no answer from ranks {pending_ranks} within "
                    f"{timeout_s:g} s. The call may still be running there, and later calls wait for it",
                    call.method,
                    timeout_s,
                    sorted(set(call.hosts) - call.pending),
                    pending_ranks,
                )
            if not is_open(self.client):
                raise GroupClosedError(
                    f"the Dask client of group {self.name!r} was closed while {call.method}() was waiting for ranks "
                    f"{sorted(call.pending)}"
                )

    # ------------------------------------------------------------------ the client's event loop

    def _enqueue(self, call: Call, outgoing: Outgoing, calls: list[dict[str, Any]], ack: bool) -> None:
        self._calls[call.call_id] = call
        if self._waiting or outgoing.has_references:
            self._waiting.append((call, outgoing, calls, ack))
            if self._pump is None:
                self._pump = asyncio.ensure_future(self._run_pump())
        else:
            self._transmit(call, outgoing, calls, ack)

    async def _run_pump(self) -> None:
        try:
            while self._waiting:
                call, outgoing, calls, ack = self._waiting[0]
                try:
                    await self._plan(call, outgoing)
                except Exception as error:
                    outgoing.discard()
                    self._finish_call(call, partial(call.abandon, error, self._fail_future))
                else:
                    self._transmit(call, outgoing, calls, ack)
                self._waiting.popleft()
        finally:
            self._pump = None

    async def _plan(self, call: Call, outgoing: Outgoing) -> None:
        for position, packed in enumerate(outgoing.values):
            if packed.refs:
                call.keep.append(packed.refs)
                outgoing.plans[position] = list(
                    await asyncio.gather(*(plan_reference(self.client, cast(Any, ref)) for ref in packed.refs))
                )

    def _transmit(self, call: Call, outgoing: Outgoing, calls: list[dict[str, Any]], ack: bool) -> None:
        if self.lost or self.closed:
            error: RankError | GroupClosedError = (
                lost_error(call.method, self.name, self.lost, self.lost_reason, sent=False)
                if self.lost
                else GroupClosedError(f"group {self.name!r} was closed before {call.method}() was sent")
            )
            outgoing.discard()
            self._finish_call(call, partial(call.abandon, error, self._fail_future))
            return
        by_host: dict[str, list[dict[str, Any]]] = {}
        for entry in calls:
            by_host.setdefault(self.hosts[entry["rank"]], []).append(entry)
        for address, entries in by_host.items():
            message: dict[str, Any] = {
                "id": call.call_id,
                "values": outgoing.message_values(address),
                "calls": entries,
            }
            if ack:
                message["ack"] = True
            self.channels[address].send(message)

    def on_message(self, message: dict[str, Any]) -> None:
        """A host's answer."""
        call = self._calls.get(message["id"])
        if call is None:
            return
        if message.get("ack"):
            call.accept(call.hosts[message["rank"]])
            return
        rank = message["rank"]
        if message.get("paused"):
            self.flow.pause(self.hosts[rank])
        if message.get("gone"):
            self._finish_call(
                call,
                partial(call.lose, {rank: self.hosts[rank]}, "the rank has ended on its host", self._fail_future),
            )
            return
        channel = self.channels.get(self.hosts[rank])
        value = channel.decode(message["value"]) if "value" in message and channel is not None else None
        facts = message.get("kept")
        kept = None if facts is None else KeptFacts(facts["nbytes"], facts["rows"], facts["type"])
        call.answer(rank, value, kept, message.get("failure"), self._fail_future)
        if kept is not None:
            info = call.infos[rank]
            asyncio.ensure_future(pending.resolve(self.client, info.key, info.host, kept.nbytes, kept.type_name))
        if call.finished:
            self._finish_call(call, call.settle)
        elif len(call.failures) == 1 and "failure" in message:
            # Others that fail for the same reason do so within moments; ranks stuck in a collective never answer.
            call.timer = self.loop.call_later(self._grace_s, call.settle)

    def _finish_call(self, call: Call, action: Callable[[], None]) -> None:
        action()
        if call.finished:
            self._calls.pop(call.call_id, None)
            call.keep.clear()
            if call.timer is not None:
                call.timer.cancel()
            self.flow.dismiss(call.in_flight)
            if call.infos and call.failures:
                self._fail_rest(call)

    def _fail_rest(self, call: Call) -> None:
        """Results of a call that failed on a rank that keeps none: nobody would ever hear of the failure."""
        silent = [rank for rank in call.failures if rank not in call.infos]
        if silent:
            logger.error(
                "%s() of group %r failed on rank %d, whose result is not collected: %s",
                call.method,
                self.name,
                silent[0],
                call.traces[silent[0]],
            )

    def _fail_future(self, key: str, error: BaseException) -> None:
        pending.resolve_error(self.client, key, error)

    def host_lost(self, address: str, reason: str) -> None:
        """A host is gone: every call in flight there fails, and the group is broken."""
        if self.closed:
            return
        lost = {rank: host for rank, host in enumerate(self.hosts) if host == address}
        if not lost or all(rank in self.lost for rank in lost):
            return
        self.lost.update(lost)
        self.lost_reason = self.lost_reason or reason
        for call in list(self._calls.values()):
            self._finish_call(call, partial(call.lose, lost, reason, self._fail_future))
        for hook in self.on_lost:
            hook(lost, reason)

    def abandon_calls(self, error: BaseException) -> None:
        """Fail every call in flight; nothing more will be heard of them."""
        for call in list(self._calls.values()):
            self._finish_call(call, partial(call.abandon, error, self._fail_future))

    def close_ranks(self, method: str, ranks: Sequence[int]) -> Call:
        """Tell ranks to end after what they have queued. Runs on the client's event loop, also for a broken group."""
        call = Call(next(self._ids), method, self.name, {rank: self.hosts[rank] for rank in ranks})
        self._calls[call.call_id] = call
        if not ranks:
            call.settle()
        for rank in ranks:
            entry = {"rank": rank, "method": method, "args": [], "kwargs": {}, "out": "send"}
            channel = self.channels.get(self.hosts[rank])
            if channel is not None:
                channel.send({"id": call.call_id, "values": [], "calls": [entry]})
        return call

    async def close_channels(self) -> None:
        channels, self.channels = list(self.channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
