"""Calls: order, odd errors, health during work, coroutines, every kind of call by every route (B1-B4, B8, B9)."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Future, wait
from tensordict import TensorDict

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Execute,
    Worker,
    errors,
    register,
)
from dask_controller.runtime import channel
from tests.helpers import forget_failures

#: Nothing in these tests takes long; a wait that lasts this long hangs.
LIMIT_S = 30.0


def wait_for_file(path: str) -> None:
    """Block the calling thread, without Dask's help, until a file is there."""
    deadline = time.monotonic() + LIMIT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not made within {LIMIT_S} s")
        time.sleep(0.005)


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Ask again and again until the answer is true, and return it."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.01)
    return answer


def make_group(client: Client, cls: type, ranks: int, *args: Any, **options: Any) -> DaskWorkerGroup:
    pool = DaskResourcePool([ranks], use_gpu=False)
    return DaskWorkerGroup(pool, DaskClassWithInitArgs(cls, *args), client=client, **options)


def wait_for_path(path: str, value: int) -> int:
    """A task that is slow until the test lets it go."""
    wait_for_file(path)
    return value


def say(value: Any) -> Any:
    return value


def fail_with(kind: type[BaseException]) -> None:
    raise kind("on purpose")


# ---------------------------------------------------------------------- B1 order


class Log(Worker):
    def __init__(self) -> None:
        self.numbers: list[Any] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def append(self, number: Any) -> None:
        self.numbers.append(number)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def append_async(self, number: Any) -> None:
        # Coroutines may overlap once they wait; up to their first await they run in the order of the calls.
        self.numbers.append(number)
        await asyncio.sleep(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def append_rows(self, data: DataProto) -> None:
        self.numbers.append(int(data.batch["x"].sum()))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self) -> list[Any]:
        numbers, self.numbers = self.numbers, []
        return numbers


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_calls_run_in_the_order_in_which_they_were_issued(route: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue("client" if route == "direct" else "scheduler_only_client")
    with make_group(client, Log, 4) as group:
        assert group.route == route
        for _ in range(3):
            for number in range(1000):
                group.append(number)
            assert group.take() == [list(range(1000))] * 4


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_large_and_small_arguments_keep_their_order(route: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue("client" if route == "direct" else "scheduler_only_client")
    small, large = 8, 100_000
    with make_group(client, Log, 4) as group:
        for number in range(60):
            rows = large if number % 3 == 0 else small
            group.append_rows(DataProto.from_dict(tensors={"x": torch.full((rows,), number) // rows + number}))
            group.append(number)
        rows_of = [large if n % 3 == 0 else small for n in range(60)]
        expected = [
            entry for n in range(60) for entry in (int((torch.full((rows_of[n],), n) // rows_of[n] + n).sum()), n)
        ]
        assert group.take() == [expected] * 4


def test_calls_of_several_threads_run_in_one_order_on_all_ranks(client: Client) -> None:
    with make_group(client, Log, 4) as group:
        threads = [
            threading.Thread(target=lambda who=who: [group.append((who, n)) for n in range(100)]) for who in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        first, *others = group.take()
        assert all(other == first for other in others)
        for who in range(4):
            assert [n for w, n in first if w == who] == list(range(100))


def test_coroutines_start_in_order(client: Client) -> None:
    with make_group(client, Log, 4) as group:
        futures = [future for n in range(200) for future in group.append_async(n)]
        client.gather(futures)
        assert group.take() == [list(range(200))] * 4


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_a_call_that_waits_for_data_is_not_overtaken(
    route: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    client = request.getfixturevalue("client" if route == "direct" else "scheduler_only_client")
    go = tmp_path / "go"
    with make_group(client, Log, 4) as group:
        slow = client.submit(wait_for_path, str(go), -1, pure=False)
        early = group.append(slow)
        later = [group.append(number) for number in range(50)]
        # Round trips to every host: calls that were to overtake have had their time.
        for _ in range(3):
            group.status()
        assert not any(future.done() for futures in [early, *later] for future in futures)
        go.touch()
        assert group.take() == [[-1, *range(50)]] * 4


def test_a_call_that_waits_for_another_groups_rank_is_not_overtaken(client: Client) -> None:
    data = DataProto.from_dict(tensors={"x": torch.ones(200_000, dtype=torch.int64)})
    with make_group(client, Log, 2) as producer, make_group(client, Log, 2) as consumer:
        for repeat in range(5):
            made = producer.make(data)
            consumer.append_rows(made)
            for number in range(20):
                consumer.append(number)
            assert consumer.take() == [[200_000, *range(20)]] * 2, repeat


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, GeneratorExit])
def test_a_call_whose_data_failed_does_not_stop_those_behind_it(error: type[BaseException], client: Client) -> None:
    with make_group(client, Log, 2) as group:
        bad = client.submit(fail_with, error, pure=False)
        futures = group.append(bad)
        group.append(7)
        assert group.take() == [[7]] * 2
        for future in futures:
            with pytest.raises(ZeroDivisionError if error is ZeroDivisionError else errors.RemoteError) as caught:
                future.result(timeout=LIMIT_S)
            assert error.__name__ in repr(caught.value)
        del caught
        forget_failures(client)


# ---------------------------------------------------------------------- B2 odd errors


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NeedsTwo(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")


class Plain(Exception):
    pass


def _raise_lock() -> None:
    raise HoldsLock("holds a lock")


def _return_lock() -> Any:
    return {"deep": [threading.Lock()]}


def _raise_needs_two() -> None:
    raise NeedsTwo("one", "two")


def _raise_no_text() -> None:
    raise NoText()


def _raise_plain() -> None:
    raise Plain("with text")


def _exit() -> None:
    sys.exit("leaving")


def _interrupt() -> None:
    raise KeyboardInterrupt("stop it")


def _cancel() -> None:
    raise asyncio.CancelledError("cancelled by the method")


def _stop_iteration() -> None:
    raise StopIteration("no more")


def _generator_exit() -> None:
    raise GeneratorExit("no more")


def _torch_error() -> Any:
    return torch.zeros(2, 2) @ torch.zeros(3, 3)


def _numpy_error() -> Any:
    return np.linalg.inv(np.zeros((2, 2)))


def _huge() -> None:
    raise Plain("x" * 3_000_000)


#: What rank 1 does, the type name in the error, a piece of the text, and whether the original itself comes over.
ODD: dict[str, tuple[Callable[[], Any], str, str, bool]] = {
    "plain": (_raise_plain, "Plain", "with text", True),
    "holds a lock": (_raise_lock, "HoldsLock", "holds a lock", False),
    "returns a lock": (_return_lock, "UnsupportedTypeError", "lock", True),
    "cannot be unpickled": (_raise_needs_two, "NeedsTwo", "one and two", False),
    "has no text": (_raise_no_text, "NoText", "raised ValueError", False),
    "SystemExit": (_exit, "SystemExit", "leaving", True),
    "KeyboardInterrupt": (_interrupt, "KeyboardInterrupt", "stop it", True),
    "CancelledError": (_cancel, "CancelledError", "cancelled by the method", True),
    "StopIteration": (_stop_iteration, "StopIteration", "no more", True),
    "GeneratorExit": (_generator_exit, "GeneratorExit", "no more", True),
    "torch": (_torch_error, "RuntimeError", "cannot be multiplied", True),
    "numpy": (_numpy_error, "LinAlgError", "Singular matrix", True),
    "huge": (_huge, "Plain", "xxx", False),
}


class Odd(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, what: str) -> Any:
        return ODD[what][0]() if self.rank == 1 else self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fail_async(self, what: str) -> Any:
        await asyncio.sleep(0)
        return ODD[what][0]() if self.rank == 1 else self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self, what: str) -> Any:
        return ODD[what][0]() if self.rank == 1 else self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_all(self) -> None:
        raise Plain(f"rank {self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def number(self) -> int:
        return self.rank


def check_failure(error: errors.RankFailedError, group: DaskWorkerGroup, method: str, what: str) -> None:
    function, type_name, text, is_original = ODD[what]
    assert error.method == method
    assert set(error.failures) == {1}
    assert error.hosts == {1: group.hosts[1]}
    message = str(error)
    assert "rank 1" in message and group.hosts[1] in message and type_name in message and text in message
    assert "Traceback" in message
    # The rank's own frames: where it happened.
    assert (function.__name__ if what != "returns a lock" else "lock") in message
    original = error.failures[1]
    if is_original:
        assert type(original).__name__ == type_name
    else:
        assert isinstance(original, errors.RemoteError)
        assert original.type_name.endswith(f".{type_name}") and text in original.text
        assert function.__name__ in original.traceback_text


@pytest.mark.parametrize("method", ["fail", "fail_async", "fail_later"])
def test_an_odd_error_comes_back_as_one_error(method: str, client: Client) -> None:
    with make_group(client, Odd, 2) as group:
        for what in ODD:
            if method == "fail_async" and what == "StopIteration":
                continue  # Python itself turns it into a RuntimeError there.
            began = time.monotonic()
            with pytest.raises(errors.RankFailedError) as caught:
                result = getattr(group, method)(what)
                # A non-blocking call: rank 0's result is there, rank 1's raises.
                assert result[0].result(timeout=LIMIT_S) == 0
                result[1].result(timeout=LIMIT_S)
            assert time.monotonic() - began < 10, what
            check_failure(caught.value, group, method, what)
            assert caught.value.__cause__ is caught.value.failures[1], what
            assert group.number() == [0, 1], what
            del caught
        result = None
        forget_failures(client)


def test_every_rank_that_fails_is_in_the_error(client: Client) -> None:
    with make_group(client, Odd, 4) as group:
        with pytest.raises(errors.RankFailedError) as caught:
            group.fail_all()
        error = caught.value
        # Ranks that fail for the same reason do so at about the same time; those that did not are named as running.
        assert set(error.failures) | set(error.running) == {0, 1, 2, 3}
        assert {rank: str(failure) for rank, failure in error.failures.items()} == {
            rank: f"rank {rank}" for rank in error.failures
        }
        assert group.number() == [0, 1, 2, 3]


def test_odd_errors_through_the_scheduler(scheduler_only_client: Client) -> None:
    with make_group(scheduler_only_client, Odd, 2) as group:
        for what in ODD:
            with pytest.raises(errors.RankFailedError) as caught:
                group.fail(what)
            check_failure(caught.value, group, "fail", what)
        assert group.number() == [0, 1]


# ---------------------------------------------------------------------- B3 health, B4 coroutines


class Busy(Worker):
    def __init__(self) -> None:
        self.met: asyncio.Event | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def hold(self, path: str) -> str:
        wait_for_file(path)
        return "held"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def hold_interpreter(self, count: int) -> int:
        # sum() over a range runs in C and never gives the interpreter lock away.
        return sum(range(count))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def block_loop(self, path: str) -> str:
        wait_for_file(path)
        return "blocked"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def wait_for_meeting(self) -> str:
        self.met = asyncio.Event()
        await asyncio.wait_for(self.met.wait(), LIMIT_S)
        return "met"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def meet(self) -> str:
        assert self.met is not None
        self.met.set()
        await asyncio.sleep(0)
        return "meeting"


def running(group: DaskWorkerGroup, method: str) -> bool:
    return all([r["method"] for r in rank["running"]] == [method] for rank in group.status())


@pytest.mark.parametrize("method", ["hold", "block_loop"])
@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_status_answers_during_a_long_method(
    method: str, route: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    client = request.getfixturevalue("client" if route == "direct" else "scheduler_only_client")
    path = tmp_path / "go"
    with make_group(client, Busy, 4) as group:
        futures = getattr(group, method)(str(path))
        until(lambda: running(group, method), f"{method} runs on all ranks")
        status = group.status()
        assert [rank["rank"] for rank in status] == [0, 1, 2, 3]
        assert [rank["host"] for rank in status] == group.hosts
        assert [rank["state"] for rank in status] == ["ready"] * 4
        assert all(rank["running"][0]["seconds"] >= 0 and rank["pid"] != os.getpid() for rank in status)
        # The answers were given during the call.
        assert not any(future.done() for future in futures)
        path.touch()
        assert client.gather(futures) == ["held" if method == "hold" else "blocked"] * 4
        until(lambda: all(rank["running"] == [] for rank in group.status()), "the call is over")


def test_status_answers_although_a_method_holds_the_interpreter(client: Client) -> None:
    with make_group(client, Busy, 4) as group:
        futures = group.hold_interpreter(20_000_000)
        status = group.status(timeout_s=LIMIT_S)
        assert [(rank["rank"], rank["state"]) for rank in status] == [(rank, "ready") for rank in range(4)]
        assert client.gather(futures) == [sum(range(20_000_000))] * 4


@pytest.mark.parametrize("method", ["hold", "block_loop"])
def test_a_blocking_method_does_not_delay_the_hosts_tasks(method: str, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "go"
    with make_group(client, Busy, 4) as group:
        futures = getattr(group, method)(str(path))
        until(lambda: running(group, method), f"{method} runs on all ranks")
        before = heartbeats(client)
        tasks = [client.submit(say, host, workers=[host], pure=False) for host in group.hosts]
        assert client.gather(tasks) == group.hosts
        # Heartbeats go on: the scheduler hears of every host again while the method blocks.
        until(
            lambda: all(now > before[host] for host, now in heartbeats(client).items() if host in group.hosts),
            "every host has sent a heartbeat",
        )
        assert not any(future.done() for future in futures)
        path.touch()
        assert client.gather(futures) == ["held" if method == "hold" else "blocked"] * 4


def heartbeats(client: Client) -> dict[str, float]:
    return client.run_on_scheduler(lambda dask_scheduler: {a: w.last_seen for a, w in dask_scheduler.workers.items()})


def test_coroutines_that_wait_overlap(client: Client) -> None:
    with make_group(client, Busy, 2) as group:
        first = group.wait_for_meeting()
        second = group.meet()
        assert client.gather(second) == ["meeting"] * 2
        assert client.gather(first) == ["met"] * 2


def test_a_method_runs_while_a_coroutine_waits(client: Client) -> None:
    with make_group(client, Busy, 2) as group:
        first = group.wait_for_meeting()
        assert client.gather(group.hold_interpreter(10)) == [45] * 2
        assert not any(future.done() for future in first)
        assert client.gather(group.meet()) == ["meeting"] * 2
        assert client.gather(first) == ["met"] * 2


# ---------------------------------------------------------------------- B8, B9 every kind of call


class Kinds(Worker):
    def __init__(self, base: int) -> None:
        self.base = base
        self.seen: list[Any] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, value: Any, *, plus: int = 0) -> Any:
        return self.rank, value, plus + self.base

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_on_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, times: DataProto | None = None) -> DataProto:
        return DataProto.from_dict(
            tensors={"x": data.batch["x"] * 2},
            non_tensors={"id": data.non_tensor_batch["id"]},
            meta_info={"metrics": {"rank": self.rank}},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, data: DataProto) -> DataProto:
        return self.double(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tensordict(self, data: TensorDict) -> TensorDict:
        return TensorDict({"y": data["x"] + 1}, batch_size=data.batch_size)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def coroutine(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise Plain("on purpose")

    def unmarked(self, value: Any) -> Any:
        return self.rank, value


def negate(worker: Kinds, data: DataProto) -> DataProto:
    assert worker.world_size == 2
    return DataProto.from_dict(tensors={"x": -data.batch["x"]})


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(rows, dtype=torch.float32)},
        non_tensors={"id": np.array([f"row {i}" for i in range(rows)], dtype=object)},
    )


def check_doubled(data: DataProto, rows: int, ranks: list[int], factor: int = 2) -> None:
    assert torch.equal(data.batch["x"], factor * torch.arange(rows, dtype=torch.float32))
    assert data.non_tensor_batch["id"].tolist() == [f"row {i}" for i in range(rows)]
    assert data.meta_info["metrics"] == {"rank": ranks}


def check_every_kind_of_call(client: Client, route: str) -> None:
    """Two groups of two ranks, each rank on a host of its own, and every way to call and to pass data."""
    with make_group(client, Kinds, 2, 100, name_prefix="a") as a, make_group(client, Kinds, 2, 200) as b:
        assert a.route == b.route == route
        assert f"route {route}" in repr(a)
        assert not set(a.hosts) & set(b.hosts)
        value = {"text": "é", "tensor": torch.arange(3), "list": [1, None]}
        for result in (a.one_to_all(value, plus=1), a.one_to_all(value=value, plus=1)):
            assert [(r, plus) for r, _, plus in result] == [(0, 101), (1, 101)]
            assert all(got["text"] == "é" and torch.equal(got["tensor"], torch.arange(3)) for _, got, _ in result)
        assert a.all_to_all("x") == [(0, "x"), (1, "x")]
        assert a.rank_zero("x") == (0, "x")
        assert a.executed_on_zero("x") == (0, "x")
        assert a.dp_compute(["p", "q"]) == [(0, "p"), (1, "q")]
        assert a.rows(batch_of(6)) == [3, 3]
        assert a.coroutine(5) == [(0, 5), (1, 5)]
        check_doubled(a.double(batch_of(6)), 6, [0, 1])
        assert torch.equal(a.execute_with_func_generator(negate, batch_of(4)).batch["x"], -torch.arange(4.0))
        assert a.execute_func_rank_zero(say, 9) == 9
        got = a.tensordict(TensorDict({"x": torch.arange(4)}, batch_size=[4]))
        assert isinstance(got, TensorDict) and torch.equal(got["y"], torch.arange(1, 5))
        # A batch that does not ride in the message.
        check_doubled(a.double(batch_of(200_000)), 200_000, [0, 1])

        # Methods without a mark.
        assert a.execute_all_sync("unmarked", 1) == [(0, 1), (1, 1)]
        assert a.execute_rank_zero_sync("unmarked", 1) == (0, 1)
        assert client.gather(a.execute_all_async("unmarked", 1)) == [(0, 1), (1, 1)]
        assert a.execute_rank_zero_async("unmarked", 1).result(timeout=LIMIT_S) == (0, 1)
        assert a.workers[1].unmarked(3) == (1, 3)
        assert a.workers[1].execute_async("unmarked", 3).result(timeout=LIMIT_S) == (1, 3)

        # Futures of results: all that Dask does with futures.
        futures = a.later("v")
        assert all(isinstance(future, Future) for future in futures)
        assert wait(futures, timeout=LIMIT_S).not_done == set()
        assert client.gather(futures) == [(0, "v"), (1, "v")]
        assert client.submit(say, a.later("w")[1], pure=False).result(timeout=LIMIT_S) == (1, "w")

        # Futures as arguments.
        scattered = client.scatter(batch_of(6), hash=False)
        assert [len(got) for _, got, _ in a.one_to_all(scattered)] == [6, 6]
        task = client.submit(say, {"deep": 1}, pure=False)
        assert b.one_to_all([task]) == [(0, [{"deep": 1}], 200), (1, [{"deep": 1}], 200)]

        # Rank to rank, group to group, and home.
        later = a.double_later(batch_of(6))
        assert isinstance(later, DataProtoFuture)
        again = b.double(later)
        check_doubled(again, 6, [0, 1], factor=4)
        for _ in range(2):
            check_doubled(later.get(timeout=LIMIT_S), 6, [0, 1])
        large = b.double_later(a.double_later(batch_of(100_000)))
        check_doubled(large.get(timeout=LIMIT_S), 100_000, [0, 1], factor=4)
        first, second = later.chunk(2)
        assert torch.equal(second.get(timeout=LIMIT_S).batch["x"], torch.tensor([6.0, 8.0, 10.0]))
        assert b.rows(DataProtoFuture.concat([first, second])) == [3, 3]

        # An error, health, and the way on.
        with pytest.raises(errors.RankFailedError, match="on purpose"):
            a.fail()
        assert [rank["state"] for rank in a.status()] == ["ready", "ready"]
        assert a.rank_zero(1) == (0, 1)


def test_every_kind_of_call_directly(client: Client) -> None:
    check_every_kind_of_call(client, "direct")


def test_every_kind_of_call_through_the_scheduler(scheduler_only_client: Client) -> None:
    check_every_kind_of_call(scheduler_only_client, "scheduler")


def test_every_kind_of_call_where_connecting_to_hosts_fails(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = set(client.nthreads())
    opened = []

    async def refuse(address: str, *args: Any, **kwargs: Any) -> Any:
        opened.append(address)
        raise OSError(f"no route to {address}")

    def no_rpc(address: str) -> Any:
        raise AssertionError(f"{address} was contacted directly")

    monkeypatch.setattr(channel, "connect", refuse)
    monkeypatch.setattr(client, "rpc", no_rpc)
    check_every_kind_of_call(client, "scheduler")
    assert opened and set(opened) <= hosts


def test_one_host_that_cannot_be_reached_is_enough_for_the_scheduler(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = channel.connect
    victim = sorted(client.nthreads())[0]

    async def refuse(address: str, *args: Any, **kwargs: Any) -> Any:
        if address == victim:
            raise OSError(f"no route to {address}")
        return await real(address, *args, **kwargs)

    monkeypatch.setattr(channel, "connect", refuse)
    with make_group(client, Kinds, 4, 0) as group:
        assert victim in group.hosts
        assert group.route == "scheduler"
        check_doubled(group.double_later(batch_of(8)).get(timeout=LIMIT_S), 8, [0, 1, 2, 3])
        assert group.one_to_all(1) == [(rank, 1, 0) for rank in range(4)]
        assert [rank["state"] for rank in group.status()] == ["ready"] * 4


def test_a_direct_route_that_was_asked_for_is_not_replaced(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    async def refuse(address: str, *args: Any, **kwargs: Any) -> Any:
        raise OSError(f"no route to {address}")

    monkeypatch.setattr(channel, "connect", refuse)
    with dask.config.set({"controller.route": "direct"}):
        with pytest.raises(errors.PlacementError, match=r"(?s)no route to.*controller\.route"):
            make_group(client, Kinds, 4, 0)


def test_every_kind_of_call_encrypted(tls_client: Client) -> None:
    with make_group(tls_client, Kinds, 1, 100) as a, make_group(tls_client, Kinds, 1, 200) as b:
        assert a.route == b.route == "direct"
        assert all(host.startswith("tls://") for host in [*a.hosts, *b.hosts]) and a.hosts != b.hosts
        assert a.one_to_all("x", plus=1) == [(0, "x", 101)]
        assert a.all_to_all("x") == [(0, "x")]
        assert a.rank_zero("x") == (0, "x")
        assert a.dp_compute(["p"]) == [(0, "p")]
        assert a.rows(batch_of(6)) == [6]
        assert a.coroutine(5) == [(0, 5)]
        check_doubled(a.double(batch_of(200_000)), 200_000, [0])
        assert tls_client.gather(a.later("v")) == [(0, "v")]
        assert tls_client.submit(say, a.later("w")[0], pure=False).result(timeout=LIMIT_S) == (0, "w")
        assert a.execute_all_sync("unmarked", 1) == [(0, 1)]
        later = a.double_later(batch_of(100_000))
        check_doubled(b.double(later), 100_000, [0], factor=4)
        check_doubled(later.get(timeout=LIMIT_S), 100_000, [0])
        scattered = tls_client.scatter(batch_of(6), hash=False)
        assert [len(got) for _, got, _ in b.one_to_all(scattered)] == [6]
        with pytest.raises(errors.RankFailedError, match="on purpose"):
            b.fail()
        assert [rank["state"] for rank in b.status()] == ["ready"]


def test_ranks_of_one_group_encrypted(tls_client: Client) -> None:
    with make_group(tls_client, Kinds, 2, 0) as group:
        check_doubled(group.double(batch_of(6)), 6, [0, 1])
        first = group.double_later(batch_of(50_000))
        # A rotation: each rank needs the rows of the other.
        low, high = first.chunk(2)
        swapped = group.double(DataProtoFuture.concat([high, low]))
        expected = torch.arange(50_000, dtype=torch.float32) * 4
        assert torch.equal(swapped.batch["x"], torch.cat([expected[25_000:], expected[:25_000]]))
