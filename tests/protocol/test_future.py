"""DataProtoFuture: which rows it stands for, without a cluster; and everything one can do with it, on real groups.

The plans by themselves are in ``test_plan.py``, hand-over between groups in ``tests/scenarios/test_handover.py``.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, Future, Scheduler, as_completed, wait
from distributed import Worker as DaskWorker
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dask_controller import DaskWorkerGroup, DataProto, DataProtoConfig, DataProtoFuture, errors
from dask_controller.protocol.batching import Padding, chunk_sizes
from tests.helpers import forget_failures
from tests.protocol.batches import assert_same_batch
from tests.scenarios.data_ranks import LIMIT_S, Rows, batch_of, make_group, until, wait_for_file

quick = settings(deadline=None, max_examples=60)

Row = tuple[str, int]

# ---------------------------------------------------------------------- rows, without a cluster


def batch(*keys: str) -> DataProtoFuture:
    """A batch whose parts nobody makes."""
    return DataProtoFuture([Future(key) for key in keys])


def rows_of(future: DataProtoFuture, lengths: dict[str, int]) -> list[Row]:
    """Which rows of which keys make up a batch, given how many each key has."""
    keys = [str(part.key) for part in future.futures]
    strands = future._node.strands(
        {key: i for i, key in enumerate(keys)}, {i: lengths[key] for i, key in enumerate(keys)}
    )
    (strand,) = strands
    return [(keys[part], row) for part, row in zip(strand.rows.part.tolist(), strand.rows.row.tolist(), strict=True)]


def whole(lengths: dict[str, int]) -> list[Row]:
    return [(key, row) for key, n in lengths.items() for row in range(n)]


some_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(
    lambda numbers: {f"k{i}": n for i, n in enumerate(numbers)}
)


@quick
@given(lengths=some_lengths, chunks=st.integers(1, 12))
def test_chunks_together_are_the_batch(lengths: dict[str, int], chunks: int) -> None:
    future = batch(*lengths)
    pieces = future.chunk(chunks)
    assert len(pieces) == chunks
    each = [rows_of(piece, lengths) for piece in pieces]
    total = sum(lengths.values())
    assert [len(rows) for rows in each] == chunk_sizes(total, chunks)
    assert [row for rows in each for row in rows] == whole(lengths)
    assert rows_of(DataProtoFuture.concat(pieces), lengths) == whole(lengths)
    assert rows_of(future, lengths) == whole(lengths)


@quick
@given(lengths=some_lengths, data=st.data())
def test_any_cut_of_any_cut_is_that_of_a_list(lengths: dict[str, int], data: st.DataObject) -> None:
    """The same cuts and joins on a batch and on the list of its rows."""
    future, model = batch(*lengths), whole(lengths)
    for _ in range(data.draw(st.integers(1, 4))):
        chunks = data.draw(st.integers(1, 5))
        sizes = chunk_sizes(len(model), chunks)
        order = data.draw(st.lists(st.integers(0, chunks - 1), min_size=1, max_size=4))
        pieces = future.chunk(chunks)
        future = DataProtoFuture.concat([pieces[i] for i in order])
        model = [row for i in order for row in model[sum(sizes[:i]) : sum(sizes[: i + 1])]]
        assert rows_of(future, lengths) == model


@quick
@given(lengths=some_lengths, chunks=st.integers(1, 12))
def test_padded_chunks_are_equal_and_lose_nothing(lengths: dict[str, int], chunks: int) -> None:
    total = sum(lengths.values())
    pieces, padding = batch(*lengths).chunk_padded(chunks, auto_padding=True)
    assert not padding.known
    each = [rows_of(piece, lengths) for piece in pieces]
    size = -(-total // chunks)
    assert [len(rows) for rows in each] == [size] * chunks
    assert padding.known and padding.padded == (size,) * chunks
    flat = [row for rows in each for row in rows]
    assert flat[:total] == whole(lengths)
    assert set(flat[total:]) <= set(whole(lengths)[-1:])
    kept = padding.kept([size] * chunks)
    assert [row for rows, keep in zip(each, kept, strict=True) for row in rows[:keep]] == whole(lengths)


def test_a_padding_is_shared_by_the_arguments_of_a_call() -> None:
    lengths = {"a": 5, "b": 2, "c": 3, "d": 6}
    first, padding = batch("a").chunk_padded(4, auto_padding=True)
    second, shared = batch("b", "c").chunk_padded(4, auto_padding=True, padding=padding)
    assert shared is padding
    assert [len(rows_of(piece, lengths)) for piece in (*first, *second)] == [2] * 8
    assert padding == Padding((2, 2, 1, 0), (2, 2, 2, 2))
    other, _ = batch("d").chunk_padded(4, auto_padding=True, padding=padding)
    with pytest.raises(errors.BatchMismatchError, match=r"5 rows and 6 rows"):
        rows_of(other[0], lengths)


def test_uneven_chunks_without_padding_are_refused() -> None:
    pieces, padding = batch("a").chunk_padded(4, auto_padding=False)
    assert [len(rows_of(piece, {"a": 8})) for piece in pieces] == [2] * 4
    assert padding.is_trivial
    pieces, padding = batch("a").chunk_padded(4, auto_padding=False)
    with pytest.raises(errors.ChunkError, match=r"5 rows.*4 equal.*auto_padding"):
        rows_of(pieces[0], {"a": 5})
    assert not padding.known


def test_the_program_decides_on_padding_where_the_call_does_not() -> None:
    try:
        DataProtoConfig.auto_padding = True
        pieces, _ = batch("a").chunk_padded(4)
    finally:
        DataProtoConfig.auto_padding = False
    assert rows_of(pieces[3], {"a": 5}) == [("a", 4)] * 2
    pieces, _ = batch("a").chunk_padded(4)
    with pytest.raises(errors.ChunkError):
        rows_of(pieces[3], {"a": 5})


def test_padding_of_a_call_is_taken_off_its_result() -> None:
    padding = Padding()
    future = batch("a", "b").without_padding(padding)
    with pytest.raises(errors.BatchMismatchError, match="known"):
        rows_of(future, {"a": 2, "b": 2})
    padding.set(3, 2)
    assert rows_of(future, {"a": 2, "b": 2}) == [("a", 0), ("a", 1), ("b", 0)]
    # Twice as many rows out as in, and a cut of that.
    assert rows_of(future, {"a": 4, "b": 4}) == [("a", i) for i in range(4)] + [("b", 0), ("b", 1)]
    assert rows_of(future.chunk(2)[1], {"a": 2, "b": 2}) == [("b", 0)]
    with pytest.raises(errors.BatchMismatchError, match="multiple"):
        rows_of(future, {"a": 3, "b": 2})
    with pytest.raises(errors.DataProtoError, match="direct result"):
        future.chunk(2)[0].without_padding(padding)


def test_a_part_that_occurs_twice_is_one_future() -> None:
    future = batch("a", "b")
    twice = DataProtoFuture.concat([future, future.chunk(2)[0]])
    assert [part.key for part in twice.futures] == ["a", "b"]
    assert rows_of(twice, {"a": 2, "b": 2}) == [*whole({"a": 2, "b": 2}), ("a", 0), ("a", 1)]


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "2", None, True])
def test_bad_numbers_of_chunks_are_refused(chunks: Any) -> None:
    with pytest.raises(errors.ChunkError, match="at least 1"):
        batch("a").chunk(chunks)
    with pytest.raises(errors.ChunkError, match="at least 1"):
        batch("a").chunk_padded(chunks)


def test_what_is_no_batch_of_futures_is_refused() -> None:
    with pytest.raises(errors.DataProtoError, match="at least one"):
        DataProtoFuture([])
    with pytest.raises(errors.UnsupportedTypeError, match="got int"):
        DataProtoFuture([3])  # type: ignore[list-item]
    with pytest.raises(errors.DataProtoError, match="at least one"):
        DataProtoFuture.concat([])
    with pytest.raises(errors.UnsupportedTypeError, match="got DataProto"):
        DataProtoFuture.concat([batch("a"), batch_of(1)])  # type: ignore[list-item]


def test_a_length_that_is_not_known_is_said_so() -> None:
    future = batch("a")
    with pytest.raises(errors.DataProtoError, match="not known yet"):
        len(future)
    assert bool(future)  # a batch, whatever its length


# ---------------------------------------------------------------------- on real groups


@pytest.fixture
def group(client: Client) -> Iterator[DaskWorkerGroup]:
    with make_group(client, Rows, 2, name_prefix="makers") as group:
        yield group


class Gate:
    """Ranks wait for a file: all, or only one of them."""

    def __init__(self, path: Path, only: int | None = None) -> None:
        self.path = str(path)
        self.only = only

    def __call__(self, rank: int) -> None:
        if self.only in (None, rank):
            wait_for_file(self.path)


def test_get_can_be_repeated(group: DaskWorkerGroup) -> None:
    later = group.echo_later(batch_of(6))
    first = later.get(timeout=LIMIT_S)
    assert_same_batch(first, batch_of(6))
    first.batch["x"] += 1
    first.non_tensor_batch["list"][1].append(7)
    for _ in range(2):
        assert_same_batch(later.get(timeout=LIMIT_S), batch_of(6))
    assert_same_batch(later.result(timeout=LIMIT_S), batch_of(6))
    assert_same_batch(later.result(), batch_of(6))


def test_done_length_and_repr(group: DaskWorkerGroup, tmp_path: Path) -> None:
    later = group.hold(Gate(tmp_path / "go"), batch_of(6))
    first, second = later.chunk(2)
    assert not later.done() and not first.done()
    assert repr(later) == "<dask_controller.DataProtoFuture: pending, 2 part(s)>"
    with pytest.raises(errors.DataProtoError, match="not known yet"):
        len(later)
    (tmp_path / "go").touch()
    later.get(timeout=LIMIT_S)
    assert later.done() and second.done()
    assert (len(later), len(first), len(second)) == (6, 3, 3)
    assert repr(later) == "<dask_controller.DataProtoFuture: finished, 2 part(s)>"


def test_tensordicts_are_batches_too(group: DaskWorkerGroup) -> None:
    data = TensorDict({"x": torch.arange(6), "y": {"z": torch.ones(6, 2)}}, batch_size=[6])
    later = group.echo_later(data)
    found = later.get(timeout=LIMIT_S)
    assert isinstance(found, TensorDict) and (found == data).all()
    assert later.chunk(3)[1].get(timeout=LIMIT_S)["x"].tolist() == [2, 3]


def test_a_result_without_rows_says_what_it_is(group: DaskWorkerGroup, client: Client) -> None:
    later = group.apply_later(lambda rank, rows: {"rank": rank}, batch_of(4))
    with pytest.raises(errors.UnsupportedTypeError, match=r"dict.*cannot be cut into rows"):
        later.get(timeout=LIMIT_S)
    # The values themselves are there for Dask.
    assert client.gather(later.futures) == [{"rank": 0}, {"rank": 1}]


# awaiting


def test_a_batch_is_awaited_on_the_users_own_loop(group: DaskWorkerGroup, tmp_path: Path) -> None:
    async def main() -> list[Any]:
        ready = group.echo_later(batch_of(6))
        held = group.hold(Gate(tmp_path / "go"), batch_of(4))
        first = await ready
        waiting = asyncio.ensure_future(_awaited(held))
        # The loop is free while a rank works.
        ticks = 0
        while ticks < 10:
            await asyncio.sleep(0)
            ticks += 1
        assert not waiting.done()
        (tmp_path / "go").touch()
        return [first, await ready, *await asyncio.gather(waiting, _awaited(ready.chunk(2)[1]))]

    first, again, held, half = asyncio.run(main())
    assert_same_batch(first, batch_of(6))
    assert_same_batch(again, batch_of(6))
    assert_same_batch(held, batch_of(4))
    assert_same_batch(half, batch_of(6)[3:])


async def _awaited(later: DataProtoFuture) -> Any:
    return await later


def test_an_awaited_failure(group: DaskWorkerGroup, client: Client) -> None:
    async def main() -> None:
        await group.apply_later(_fail_on_one, batch_of(4))

    with pytest.raises(errors.RankFailedError, match="no rows from here"):
        asyncio.run(main())


def test_an_await_that_is_given_up(group: DaskWorkerGroup, tmp_path: Path) -> None:
    held = group.hold(Gate(tmp_path / "go"), batch_of(4))

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(held), 0.05)
        (tmp_path / "go").touch()
        assert_same_batch(await asyncio.wait_for(_awaited(held), LIMIT_S), batch_of(4))

    asyncio.run(main())


# limits of time, failures


def test_a_time_limit_names_who_has_not_answered(group: DaskWorkerGroup, tmp_path: Path) -> None:
    held = group.hold(Gate(tmp_path / "go", only=1), batch_of(4))
    assert not wait(held.futures[:1], timeout=LIMIT_S).not_done
    for method in (held.get, held.result, held.chunk(2)[0].get):
        with pytest.raises(errors.RankTimeoutError) as caught:
            method(timeout=0.1)
        error = caught.value
        assert (error.method, error.timeout_s, error.finished, error.pending) == ("hold", 0.1, (0,), (1,))
        assert "ranks [1] have not answered" in str(error)
        assert isinstance(error, TimeoutError)
    (tmp_path / "go").touch()
    # The call went on.
    assert_same_batch(held.get(timeout=LIMIT_S), batch_of(4))


def _fail_on_one(rank: int, rows: DataProto) -> DataProto:
    if rank == 1:
        raise ValueError("no rows from here")
    return rows


class FailOnOne:
    """Rank 1 fails while rank 0 waits for a file."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __call__(self, rank: int, rows: DataProto) -> DataProto:
        self.gate(rank)
        return _fail_on_one(rank, rows)


def test_a_failure_is_not_kept_back_by_ranks_that_still_run(
    group: DaskWorkerGroup, client: Client, tmp_path: Path
) -> None:
    later = group.apply_later(FailOnOne(Gate(tmp_path / "go", only=0)), batch_of(4))
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(errors.RankFailedError, match=r"(?s)rank 1.*no rows from here") as caught:
            later.get(timeout=LIMIT_S)
        assert set(caught.value.failures) == {1} and caught.value.method == "apply_later"
        assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - began < 10
    assert not later.done()  # rank 0 is still at it
    (tmp_path / "go").touch()
    # The rows that were made are there.
    assert not wait(later.futures[:1], timeout=LIMIT_S).not_done
    assert later.done()
    with pytest.raises(errors.RankFailedError):
        len(later)
    del later, caught


# what Dask does with futures


def test_tasks_on_a_batch_that_is_not_there_yet(group: DaskWorkerGroup, client: Client, tmp_path: Path) -> None:
    held = group.hold(Gate(tmp_path / "go"), batch_of(6))
    length = client.submit(len, held.futures[0], pure=False)
    total = client.submit(lambda parts: sum(len(part) for part in parts), held.futures, pure=False)
    chained = client.submit(lambda a, b: a + b, length, total, pure=False)
    assert {future.status for future in (*held.futures, length, total, chained)} == {"pending"}
    (tmp_path / "go").touch()
    assert client.gather([length, total, chained]) == [3, 6, 9]


def test_waiting_for_parts(group: DaskWorkerGroup, client: Client, tmp_path: Path) -> None:
    held = group.hold(Gate(tmp_path / "go", only=1), batch_of(6))
    order = as_completed(held.futures, with_results=True, timeout=LIMIT_S)
    future, part = next(order)
    assert future.key == held.futures[0].key
    assert_same_batch(part, batch_of(6)[:3])
    assert wait(held.futures, return_when="FIRST_COMPLETED", timeout=LIMIT_S).not_done == {held.futures[1]}
    (tmp_path / "go").touch()
    _, part = next(order)
    assert_same_batch(part, batch_of(6)[3:])
    assert wait(held.futures, timeout=LIMIT_S).not_done == set()
    for got, want in zip(client.gather(held.futures), batch_of(6).chunk(2), strict=True):
        assert_same_batch(got, want)
    del order, future


def test_a_task_on_a_failed_part_fails(group: DaskWorkerGroup, client: Client) -> None:
    later = group.apply_later(_fail_on_one, batch_of(4))
    good, bad = (client.submit(len, part, pure=False) for part in later.futures)
    assert good.result(timeout=LIMIT_S) == 2
    with pytest.raises(errors.RankFailedError, match="no rows from here"):
        bad.result(timeout=LIMIT_S)
    with pytest.raises(errors.RankFailedError, match="no rows from here"):
        later.futures[1].result(timeout=LIMIT_S)
    good = bad = later = None
    forget_failures(client)


def test_a_batch_of_scattered_parts(group: DaskWorkerGroup, client: Client) -> None:
    later = DataProtoFuture.from_futures(client.scatter(batch_of(7).chunk(3), hash=False))
    assert_same_batch(later.get(timeout=LIMIT_S), batch_of(7))
    assert_same_batch(later.chunk(2)[1].get(timeout=LIMIT_S), batch_of(7)[4:])
    assert later.done()
    with pytest.raises(errors.DataProtoError, match="without asking|not known"):
        len(later)


# memory


def _held_keys(dask_worker: DaskWorker) -> list[str]:
    return [str(key) for key in dask_worker.data if "makers" in str(key)]


def _known_keys(dask_scheduler: Scheduler) -> int:
    return sum("makers" in str(key) for key in dask_scheduler.tasks)


def test_dropping_a_batch_frees_the_hosts(group: DaskWorkerGroup, client: Client, tmp_path: Path) -> None:
    def on_hosts() -> int:
        return sum(len(keys) for keys in client.run(_held_keys).values())

    def known() -> int:
        return int(client.run_on_scheduler(_known_keys))

    later = group.echo_later(batch_of(6))
    wait(later.futures, timeout=LIMIT_S)
    assert [len(hosts) for hosts in client.who_has(later.futures).values()] == [1, 1]
    actors = known() - 2  # the ranks themselves have keys
    assert on_hosts() == 2
    piece = later.chunk(2)[0]
    del later
    assert_same_batch(piece.get(timeout=LIMIT_S), batch_of(6)[:3])  # a piece keeps what it is made of
    del piece
    until(lambda: on_hosts() == 0 and known() == actors, "the values are gone")
    # Dropped before it is made.
    held = group.hold(Gate(tmp_path / "go"), batch_of(6))
    del held
    until(lambda: known() == actors, "the scheduler has forgotten the keys")
    (tmp_path / "go").touch()
    assert_same_batch(group.echo(batch_of(2)), batch_of(2))  # the call before it is over
    until(lambda: on_hosts() == 0 and known() == actors, "the values are gone")


# inside tasks and ranks


def _get_in_task(later: DataProtoFuture) -> tuple[list[float], dict[str, Any]]:
    found = later.get(timeout=LIMIT_S)
    return found.batch["x"].tolist(), found.meta_info


def test_a_batch_is_fetched_inside_a_plain_task(group: DaskWorkerGroup, client: Client) -> None:
    later = group.echo_later(batch_of(6, meta_info={"step": 3}))
    wait(later.futures, timeout=LIMIT_S)
    expected = [float(i) for i in range(6)]
    assert client.submit(_get_in_task, later, pure=False).result(timeout=LIMIT_S) == (expected, {"step": 3})
    low, high = later.chunk(2)
    swapped = DataProtoFuture.concat([high, low])
    assert client.submit(_get_in_task, swapped, pure=False).result(timeout=LIMIT_S)[0] == expected[3:] + expected[:3]
    assert client.submit(_get_in_task, high, pure=False).result(timeout=LIMIT_S)[0] == expected[3:]


def test_a_pending_batch_is_awaited_inside_a_plain_task(group: DaskWorkerGroup, client: Client, tmp_path: Path) -> None:
    held = group.hold(Gate(tmp_path / "go"), batch_of(4))
    result = client.submit(_get_in_task, held, pure=False, workers=[_host_without_rank(client, group)])
    until(
        lambda: any(client.processing().values()),
        "the task runs",
    )
    (tmp_path / "go").touch()
    assert result.result(timeout=LIMIT_S)[0] == [0, 1, 2, 3]


def test_a_padded_batch_inside_a_plain_task(group: DaskWorkerGroup, client: Client) -> None:
    later = group.echo_later(batch_of(5, auto_padding=True))
    assert len(later.get(timeout=LIMIT_S)) == 5
    assert client.submit(_get_in_task, later, pure=False).result(timeout=LIMIT_S)[0] == [0, 1, 2, 3, 4]


def test_a_batch_dropped_before_the_task_looks_is_reported(
    group: DaskWorkerGroup, client: Client, tmp_path: Path
) -> None:
    def wait_and_get(path: str, later: DataProtoFuture) -> str:
        wait_for_file(path)
        try:
            later.get(timeout=LIMIT_S)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "found"

    later = group.echo_later(batch_of(4))
    wait(later.futures, timeout=LIMIT_S)
    result = client.submit(wait_and_get, str(tmp_path / "go"), later, pure=False)
    until(lambda: any(client.processing().values()), "the task runs")
    del later
    until(lambda: not any(client.run(_held_keys).values()), "the values are gone")
    (tmp_path / "go").touch()
    assert result.result(timeout=LIMIT_S).startswith("ChunkLostError: ")


def test_without_a_client_a_batch_says_what_it_needs() -> None:
    later = pickle.loads(pickle.dumps(batch("a")))
    with pytest.raises(errors.PlacementError, match="no Dask client"):
        later.get(timeout=1)


def test_ranks_may_get_the_future_itself(group: DaskWorkerGroup, client: Client) -> None:
    later = group.echo_later(batch_of(6))
    wait(later.futures, timeout=LIMIT_S)
    assert group.kinds(later) == ["DataProtoFuture"] * 2
    assert group.kinds({"deep": later}) == ["dict"] * 2
    assert group.kinds(later.futures[0]) == ["Future"] * 2
    assert group.fetch_on_rank(later) == [[float(i) for i in range(6)]] * 2


def test_a_blocking_get_on_the_clients_own_loop_is_refused(group: DaskWorkerGroup, client: Client) -> None:
    later = group.echo_later(batch_of(4))

    async def on_the_loop() -> tuple[str, int]:
        try:
            later.get(timeout=LIMIT_S)
        except RuntimeError as error:
            return str(error), len(await later)
        return "", 0

    text, rows = client.sync(on_the_loop)
    assert "await it instead" in text and rows == 4


def test_threads_may_share_a_batch(group: DaskWorkerGroup) -> None:
    later = group.echo_later(batch_of(6))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(later.get(timeout=LIMIT_S))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 6
    for data in found:
        assert_same_batch(data, batch_of(6))


def _host_without_rank(client: Client, group: DaskWorkerGroup) -> str:
    return next(address for address in client.nthreads() if address not in group.hosts)
