"""What carries a rank, without a cluster: runner, executor, failures, context, environment, ports."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ConcurrentFuture
from typing import Any

import pytest

from dask_controller.errors import RankTimeoutError, RemoteError
from dask_controller.protocol.serialize import pack, unpack
from dask_controller.worker.context import EnvironmentPatch, RankContext, current_context
from dask_controller.worker.executor import InlineExecutor
from dask_controller.worker.failure import describe_failure, restore_failure
from dask_controller.worker.host import reserve_port
from dask_controller.worker.runner import CONSTRUCT, Outcome, ResolvedRef, Runner, Work

#: A wait that lasts this long hangs.
LIMIT_S = 20.0

mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=0)


class Target:
    """An object of a user; ``gate`` holds methods until the test opens it."""

    def __init__(self, start: int = 0, *, events: list[Any] | None = None) -> None:
        self.start = start
        self.events: list[Any] = [] if events is None else events
        self.gate = threading.Event()
        self.entered = threading.Event()

    def note(self, value: Any, *, by: int = 1) -> tuple[int, str]:
        self.events.append(value)
        return self.start + by, threading.current_thread().name

    def hold(self, value: Any) -> None:
        self.entered.set()
        assert self.gate.wait(LIMIT_S)
        self.events.append(value)

    async def meet(self, value: Any) -> str:
        """Returns once two of them have begun."""
        self.events.append(value)
        while len([e for e in self.events if str(e).startswith("meet")]) < 2:
            await asyncio.sleep(0)
        return threading.current_thread().name

    async def forever(self) -> None:
        self.entered.set()
        await asyncio.Event().wait()

    def leave_mark(self) -> None:
        mark.set(7)

    def read_mark(self) -> int:
        return mark.get()

    def ranks(self) -> int | None:
        context = current_context()
        return None if context is None else context.rank

    def exit(self, error: BaseException) -> None:
        raise error


class Answers:
    """Collects outcomes by call."""

    def __init__(self) -> None:
        self.futures: dict[int, ConcurrentFuture[Outcome]] = {}
        self.order: list[int] = []

    def work(self, method: str, *args: Any, out: str = "send", context: RankContext | None = None, **kw: Any) -> Work:
        call_id = len(self.futures)
        future: ConcurrentFuture[Outcome] = ConcurrentFuture()
        self.futures[call_id] = future

        def reply(outcome: Outcome) -> None:
            self.order.append(call_id)
            future.set_result(outcome)

        values = [pack(value) for value in (*args, *kw.values())]
        return Work(
            call_id=call_id,
            method=method,
            values=values,
            refs=[()] * len(values),
            args=list(range(len(args))),
            kwargs={name: len(args) + i for i, name in enumerate(kw)},
            out=out,
            context=context,
            reply=reply,
        )

    def outcome(self, call_id: int) -> Outcome:
        return self.futures[call_id].result(timeout=LIMIT_S)

    def value(self, call_id: int) -> Any:
        outcome = self.outcome(call_id)
        assert outcome.failure is None, outcome.failure
        assert outcome.packed is not None
        return unpack(outcome.packed)


def construct(answers: Answers, cls: Any, *args: Any, **kwargs: Any) -> Work:
    return answers.work(CONSTRUCT, cls, args, kwargs)


# ---------------------------------------------------------------------- runner


def run(runner: Runner, work: Work) -> Outcome:
    """As the executor does: each call in a copy of the context."""
    return contextvars.copy_context().run(runner.run, work)


def test_a_runner_builds_and_calls() -> None:
    runner, answers = Runner(), Answers()
    built = run(runner, construct(answers, Target, 5))
    assert built.failure is None and built.packed is not None and unpack(built.packed) is None
    outcome = run(runner, answers.work("note", "a", by=3))
    assert outcome.packed is not None
    assert unpack(outcome.packed)[0] == 8
    assert runner.target.events == ["a"]


@pytest.mark.parametrize(
    ("out", "packed", "kept"), [("send", True, False), ("keep", False, True), ("drop", False, False)]
)
def test_results_are_sent_kept_or_dropped(out: str, packed: bool, kept: bool) -> None:
    runner, answers = Runner(), Answers()
    run(runner, construct(answers, Target, 5))
    outcome = run(runner, answers.work("note", "a", out=out))
    assert outcome.failure is None
    assert (outcome.packed is not None, outcome.is_kept) == (packed, kept)
    if kept:
        assert outcome.kept[0] == 6


@pytest.mark.parametrize("out", ["send", "keep"])
def test_a_result_that_cannot_travel_is_a_failure_of_the_call(out: str) -> None:
    class Locks:
        def give(self) -> Any:
            return {"inside": threading.Lock()}

    runner, answers = Runner(), Answers()
    run(runner, construct(answers, Locks))
    failure = run(runner, answers.work("give", out=out)).failure
    assert failure is not None
    assert failure["type"].endswith("UnsupportedTypeError")
    assert "lock" in failure["text"]
    assert run(runner, answers.work("give", out="drop")).failure is None


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), ValueError("bad")])
def test_nothing_that_user_code_raises_gets_out(error: BaseException) -> None:
    runner, answers = Runner(), Answers()
    run(runner, construct(answers, Target))
    failure = run(runner, answers.work("exit", error)).failure
    assert failure is not None
    assert failure["type"] == f"builtins.{type(error).__name__}"
    assert failure["text"] == str(error)
    assert "in exit" in failure["traceback"]
    assert "in run" not in failure["traceback"]


def test_a_call_before_the_object_exists() -> None:
    runner, answers = Runner(), Answers()
    assert run(runner, construct(answers, Target, 1, 2, 3)).failure is not None
    failure = run(runner, answers.work("note", 1)).failure
    assert failure is not None and "its __init__ has not succeeded" in failure["text"]
    assert not runner.is_async("meet")


def test_methods_that_are_not_there() -> None:
    runner, answers = Runner(), Answers()
    run(runner, construct(answers, Target, 5))
    for method, complaint in [
        ("absent", "Target has no method 'absent'"),
        ("start", "Target has no method 'start'"),
        ("actor.note", "Target has no role 'actor' on this rank (roles: none)"),
    ]:
        assert not runner.is_async(method)
        failure = run(runner, answers.work(method)).failure
        assert failure is not None and complaint in failure["text"]
    assert runner.is_async("meet")
    assert not runner.is_async("note")


def test_what_a_method_leaves_in_context_variables_stays_with_its_call() -> None:
    runner, answers = Runner(), Answers()
    run(runner, construct(answers, Target))
    run(runner, answers.work("leave_mark"))
    outcome = run(runner, answers.work("read_mark"))
    assert outcome.packed is not None and unpack(outcome.packed) == 0
    outcome = run(runner, answers.work("ranks", context=RankContext(rank=3, world_size=4)))
    assert outcome.packed is not None and unpack(outcome.packed) == 3
    assert current_context() is None


# ---------------------------------------------------------------------- executor


@pytest.fixture
def make_executor() -> Iterator[Callable[[], InlineExecutor]]:
    executors: list[tuple[InlineExecutor, threading.Event]] = []

    def make() -> InlineExecutor:
        ended = threading.Event()
        executors.append((InlineExecutor("test-rank", lambda: None, ended.set), ended))
        return executors[-1][0]

    yield make
    for executor, ended in executors:
        executor.stop()
        assert ended.wait(LIMIT_S), executor.stack()


def test_calls_run_in_order_on_one_thread_of_the_rank(make_executor: Callable[[], InlineExecutor]) -> None:
    executor, answers = make_executor(), Answers()
    executor.submit(construct(answers, Target), None)
    for number in range(200):
        executor.submit(answers.work("note", number), None)
    names = {answers.value(call_id)[1] for call_id in range(1, 201)}
    assert names == {"test-rank"}
    assert answers.order == list(range(201))


def test_a_call_whose_data_come_late_keeps_its_place(make_executor: Callable[[], InlineExecutor]) -> None:
    executor, answers = make_executor(), Answers()
    executor.submit(construct(answers, Target), None)
    data: ConcurrentFuture[list[list[ResolvedRef]]] = ConcurrentFuture()
    executor.submit(answers.work("note", "waits"), data)
    executor.submit(answers.work("note", "later"), None)
    answers.value(0)
    assert executor.queued() <= 1
    assert not answers.futures[2].done()
    data.set_result([[]])
    answers.value(2)
    assert answers.order == [0, 1, 2]


def test_data_that_are_lost_fail_their_call_only(make_executor: Callable[[], InlineExecutor]) -> None:
    executor, answers = make_executor(), Answers()
    executor.submit(construct(answers, Target), None)
    data: ConcurrentFuture[list[list[ResolvedRef]]] = ConcurrentFuture()
    executor.submit(answers.work("note", "waits"), data)
    executor.submit(answers.work("note", "later"), None)
    data.set_exception(OSError("gone"))
    failure = answers.outcome(1).failure
    assert failure is not None
    assert isinstance(restore_failure(failure), OSError)
    assert answers.value(2)[0] == 1


def test_coroutines_overlap_and_run_apart_from_the_rank_thread(make_executor: Callable[[], InlineExecutor]) -> None:
    executor, answers = make_executor(), Answers()
    executor.submit(construct(answers, Target), None)
    executor.submit(answers.work("meet", "meet 1"), None)
    executor.submit(answers.work("meet", "meet 2"), None)
    executor.submit(answers.work("note", "plain"), None)
    names = [answers.value(call_id) for call_id in (1, 2)]
    assert names == ["test-rank-async", "test-rank-async"]
    assert answers.value(3)[1] == "test-rank"


def test_a_running_call_is_seen_without_waiting_for_it(make_executor: Callable[[], InlineExecutor]) -> None:
    executor, answers = make_executor(), Answers()
    target = Target()
    executor.submit(construct(answers, Target), None)
    answers.value(0)
    # The object itself, to open its gate from here.
    executor._runner.target = target
    executor.submit(answers.work("hold", 1), None)
    assert target.entered.wait(LIMIT_S)
    executor.submit(answers.work("note", 2), None)
    (running,) = executor.running()
    assert running.method == "hold"
    assert executor.queued() == 1
    assert "in hold" in executor.stack()
    target.gate.set()
    answers.value(2)
    assert executor.running() == []
    assert target.events == [1, 2]


def test_stopping_lets_queued_calls_finish_and_cancels_coroutines() -> None:
    ended = threading.Event()
    seen: list[str] = []

    def on_end() -> None:
        seen.append(threading.current_thread().name)
        ended.set()

    executor, answers = InlineExecutor("test-rank", lambda: None, on_end), Answers()
    target = Target()
    executor.submit(construct(answers, Target), None)
    answers.value(0)
    executor._runner.target = target
    executor.submit(answers.work("forever"), None)
    assert target.entered.wait(LIMIT_S)
    executor.submit(answers.work("note", "queued"), None)
    executor.stop()
    assert ended.wait(LIMIT_S)
    assert seen == ["test-rank"]
    assert answers.value(2)[0] == 1
    failure = answers.outcome(1).failure
    assert failure is not None and failure["type"].endswith("CancelledError")
    assert executor._runner.target is None


def test_preparation_runs_first_on_the_rank_thread() -> None:
    names: list[str] = []
    ended = threading.Event()
    executor = InlineExecutor("test-rank", lambda: names.append(threading.current_thread().name), ended.set)
    executor.stop()
    assert ended.wait(LIMIT_S)
    assert names == ["test-rank"]


# ---------------------------------------------------------------------- failures


class Picky(Exception):
    """Pickles, but cannot be built again."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Dangerous(Exception):
    def __reduce__(self) -> Any:
        return os.getcwd, ()


class Large(Exception):
    pass


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def travelled(error: BaseException) -> BaseException:
    """The failure after it was described, sent as plain values and restored."""
    description = pickle.loads(pickle.dumps(describe_failure(caught(error))))
    assert set(description) == {"type", "text", "traceback", "pickle"}
    return restore_failure(description)


@pytest.mark.parametrize(
    "error",
    [ValueError("bad", 3), KeyError("k"), OSError(2, "none", "f"), RankTimeoutError("late", "m", 3.0, [0], [1])],
)
def test_an_ordinary_exception_arrives_as_itself_with_its_traceback(error: Exception) -> None:
    back = travelled(error)
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)
    assert isinstance(back.__cause__, RemoteError)
    assert "in caught" in back.__cause__.traceback_text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop"), asyncio.CancelledError()])
def test_exceptions_that_are_not_errors_arrive_too(error: BaseException) -> None:
    assert type(travelled(error)) is type(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Picky(3, "code 3"), "code 3"),
        (HoldsLock(), "with a lock"),
        (Dangerous("not an exception afterwards"), "not an exception afterwards"),
        (Large("x" * (1 << 21)), "x" * 100_000),
        (Speechless(), "<str() of the exception raised RuntimeError>"),
    ],
)
def test_an_exception_that_cannot_be_brought_over_is_told_in_text(error: Exception, text: str) -> None:
    back = travelled(error)
    assert type(back) is RemoteError
    assert back.type_name == f"{__name__}.{type(error).__name__}"
    assert back.text == text
    assert "in caught" in back.traceback_text


def test_a_cause_of_the_users_own_is_kept() -> None:
    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner

    with pytest.raises(ValueError, match="outer") as raised:
        fail()
    description = describe_failure(raised.value)
    assert "KeyError: 'inner'" in description["traceback"]
    assert str(restore_failure(description)) == "outer"


def test_a_class_that_only_the_rank_has(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_on_the_rank.py").write_text("class Local(Exception): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_on_the_rank import Local  # type: ignore[import-not-found]

    description = describe_failure(caught(Local("message")))
    del sys.modules["only_on_the_rank"]
    monkeypatch.undo()
    back = restore_failure(description)
    assert isinstance(back, RemoteError)
    assert (back.type_name, back.text) == ("only_on_the_rank.Local", "message")


# ---------------------------------------------------------------------- context and environment


def test_a_context_says_what_torch_reads() -> None:
    context = RankContext(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        master_addr="10.0.0.1",
        master_port=5000,
        worker_env={"EXTRA": "x", "RANK": "never"},
    )
    assert context.environment() == {
        "EXTRA": "x",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
    }


def test_a_patch_of_the_environment_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PRESENT", "host's")
    monkeypatch.setenv("TEST_EMPTY", "")
    monkeypatch.delenv("TEST_ABSENT", raising=False)
    patch = EnvironmentPatch({"TEST_PRESENT": "rank's", "TEST_ABSENT": "rank's", "TEST_EMPTY": "rank's"})
    assert os.environ["TEST_PRESENT"] == "host's"
    for _ in range(2):
        patch.apply()
        assert [os.environ[f"TEST_{name}"] for name in ("PRESENT", "ABSENT", "EMPTY")] == ["rank's"] * 3
    os.environ["TEST_ABSENT"] = "changed by user code"
    patch.restore()
    assert (os.environ["TEST_PRESENT"], os.environ["TEST_EMPTY"]) == ("host's", "")
    assert "TEST_ABSENT" not in os.environ
    os.environ["TEST_PRESENT"] = "host's again"
    patch.restore()
    assert os.environ["TEST_PRESENT"] == "host's again"


# ---------------------------------------------------------------------- ports


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that are free."""
    for first in range(20_000, 60_000, count):
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("", port)))
            return first
        except OSError:
            continue
        finally:
            for held in sockets:
                held.close()
    raise AssertionError("no free ports")


def test_reserved_ports_differ_and_can_be_listened_on() -> None:
    reserved = [reserve_port(None) for _ in range(10)]
    ports = [port for _, port in reserved]
    assert len(set(ports)) == 10
    # As torch's store does.
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", ports[0]))
        store.listen()
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=LIMIT_S):
            pass
    # Nobody who asks for any port gets one of them.
    for _ in range(50):
        with socket.create_server(("", 0)) as other:
            assert other.getsockname()[1] not in ports
    for guard, _ in reserved:
        guard.close()


def test_a_range_is_used_up_and_given_back() -> None:
    first = free_ports(3)
    with socket.create_server(("", first + 1)):
        guards = [reserve_port((first, first + 2)) for _ in range(2)]
        assert [port for _, port in guards] == [first, first + 2]
        with pytest.raises(OSError, match=f"no free port.*{first}.*master-port-range"):
            reserve_port((first, first + 2))
        guards[0][0].close()
        guard, port = reserve_port((first, first + 2))
        assert port == first
        guard.close()
        guards[1][0].close()
    guard, port = reserve_port((first + 1, first + 1))
    assert port == first + 1
    guard.close()
