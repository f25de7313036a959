"""What ``runtime/`` takes for granted about Dask's own code, one test each.

A release of Dask that changes one of these breaks a test here, with a name that says what is no longer so, instead of
a group somewhere. Nothing of the package is tested here but what stands or falls with Dask.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import weakref
from concurrent.futures import Future as ConcurrentFuture
from typing import Any

import msgpack
import pytest
from distributed import Client, Future, Scheduler, Worker, get_client, get_worker, rejoin, secede
from distributed.client import FutureCancelledError
from distributed.comm.core import CommClosedError, connect
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import to_serialize
from distributed.threadpoolexecutor import thread_state as pool_state
from distributed.utils import thread_state as task_state  # type: ignore[attr-defined]
from distributed.worker import _worker_cvar
from distributed.worker_state_machine import FreeKeysEvent

from dask_controller.protocol.serialize import Packed, pack, unpack
from dask_controller.runtime.clients import client_loop
from tests.runtime.one_loop import LIMIT_S, one_loop, until


def inc(x: int) -> int:
    return x + 1


# ---------------------------------------------------------------------- futures


@one_loop
async def test_a_future_made_by_hand_is_pending_and_counted(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    future: Future[int] = Future("k", c)
    assert future.status == "pending" and not future.done()
    assert "k" in c.futures and c.refcount["k"] == 1
    assert "k" not in s.tasks  # the scheduler is not asked
    # What is kept on the future itself lives as long as it does.
    vars(future)["_note"] = note = threading.Event()
    reference = weakref.ref(note)
    assert vars(future)["_note"] is note
    del future, note
    gc.collect()
    await until(lambda: "k" not in c.futures, "dropping the last reference releases the key")
    assert reference() is None


@one_loop
async def test_update_data_finishes_a_future_made_by_hand(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    future: Future[int] = Future("k", c)
    a.update_data({"k": 5})
    assert c.scheduler is not None
    await c.scheduler.update_data(who_has={"k": [a.address]}, nbytes={"k": 8}, client=c.id)
    assert await future == 5
    assert await c.scheduler.who_has(keys=["k"]) == {"k": (a.address,)}


@one_loop
async def test_a_task_on_an_unannounced_key_is_cancelled(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    # The reason for the plugin. Once this is not so any more, the plugin can go.
    result = c.submit(inc, Future("k", c), pure=False)
    with pytest.raises(FutureCancelledError, match="lost dependencies"):
        await result


@one_loop
async def test_a_client_can_be_told_of_an_error(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    future: Future[int] = Future("k", c)
    c.futures["k"].set_error(ValueError("no"), None)
    assert future.status == "error"
    with pytest.raises(ValueError, match="no"):
        await future


@one_loop
async def test_a_future_that_was_sent_is_bound_by_hand(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    original = c.submit(inc, 1, pure=False)
    await original
    copy = pickle.loads(pickle.dumps(original))
    assert isinstance(copy, Future) and copy.key == original.key
    assert copy.client is None and copy.status is None
    copy.bind_client(c)
    assert copy.client is c and c.refcount[original.key] == 2
    assert await copy == 2


@one_loop
async def test_the_state_of_a_future_holds_its_exception(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    future = c.submit(lambda: 1 / 0, pure=False)
    with pytest.raises(ZeroDivisionError):
        await future
    assert isinstance(future._state.exception, ZeroDivisionError)


def test_a_done_callback_comes_from_a_thread_of_its_own(client: Client) -> None:
    called: ConcurrentFuture[int] = ConcurrentFuture()
    future = client.submit(inc, 1, pure=False)
    future.add_done_callback(lambda f: called.set_result(threading.get_ident()))
    loop_thread = client.sync(_thread)
    assert called.result(LIMIT_S) not in (threading.get_ident(), loop_thread)


async def _thread() -> int:
    return threading.get_ident()


# ---------------------------------------------------------------------- hosts


@one_loop
async def test_handlers_of_a_host_can_be_added(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    async def handle(x: int) -> int:
        return x + 1

    a.handlers["test_assumption"] = handle
    assert c.scheduler is not None
    # Directly, and with the scheduler in between.
    assert await c.rpc(a.address).test_assumption(x=1) == 2
    assert await c.scheduler.proxy(worker=a.address, msg={"op": "test_assumption", "x": 2}) == 3
    assert await b.rpc(a.address).test_assumption(x=3) == 4


@one_loop
async def test_a_handler_may_keep_its_connection(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    async def talk(comm: Any, name: str) -> Status:
        await comm.write(f"hello {name}")
        while True:
            try:
                await comm.write(await comm.read())
            except CommClosedError:
                return Status.dont_reply

    a.handlers["test_talk"] = talk
    comm = await connect(a.address, **c.connection_args)
    await comm.write({"op": "test_talk", "name": "you", "reply": False})
    assert await comm.read() == "hello you"
    packed = pack({"x": bytearray(100_000)})
    for message in (1, {"a": (1, 2)}, [to_serialize(Packed(b"\1head", [b"frame"]))]):
        await comm.write(message)
        got = await comm.read()
        if isinstance(message, list):
            # Arrives as bytes still: what is in it was not looked at.
            assert isinstance(got[0], Packed) and bytes(got[0].header) == b"\1head"
            assert bytes(got[0].frames[0]) == b"frame"
        else:
            assert got == message
    await comm.write(to_serialize(packed))
    got = await comm.read()
    assert unpack(got)["x"] == bytearray(100_000)
    comm.abort()


@one_loop
async def test_bytes_pass_the_scheduler_unopened(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    opened = []

    class Tell:
        def __reduce__(self) -> tuple[Any, ...]:
            return _told, ()

    def _told() -> str:
        opened.append(1)
        return "told"

    async def handle(value: Any) -> Any:
        return {"value": to_serialize(value)}

    a.handlers["test_echo"] = handle
    assert c.scheduler is not None
    sent = pack({"x": bytearray(100_000), "tell": Tell()})
    answer = await c.scheduler.proxy(worker=a.address, msg={"op": "test_echo", "value": to_serialize(sent)})
    assert isinstance(answer["value"], Packed) and not opened
    assert unpack(answer["value"])["tell"] == "told"


@one_loop
async def test_a_value_put_on_a_host_stays_until_it_is_freed(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    a.update_data({"k": [1, 2]})
    assert a.data["k"] == [1, 2]
    assert a.state.tasks["k"].state == "memory"
    # Tasks come and go; the value, of which the scheduler knows nothing, stays.
    assert await c.submit(inc, 1, pure=False, workers=[a.address]) == 2
    assert "k" not in s.tasks and "k" in a.data
    a.handle_stimulus(FreeKeysEvent(keys=["k"], stimulus_id="test"))
    assert "k" not in a.data
    await until(lambda: "k" not in a.state.tasks, "the host has forgotten the key")
    # What is not there can be freed as well.
    a.handle_stimulus(FreeKeysEvent(keys=["k"], stimulus_id="test"))


@one_loop
async def test_a_thread_of_ones_own_can_become_the_hosts(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    found: list[str] = []

    def look() -> None:
        _worker_cvar.set(b)
        found.append(get_worker().address)
        assert not hasattr(task_state, "key")  # but it is not in a task

    thread = threading.Thread(target=look)
    thread.start()
    await asyncio.get_running_loop().run_in_executor(None, thread.join, LIMIT_S)
    assert found == [b.address]


def _inside() -> tuple[bool, bool, bool, bool]:
    in_pool, has_key = bool(pool_state.proceed), hasattr(task_state, "key")
    client = get_client()
    secede()
    still_in_pool = getattr(pool_state, "proceed", False)
    rejoin()
    return in_pool, has_key, still_in_pool, client is get_worker()._get_client() and pool_state.proceed


@one_loop
async def test_a_task_knows_that_it_is_one(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    assert await c.submit(_inside, pure=False) == (True, True, False, True)


_entered, _release = threading.Event(), threading.Event()


def _hold() -> None:
    _entered.set()
    _release.wait(LIMIT_S)


@one_loop
async def test_what_a_host_says_of_its_slots(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    assert a.state.total_resources == {"GPU": 2} and a.state.available_resources == {"GPU": 2}
    future = c.submit(_hold, resources={"GPU": 1}, workers=[a.address], pure=False)
    try:
        await until(_entered.is_set, "the task runs")
        assert a.state.available_resources == {"GPU": 1}
        (ts,) = a.state.executing
        assert ts.resource_restrictions == {"GPU": 1}
        assert not a.state.long_running
    finally:
        _release.set()
    await future
    assert a.state.available_resources == {"GPU": 2}


class _Kept:
    made: list[weakref.ref[Any]] = []

    def __init__(self) -> None:
        _Kept.made.append(weakref.ref(self))


@one_loop
async def test_an_actor_is_collected_when_its_future_is_dropped(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    _Kept.made.clear()
    future = c.submit(_Kept, actor=True, pure=False)
    await asyncio.wait_for(future, LIMIT_S)
    (reference,) = _Kept.made
    assert reference() is not None
    del future

    def gone() -> bool:
        gc.collect()
        return reference() is None

    await until(gone, "the host has let go of the actor")


# ---------------------------------------------------------------------- scheduler


class _Listener(SchedulerPlugin):
    name = "test-assumption"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self.seen: list[Any] = []
        scheduler.stream_handlers["test-assumption"] = lambda client, what: self.seen.append(
            (client, what, what in scheduler.tasks)
        )


@one_loop
async def test_a_plugin_adds_messages_that_keep_their_order(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await c.register_plugin(_Listener())
    await c.register_plugin(_Listener())  # idempotent: the second one is not started
    plugin = s.plugins["test-assumption"]
    results = []
    for i in range(20):
        c._send_to_scheduler({"op": "test-assumption", "what": f"key{i}"})
        results.append(c.submit(inc, i, key=f"key{i}"))
    assert await c.gather(results) == list(range(1, 21))
    # Each message came before the graph that was sent after it.
    assert plugin.seen == [(c.id, f"key{i}", False) for i in range(20)]


@one_loop
async def test_the_scheduler_tells_who_asks_for_a_key(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    original = c.submit(inc, 1, pure=False)
    await original
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        adopted: Future[int] = Future(original.key, other)
        assert other.scheduler is not None
        states = await other.scheduler.get_task_status(keys=[original.key, "nothing"])
        assert states == {original.key: "memory", "nothing": None}
        assert not adopted.done()  # nobody tells a client of what it has not asked for
        other._send_to_scheduler({"op": "client-desires-keys", "keys": [original.key]})
        await until(adopted.done, "the client has been told")
        assert await adopted == 2
        original.release()
        assert await adopted == 2
    await until(lambda: original.key not in s.tasks, "the key goes with the last client")


@one_loop
async def test_the_scheduler_leaves_out_hosts_that_it_does_not_know(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    assert c.scheduler is not None
    answer = await c.scheduler.ncores(workers=[a.address, "tcp://127.0.0.1:1"])
    assert set(answer) == {a.address}
    assert not (await c.scheduler.who_has(keys=["nothing"])).get("nothing")


@one_loop
async def test_a_client_runs_on_an_asyncio_loop(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    assert client_loop(c) is asyncio.get_running_loop()
    assert a.loop.asyncio_loop is asyncio.get_running_loop()  # type: ignore[attr-defined]
    assert c.status == "running"


def test_a_client_in_a_thread_has_a_loop_of_its_own(client: Client) -> None:
    loop = client_loop(client)
    assert loop.is_running()

    async def here() -> bool:
        return asyncio.get_running_loop() is loop

    assert asyncio.run_coroutine_threadsafe(here(), loop).result(LIMIT_S)
    assert client.sync(here) is True
    assert not client.asynchronous


def test_messages_without_buffers_survive_msgpack() -> None:
    message = {"id": 1, "key": ("frame", 0), "none": None, "f": 1.5, "b": b"\0", "n": [{1: True}]}
    got = msgpack.unpackb(msgpack.packb(message), strict_map_key=False, use_list=False)
    assert got == {**message, "n": ({1: True},)}
    with pytest.raises(TypeError):
        msgpack.packb({"value": to_serialize(Packed(b"\1x"))})
