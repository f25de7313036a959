"""Keys that exist before their data: every way from announced to in memory, failed or dropped.

On one event loop, with the scheduler's and the hosts' own consistency checks switched on. The fallback for schedulers
that cannot load the plugin is tried in the same way, and on real groups.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, Future, Scheduler, Worker, wait
from distributed.client import FutureCancelledError

from dask_controller import DataProto, errors
from dask_controller.runtime import pending
from tests.helpers import forget_failures
from tests.runtime.one_loop import LIMIT_S, one_loop, until
from tests.scenarios.data_ranks import Rows, batch_of, make_group, wait_for_file


async def with_plugin(client: Client) -> None:
    await client.register_plugin(pending.PendingKeys())
    pending._installed[client] = True


def announced(client: Client, key: str) -> Future[Any]:
    future = pending.new_future(client, key)
    pending.announce(client, [key])
    return future


async def make(client: Client, host: Worker, key: str, value: Any) -> None:
    """What a host and the controller do when a rank has answered."""
    host.update_data({key: value})
    await pending.resolve(client, key, host.address, 8, "builtins.int")


def inc(x: int) -> int:
    return x + 1


# ---------------------------------------------------------------------- ready


@one_loop
async def test_a_future_is_pending_until_its_key_is_ready(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    assert future.status == "pending" and not future.done()
    await until(lambda: "k" in s.tasks, "the scheduler knows the key")
    ts = s.tasks["k"]
    assert ts.state == "waiting" and not ts.who_has
    assert {cs.client_key for cs in ts.who_wants} == {c.id}
    assert not a.state.tasks and not b.state.tasks  # no thread and no slot is taken

    waiting = asyncio.ensure_future(wait(future, timeout=LIMIT_S))
    await make(c, a, "k", 5)
    await waiting
    assert future.status == "finished"
    assert await future == 5
    assert future.type == "builtins.int"
    assert ts.state == "memory" and {ws.address for ws in ts.who_has} == {a.address} and ts.nbytes == 8
    s.validate_state()
    future.release()
    await until(lambda: "k" not in s.tasks and "k" not in a.data, "the value is gone with its future")


@one_loop
async def test_tasks_submitted_before_the_key_is_ready(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    first, second = announced(c, "k"), announced(c, "l")
    ordinary = c.submit(inc, 0, pure=False)
    one = c.submit(inc, first, pure=False)
    many = c.submit(sum, [first, second, ordinary], pure=False)
    after = c.submit(inc, many, pure=False)
    await until(lambda: after.key in s.tasks, "the graph is there")
    assert s.tasks[one.key].state == s.tasks[many.key].state == "waiting"
    await make(c, a, "k", 5)
    assert await one == 6
    assert s.tasks[many.key].state == "waiting"
    await make(c, b, "l", 10)
    assert await many == 16 and await after == 17
    s.validate_state()


@one_loop
async def test_a_task_submitted_at_once_is_not_cancelled(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    # The announcement and the graph leave in one go: order is all that matters.
    results = [c.submit(inc, announced(c, f"k{i}"), pure=False) for i in range(50)]
    for i in range(50):
        await make(c, (a, b)[i % 2], f"k{i}", i)
    assert await c.gather(results) == list(range(1, 51))


@one_loop
async def test_a_key_that_is_ready_before_anybody_asks(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    await make(c, a, "k", 5)
    assert await c.submit(inc, future, pure=False) == 6
    # Announced or reported twice: no harm.
    pending.announce(c, ["k"])
    await pending.resolve(c, "k", a.address, 8, "builtins.int")
    pending.resolve_error(c, "k", ValueError("too late"))
    assert await c.submit(inc, future, pure=False) == 6
    assert s.tasks["k"].state == "memory"
    s.validate_state()


# ---------------------------------------------------------------------- failed


@one_loop
async def test_a_failure_fails_everything_that_depends_on_it(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    bad, good = announced(c, "bad"), announced(c, "good")
    near = c.submit(inc, bad, pure=False)
    far = c.submit(inc, near, pure=False)
    mixed = c.submit(sum, [good, bad], pure=False)
    spared = c.submit(inc, good, pure=False)
    await until(lambda: spared.key in s.tasks, "the graph is there")
    pending.resolve_error(c, "bad", errors.RankFailedError("rank 3 failed", "m", {3: ValueError("x")}, {3: "h"}))
    for future in (bad, near, far, mixed):
        with pytest.raises(errors.RankFailedError, match="rank 3 failed") as caught:
            await future
        assert set(caught.value.failures) == {3}
        assert future.status == "error"
    await make(c, a, "good", 1)
    assert await spared == 2
    s.validate_state()
    # A task that comes afterwards fails as well, and at once.
    late = c.submit(inc, bad, pure=False)
    with pytest.raises(errors.RankFailedError, match="rank 3 failed"):
        await late
    s.validate_state()


@one_loop
async def test_a_failed_key_is_forgotten_with_its_futures(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    bad = announced(c, "bad")
    near = c.submit(inc, bad, pure=False)
    pending.resolve_error(c, "bad", ValueError("no"))
    await wait([bad, near], timeout=LIMIT_S)
    assert bad.status == near.status == "error"
    bad.release()
    near.release()
    await until(lambda: not s.tasks, "the scheduler has forgotten both")


@one_loop
async def test_an_error_that_cannot_travel_still_arrives(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    pending.resolve_error(c, "k", error)
    with pytest.raises(errors.RemoteError, match="holds a lock") as caught:
        await future
    assert caught.value.type_name == "builtins.ValueError"


# ---------------------------------------------------------------------- dropped


@one_loop
async def test_a_future_dropped_before_its_key_is_ready(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    await until(lambda: "k" in s.tasks, "the scheduler knows the key")
    future.release()
    await until(lambda: "k" not in s.tasks, "the scheduler has forgotten the key")
    await make(c, a, "k", 5)
    await until(lambda: "k" not in a.data, "the host lets go of the value")
    assert "k" not in s.tasks
    s.validate_state()


@one_loop
async def test_a_future_dropped_before_its_key_fails(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    await until(lambda: "k" in s.tasks, "the scheduler knows the key")
    future.release()
    pending.resolve_error(c, "k", ValueError("nobody listens"))
    assert await c.submit(inc, 1, pure=False) == 2  # the stream has been read up to here
    await until(lambda: "k" not in s.tasks, "the scheduler has forgotten the key")
    s.validate_state()


@one_loop
async def test_a_dependent_keeps_the_key(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    result = c.submit(inc, future, pure=False)
    await until(lambda: result.key in s.tasks, "the graph is there")
    future.release()
    await make(c, a, "k", 5)
    assert await result == 6
    await until(lambda: "k" not in s.tasks and "k" not in a.data, "the value is gone after its last use")
    s.validate_state()


@one_loop
async def test_a_cancelled_future(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    result = c.submit(inc, future, pure=False)
    await until(lambda: result.key in s.tasks, "the graph is there")
    await c.cancel([future], force=True)
    assert future.cancelled()
    with pytest.raises(FutureCancelledError):
        await result
    await make(c, a, "k", 5)
    await until(lambda: "k" not in a.data, "the host lets go of the value")
    s.validate_state()


@one_loop
async def test_a_client_that_closes_leaves_no_key(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        await with_plugin(other)
        futures = [announced(other, f"k{i}") for i in range(3)]
        await until(lambda: "k2" in s.tasks, "the scheduler knows the keys")
    await until(lambda: not s.tasks, "the scheduler has forgotten the keys")
    assert all(future.cancelled() for future in futures)
    s.validate_state()


# ---------------------------------------------------------------------- other hosts and clients


@one_loop
async def test_a_key_on_a_host_that_has_left(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    result = c.submit(inc, future, pure=False)
    await until(lambda: result.key in s.tasks, "the graph is there")
    # The answer was on its way when the host went.
    await pending.resolve(c, "k", "tcp://127.0.0.1:1", 8, "builtins.int")
    for waiting in (future, result):
        with pytest.raises(FutureCancelledError):
            await asyncio.wait_for(waiting.result(), LIMIT_S)
    s.validate_state()


@one_loop
async def test_a_value_lost_with_its_host(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    await make(c, a, "k", 5)
    assert await future == 5
    await a.close()
    await until(lambda: future.status in ("cancelled", "lost"), "the client hears of it")
    with pytest.raises(FutureCancelledError):
        await asyncio.wait_for(c.submit(inc, future, pure=False).result(), LIMIT_S)
    s.validate_state()


@one_loop
async def test_a_value_is_saved_from_a_host_that_retires(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    future = announced(c, "k")
    await make(c, a, "k", 5)
    await wait(future, timeout=LIMIT_S)
    await c.retire_workers([a.address])
    assert b.data["k"] == 5
    assert await future == 5
    s.validate_state()


@one_loop
async def test_a_second_client_waits_for_the_same_key(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await with_plugin(c)
    mine = announced(c, "k")
    await until(lambda: "k" in s.tasks, "the scheduler knows the key")
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        await with_plugin(other)  # twice on one scheduler is once
        theirs = announced(other, "k")
        result = other.submit(inc, theirs, pure=False)
        await until(lambda: result.key in s.tasks, "the graph is there")
        await make(c, a, "k", 5)
        assert await result == 6
        mine.release()
        assert await other.submit(inc, theirs, pure=False) == 6
        assert "k" in a.data
    await until(lambda: "k" not in s.tasks and "k" not in a.data, "the value goes with the last client")


# ---------------------------------------------------------------------- without the plugin


@one_loop
async def test_without_the_plugin_futures_work(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    pending._installed[c] = False
    assert not pending.has_plugin(c)
    future = announced(c, "k")
    assert future.status == "pending"
    await make(c, a, "k", 5)
    await wait(future, timeout=LIMIT_S)
    assert await future == 5
    assert await c.submit(inc, future, pure=False) == 6
    future.release()
    await until(lambda: "k" not in s.tasks and "k" not in a.data, "the value is gone with its future")
    bad = announced(c, "bad")
    pending.resolve_error(c, "bad", ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await bad


@one_loop
async def test_without_the_plugin_a_dropped_value_is_freed(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    pending._installed[c] = False
    future = announced(c, "k")
    future.release()
    await until(lambda: "k" not in c.futures, "the client has let go")
    await make(c, a, "k", 5)
    await until(lambda: "k" not in s.tasks and "k" not in a.data, "the value is gone")


def test_a_scheduler_that_cannot_load_the_plugin_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses:
        calls = 0

        def register_plugin(self, plugin: Any) -> None:
            Refuses.calls += 1
            raise ModuleNotFoundError("No module named 'dask_controller'")

    client: Any = Refuses()
    assert pending.install_plugin(client) is False
    assert pending.install_plugin(client) is False
    assert pending.has_plugin(client) is False
    assert Refuses.calls == 1
    (record,) = caplog.records
    assert "No module named 'dask_controller'" in record.getMessage()
    assert "scheduler's environment" in record.getMessage()


@pytest.fixture
def no_plugin(client: Client) -> Iterator[None]:
    pending._installed[client] = False
    yield
    del pending._installed[client]


@pytest.mark.usefixtures("no_plugin")
def test_without_the_plugin_groups_work(client: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    data = batch_of(8)

    def slow(rank: int) -> None:
        wait_for_file(str(go))

    def fail(rank: int, rows: DataProto) -> DataProto:
        raise ValueError("on purpose")

    with make_group(client, Rows, 2) as a, make_group(client, Rows, 2) as b:
        assert not pending.has_plugin(client)
        held = a.hold(slow, data)
        assert not held.done() and {future.status for future in held.futures} == {"pending"}
        go.touch()
        assert torch.equal(held.get(timeout=LIMIT_S).batch["x"], data.batch["x"])
        assert not wait(held.futures, timeout=LIMIT_S).not_done
        assert [len(part) for part in client.gather(held.futures)] == [4, 4]
        assert client.submit(len, held.futures[0], pure=False).result(timeout=LIMIT_S) == 4
        assert b.sizes(held) == [4, 4]
        assert len(b.echo_later(a.echo_later(data)).get(timeout=LIMIT_S)) == 8
        for _ in range(20):
            a.echo_later(data)  # dropped before or after it is made
        bad = a.apply_later(fail, data)
        for _ in range(2):
            with pytest.raises(errors.RankFailedError, match="on purpose"):
                bad.get(timeout=LIMIT_S)


@pytest.mark.usefixtures("no_plugin")
def test_without_the_plugin_a_failure_reaches_dasks_own_future(client: Client) -> None:
    def fail(rank: int, rows: DataProto) -> DataProto:
        raise ValueError("on purpose")

    with make_group(client, Rows, 2) as group:
        future = group.apply_later(fail, batch_of(4)).futures[0]
        with pytest.raises(errors.RankFailedError, match="on purpose"):
            future.result(timeout=LIMIT_S)
        del future
        forget_failures(client)
