"""Data on real groups: batches of any length, meta_info, object columns, no rows at all, plain values (A1-A7, A9-A11).

What bytes cost and whether every dtype survives is in ``test_data_bytes.py``; futures are in ``test_handover.py``.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, wait
from tensordict import TensorDict

from dask_controller import (
    BatchData,
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    errors,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from tests.protocol.batches import assert_same_batch, fingerprint
from tests.scenarios.data_ranks import LIMIT_S, MeshRows, Rows, batch_of, make_group


@pytest.fixture(autouse=True)
def _leave_padding_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VERL_AUTO_PADDING", raising=False)
    yield
    DataProtoConfig.auto_padding = False


# ---------------------------------------------------------------------- A1 uneven batch, A3, A4 padding


@pytest.mark.parametrize("ranks", [3, 4])
def test_an_uneven_batch_is_refused_before_any_rank_is_called(ranks: int, client: Client) -> None:
    with make_group(client, Rows, ranks) as group:
        for rows in (10, 2, 1):
            data = batch_of(rows)
            for method in (group.echo, group.echo_later, group.sizes):
                with pytest.raises(errors.DispatchError) as caught:
                    method(data)
                text = str(caught.value)
                # Length, world size, and both remedies.
                assert f"{rows} rows" in text and f"{ranks} ranks" in text
                assert "auto_padding" in text and "pad_dataproto_to_divisor" in text
                with pytest.raises(errors.DispatchError, match=f"{rows} rows"):
                    method(data=data)
        assert group.count() == [0] * ranks


@pytest.mark.parametrize("ranks", [3, 4])
def test_an_uneven_batch_is_padded(ranks: int, client: Client) -> None:
    with make_group(client, Rows, ranks) as group:
        for rows in (10, 2, 1):
            data = batch_of(rows, auto_padding=True)
            before = fingerprint(data)
            each = math.ceil(rows / ranks)
            assert group.sizes(data) == [each] * ranks
            assert group.sizes(data=data) == [each] * ranks
            assert client.gather(group.sizes_later(data)) == [each] * ranks
            assert_same_batch(group.echo(data), data)
            assert_same_batch(group.echo(data=data), data)
            later = group.echo_later(data)
            assert_same_batch(later.get(timeout=LIMIT_S), data)
            assert len(later) == rows
            # The caller's batch is as it was.
            assert len(data) == rows and fingerprint(data) == before
            del later
        # Every call of three lengths reached every rank: two sizes(), two echo(), one echo_later() each.
        assert group.count() == [15] * ranks


def test_padding_for_the_whole_program(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = batch_of(5)
    with make_group(client, Rows, 4) as group:
        with pytest.raises(errors.DispatchError):
            group.echo(plain)
        DataProtoConfig.auto_padding = True
        assert_same_batch(group.echo(plain), plain)
        assert group.sizes(plain.batch) == [2] * 4
        DataProtoConfig.auto_padding = False
        monkeypatch.setenv("VERL_AUTO_PADDING", "1")
        assert_same_batch(group.echo(plain), plain)
        monkeypatch.setenv("VERL_AUTO_PADDING", "0")
        with pytest.raises(errors.DispatchError):
            group.echo(plain)


def test_padding_repeats_rows_of_the_batch_only(client: Client) -> None:
    with make_group(client, Rows, 4) as group:
        shown = group.first_rows(batch_of(5, auto_padding=True))
    assert [len(rows) for rows in shown] == [2] * 4
    flat = [row for rows in shown for row in rows]
    assert flat[:5] == [0, 1, 2, 3, 4] and set(flat[5:]) <= {0, 1, 2, 3, 4}


def test_padding_is_removed_from_results_that_are_a_multiple(client: Client) -> None:
    data = batch_of(5, auto_padding=True)

    def three_times(rank: int, rows: DataProto) -> DataProto:
        return rows.repeat(3, interleave=True)

    with make_group(client, Rows, 4) as group:
        expected = data.repeat(3, interleave=True)
        assert_same_batch(group.apply(three_times, data), expected)
        assert_same_batch(group.apply_later(three_times, data).get(timeout=LIMIT_S), expected)


def test_padding_that_cannot_be_told_from_rows_is_an_error(client: Client) -> None:
    data = batch_of(5, auto_padding=True)

    def one_more(rank: int, rows: DataProto) -> DataProto:
        return DataProto.concat([rows, rows[:1]])

    with make_group(client, Rows, 4) as group:
        with pytest.raises(errors.BatchMismatchError, match="pad_dataproto_to_divisor"):
            group.apply(one_more, data)
        with pytest.raises(errors.BatchMismatchError, match="pad_dataproto_to_divisor"):
            group.apply_later(one_more, data).get(timeout=LIMIT_S)


@pytest.mark.parametrize("rows", [1, 3, 0, 8])
def test_padding_by_hand_around_a_call(rows: int, client: Client) -> None:
    data = batch_of(rows)
    padded, added = pad_dataproto_to_divisor(data, 8)
    assert (len(padded), added) == ((8, 8 - rows) if rows else (0, 0))
    with make_group(client, Rows, 4) as group:
        assert group.sizes(padded) == [len(padded) // 4] * 4
        assert_same_batch(unpad_dataproto(group.echo(padded), added), data)
        assert_same_batch(unpad_dataproto(group.echo_later(padded).get(timeout=LIMIT_S), added), data)


def test_padding_over_a_mesh(client: Client) -> None:
    with make_group(client, MeshRows, 4) as group:
        for rows in (5, 1):
            data = batch_of(rows, auto_padding=True)
            assert_same_batch(group.echo(data), data)
            seen = group.what_was_seen()
            each = math.ceil(rows / 2)
            assert [len(part) for part in seen] == [each] * 4
            assert seen[0] == seen[1] and seen[2] == seen[3]
            assert (seen[0] + seen[2])[:rows] == list(range(rows))
            later = group.echo_later(data)
            assert_same_batch(later.get(timeout=LIMIT_S), data)
            # Peers that are not collected keep nothing.
            assert len(later.futures) == 2
            assert len(data) == rows
            del later
        with pytest.raises(errors.DispatchError, match="5 rows"):
            group.echo(batch_of(5))


def test_padding_of_a_batch_whose_length_is_known_late(client: Client) -> None:
    data = batch_of(5)
    DataProtoConfig.auto_padding = True
    with make_group(client, Rows, 1) as one, make_group(client, Rows, 3) as three:
        late = one.echo_later(data)
        again = three.echo_later(late)
        assert_same_batch(three.echo(late), data)
        assert_same_batch(again.get(timeout=LIMIT_S), data)
        assert three.sizes(late) == [2, 2, 2]
        both = three.add(late, data)
        assert both.batch["x"].tolist() == [0, 2, 4, 6, 8]
        DataProtoConfig.auto_padding = False
        with pytest.raises(errors.ChunkError, match=r"5 rows.*3"):
            three.echo(late)
        # Nothing of that call reached the ranks, and they go on.
        assert_same_batch(three.echo(batch_of(6)), batch_of(6))


def test_late_and_present_batches_of_different_length_are_refused(client: Client) -> None:
    with make_group(client, Rows, 2) as group:
        late = group.echo_later(batch_of(4))
        with pytest.raises((errors.BatchMismatchError, errors.DispatchError), match=r"6 rows|4 rows"):
            group.add(late, batch_of(6))
        other = group.echo_later(batch_of(2))
        with pytest.raises((errors.BatchMismatchError, errors.DispatchError), match=r"2 rows|4 rows"):
            group.add(late, other)
        # Nobody was called with halves of it.
        assert group.count() == [2, 2]


# ---------------------------------------------------------------------- A2 exact chunk count


@pytest.mark.parametrize(("rows", "chunks"), [(124, 15), (6, 4), (2, 4), (0, 3)])
def test_futures_give_exactly_so_many_chunks(rows: int, chunks: int, client: Client) -> None:
    data = batch_of(rows, meta_info={"step": 7})
    with make_group(client, Rows, 2) as group:
        later = group.echo_later(data)
        pieces = later.chunk(chunks)
        assert len(pieces) == chunks
        found = [piece.get(timeout=LIMIT_S) for piece in pieces]
        expected = data.chunk(chunks)
        for got, want, piece in zip(found, expected, pieces, strict=True):
            assert_same_batch(got, want)
            assert len(piece) == len(want)
        assert_same_batch(DataProtoFuture.concat(pieces).get(timeout=LIMIT_S), data)
        assert [len(part) for part in BatchData(later).chunk(chunks=chunks)] == [len(want) for want in expected]


# ---------------------------------------------------------------------- A5 meta_info from all ranks


def _with_meta(metas: list[dict[str, Any]]) -> Any:
    def give(rank: int, rows: DataProto) -> DataProto:
        return DataProto(rows.batch, dict(rows.non_tensor_batch), metas[rank])

    return give


META: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    # What ranks 0 to 3 return, and what the caller gets.
    "keys of every rank": (
        [{f"k{r}": r, "metrics": {"loss": r}} for r in range(4)],
        {"k0": 0, "k1": 1, "k2": 2, "k3": 3, "metrics": {"loss": [0, 1, 2, 3]}},
    ),
    "lists of metrics": (
        [{"metrics": [{"loss": r}, {"loss": r + 0.5}]} for r in range(4)],
        {"metrics": {"loss": [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]}},
    ),
    "timings that differ": (
        [{"timing": 73.94637 + r * 1e-5} for r in range(4)],
        {"timing": [73.94637, 73.94638, 73.94639, 73.9464]},
    ),
    "NaN": ([{"x": float("nan")} for _ in range(4)], {"x": float("nan")}),
    "tensors": ([{"t": torch.arange(3)} for _ in range(4)], {"t": torch.arange(3)}),
    "arrays": ([{"a": np.arange(3)} for _ in range(4)], {"a": np.arange(3)}),
}


@pytest.mark.parametrize("padded", [False, True])
def test_meta_info_of_all_ranks_is_joined(padded: bool, client: Client) -> None:
    # 5 rows leave nothing for rank 3 but padding: what it says counts all the same.
    data = batch_of(5, auto_padding=True) if padded else batch_of(8)
    with make_group(client, Rows, 4) as group:
        for what, (metas, expected) in META.items():
            give = _with_meta(metas)
            later = group.apply_later(give, data)
            for result in (group.apply(give, data), later.get(timeout=LIMIT_S)):
                meta = dict(result.meta_info)
                assert set(meta) == set(expected), what
                if what == "timings that differ":
                    assert meta["timing"] == pytest.approx(expected["timing"], abs=1e-9)
                elif what in ("tensors", "arrays"):
                    (key,) = expected
                    assert type(meta[key]) is type(expected[key]) and meta[key].tolist() == [0, 1, 2]
                elif what == "NaN":
                    assert math.isnan(meta["x"])
                else:
                    assert meta == expected, what
                assert len(result) == len(data)


def test_meta_info_that_contradicts_itself_names_key_and_ranks(client: Client) -> None:
    give = _with_meta([{"mode": "a"}, {"mode": "a"}, {"mode": "b"}, {"mode": "a"}])
    with make_group(client, Rows, 4) as group:
        later = group.apply_later(give, batch_of(8))
        for call in (lambda: group.apply(give, batch_of(8)), lambda: later.get(timeout=LIMIT_S)):
            with pytest.raises(errors.KeyConflictError, match=r"(?s)mode.*0, 1, 3.*'a'.*2.*'b'"):
                call()


def test_meta_info_alone_comes_back(client: Client) -> None:
    def only_meta(rank: int, rows: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"loss": rank}, "same": 1})

    with make_group(client, Rows, 4) as group:
        for data in (batch_of(8), batch_of(5, auto_padding=True)):
            later = group.apply_later(only_meta, data)
            for result in (group.apply(only_meta, data), later.get(timeout=LIMIT_S)):
                assert len(result) == 0 and result.batch is None
                assert result.meta_info["metrics"] == {"loss": [0, 1, 2, 3]} and result.meta_info["same"] == 1


def test_one_rank_blocking_or_not_gives_the_same_meta_info(client: Client) -> None:
    give = _with_meta([{"metrics": {"loss": 0.5}, "k": 1}])
    with make_group(client, Rows, 1) as group:
        blocking = group.apply(give, batch_of(3))
        later = group.apply_later(give, batch_of(3)).get(timeout=LIMIT_S)
    assert blocking.meta_info == later.meta_info == {"metrics": {"loss": [0.5]}, "k": 1}


# ---------------------------------------------------------------------- A6 independent chunks


def _spoil(rank: int, rows: DataProto) -> DataProto:
    rows.meta_info["rank"] = rank
    rows.meta_info["nested"]["list"].append(rank)
    rows.batch["x"] += 100 * (rank + 1)
    rows.non_tensor_batch["list"][0].append("spoilt")
    return DataProto.from_dict(
        {"x": rows.batch["x"]}, meta_info={"metrics": {"list": list(rows.meta_info["nested"]["list"])}}
    )


@pytest.mark.parametrize("cluster", ["client", "inproc_client"])
@pytest.mark.parametrize("method", ["apply", "apply_later"])
def test_ranks_may_write_to_their_chunks(cluster: str, method: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(cluster)
    data = batch_of(8, meta_info={"nested": {"list": []}})
    before = fingerprint(data)
    with make_group(client, Rows, 4) as group:
        result = getattr(group, method)(_spoil, data)
        if method == "apply_later":
            result = result.get(timeout=LIMIT_S)
        assert fingerprint(data) == before
        assert result.meta_info["metrics"]["list"] == [[0], [1], [2], [3]]
        assert result.batch["x"].tolist() == [i + 100 * (i // 2 + 1) for i in range(8)]


def test_results_of_ranks_in_this_process_are_the_callers_own(inproc_client: Client) -> None:
    with make_group(inproc_client, Rows, 2) as group:
        later = group.echo_later(batch_of(4))
        for _ in range(2):
            mine = later.get(timeout=LIMIT_S)
            assert_same_batch(mine, batch_of(4))
            mine.batch["x"] += 1
            mine.non_tensor_batch["list"][1].append(9)
        del later


@pytest.mark.parametrize("cluster", ["client", "inproc_client"])
def test_the_caller_may_write_to_a_batch_once_the_call_has_returned(
    cluster: str, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(cluster)
    with make_group(client, Rows, 4) as group:
        for rows in (8, 400_000):  # inside the message, and beside it
            tensor = torch.arange(rows)
            results = []
            for step in range(5):
                tensor.copy_(torch.arange(rows) + step)
                results.append(group.echo_later(DataProto.from_dict({"x": tensor})))
            tensor.fill_(-1)
            for step, later in enumerate(results):
                assert torch.equal(later.get(timeout=LIMIT_S).batch["x"], torch.arange(rows) + step)
            del results, later


# ---------------------------------------------------------------------- A7 object columns


def test_lists_in_object_columns_stay_lists(client: Client) -> None:
    columns: list[list[Any]] = [[[1, 2], [3, 4]], [[1], [2, 3]], [[], []], [["a"], [None]]]

    def give(rank: int, rows: DataProto) -> DataProto:
        return DataProto.from_dict({"x": rows.batch["x"]}, {"ids": columns[rank]})

    with make_group(client, Rows, 4) as group:
        later = group.apply_later(give, batch_of(8))
        for result in (group.apply(give, batch_of(8)), later.get(timeout=LIMIT_S), group.echo(later)):
            ids = result.non_tensor_batch["ids"]
            assert ids.shape == (8,) and ids.dtype == object
            assert ids.tolist() == [item for column in columns for item in column]
            assert all(type(item) is list for item in ids)


def test_lists_of_equal_length_going_out_stay_lists(client: Client) -> None:
    data = DataProto.from_dict({"x": torch.arange(4)}, {"ids": [[1, 2], [3, 4], [5, 6], [7, 8]]})
    with make_group(client, Rows, 4) as group:
        kinds = group.apply(
            lambda rank, rows: DataProto.from_dict(
                {"x": rows.batch["x"]},
                {"kind": [f"{rows.non_tensor_batch['ids'].shape} {type(rows.non_tensor_batch['ids'][0]).__name__}"]},
            ),
            data,
        )
        assert kinds.non_tensor_batch["kind"].tolist() == ["(1,) list"] * 4
        assert_same_batch(group.echo(data), data)


# ---------------------------------------------------------------------- A9 empty batches


def _hollow(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"bf16": torch.zeros(rows, 3, dtype=torch.bfloat16), "bool": torch.ones(rows, dtype=torch.bool)},
        {"names": [str(i) for i in range(rows)], "matrix": np.zeros((rows, 2), dtype=np.int16)},
        {"step": 3},
    )


@pytest.mark.parametrize("auto_padding", [False, True])
def test_a_batch_without_rows_goes_through_every_mode(auto_padding: bool, client: Client) -> None:
    empty = _hollow(0)
    DataProtoConfig.auto_padding = auto_padding
    with make_group(client, Rows, 4) as group:
        later = group.echo_later(empty)
        for result in (
            group.echo(empty),
            later.get(timeout=LIMIT_S),
            group.echo(later),
            group.echo_later(later).get(timeout=LIMIT_S),
            group.on_zero(empty),
            group.apply(lambda rank, rows: rows, empty),
        ):
            assert_same_batch(result, empty)
        assert len(later) == 0
        assert group.sizes(empty) == [0] * 4
        assert group.sizes(later) == [0] * 4
        for _, name, got in group.show(empty):
            assert name == "DataProto"
            assert_same_batch(got, empty)
        each = group.apply_each([_hollow(0), _hollow(1), _hollow(0), _hollow(2)])
        assert [len(part) for part in each] == [0, 1, 0, 2]
        found = group.echo(TensorDict({"x": torch.zeros(0, 5, dtype=torch.int8)}, batch_size=[0]))
        assert isinstance(found, TensorDict)
        assert found["x"].shape == (0, 5) and found["x"].dtype == torch.int8


def test_a_batch_without_rows_goes_over_a_mesh(client: Client) -> None:
    empty = DataProto.from_dict({"x": torch.zeros(0, dtype=torch.float16), "y": torch.zeros(0, 3, dtype=torch.bool)})
    with make_group(client, MeshRows, 4) as group:
        assert_same_batch(group.echo(empty), empty)
        assert_same_batch(group.echo_later(empty).get(timeout=LIMIT_S), empty)


@pytest.mark.parametrize("hollow_ranks", [{0}, {3}, {0, 1, 2}, {1, 2}, {0, 1, 2, 3}])
def test_ranks_that_return_no_rows(hollow_ranks: set[int], client: Client) -> None:
    def give(rank: int, rows: DataProto) -> DataProto:
        return _hollow(0) if rank in hollow_ranks else _hollow(rank + 1)

    with make_group(client, Rows, 4) as group:
        later = group.apply_later(give, batch_of(8))
        expected = DataProto.concat([give(rank, batch_of(0)) for rank in range(4)])
        assert len(expected) == sum(rank + 1 for rank in range(4) if rank not in hollow_ranks)
        for result in (group.apply(give, batch_of(8)), later.get(timeout=LIMIT_S)):
            assert_same_batch(result, expected)
            assert result.batch["bf16"].shape[1:] == (3,) and result.batch["bf16"].dtype == torch.bfloat16
        pieces = later.chunk(3)
        assert [len(piece.get(timeout=LIMIT_S)) for piece in pieces] == [len(piece) for piece in expected.chunk(3)]
        assert_same_batch(DataProtoFuture.concat(pieces).get(timeout=LIMIT_S), expected)


# ---------------------------------------------------------------------- A10 plain values

Point = collections.namedtuple("Point", "x y")

PLAIN: list[Any] = [
    {"x": 1, "y": {"z": [1, 2]}},
    collections.OrderedDict(b=1, a=2),
    [1, "two", None],
    (1, 2),
    {1, 2, 3},
    frozenset({"a"}),
    None,
    True,
    0,
    -1.5,
    float("inf"),
    "é",
    "",
    b"\0\xff",
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2024-01-01"),
    range(3),
    3 + 4j,
    Point(1, 2),
    torch.float16,
    torch.Size([2, 3]),
    slice(1, 2),
    int,
]


def test_plain_values_arrive_as_they_are(client: Client) -> None:
    with make_group(client, Rows, 4) as group:
        for value in PLAIN:
            for answers in (group.show(value), group.show(value=value)):
                assert [rank for rank, _, _ in answers] == [0, 1, 2, 3]
                for _, name, got in answers:
                    assert name == type(value).__name__, value
                    assert type(got) is type(value) and got == value


def test_batches_inside_plain_values(client: Client) -> None:
    with make_group(client, Rows, 4) as group:
        for _, name, got in group.show({"deep": [batch_of(3), {"t": torch.ones(2, dtype=torch.bfloat16)}]}):
            assert name == "dict"
            assert_same_batch(got["deep"][0], batch_of(3))
            assert got["deep"][1]["t"].dtype == torch.bfloat16 and got["deep"][1]["t"].tolist() == [1, 1]
        for _, name, got in group.show(torch.arange(3)):
            assert name == "Tensor" and torch.equal(got, torch.arange(3))


def test_dask_futures_arrive_as_their_values(client: Client) -> None:
    with make_group(client, Rows, 4) as group:
        task = client.submit(dict, a=(1, {2}), pure=False)
        assert [(name, got) for _, name, got in group.show(task)] == [("dict", {"a": (1, {2})})] * 4
        deep = group.show({"k": [task, (task, 1)]})
        assert [got for _, _, got in deep] == [{"k": [{"a": (1, {2})}, ({"a": (1, {2})}, 1)]}] * 4
        assert group.kinds(task) == ["Future"] * 4
        nothing = client.submit(lambda: None, pure=False)
        assert [(name, got) for _, name, got in group.show(nothing)] == [("NoneType", None)] * 4


def test_equal_shaped_values_of_two_calls_never_mix(client: Client) -> None:
    with make_group(client, Rows, 4) as group:
        for step in range(100):
            assert [got for _, _, got in group.show({"x": step % 2})] == [{"x": step % 2}] * 4


# ---------------------------------------------------------------------- A11 the same batch again and again


def test_the_same_batch_for_two_hundred_steps(client: Client) -> None:
    data = batch_of(8)
    with make_group(client, Rows, 2) as left, make_group(client, Rows, 2) as right:
        for step in range(200):
            first, second = left.echo_later(data), right.echo_later(data)
            crossed = right.echo_later(first)
            if step % 10 == 0:
                assert_same_batch(crossed.get(timeout=LIMIT_S), data)
                assert_same_batch(second.get(timeout=LIMIT_S), data)
            # Dropped, sometimes before the ranks have answered.
        assert_same_batch(left.echo(data), data)
        assert_same_batch(right.echo(crossed), data)
        assert sum(left.count()) == 2 * 201


def test_the_same_batch_scattered_for_many_steps(client: Client) -> None:
    data = batch_of(8)
    with make_group(client, Rows, 2) as group:
        for _ in range(50):
            future = client.scatter(data)
            assert_same_batch(group.echo(future), data)
            answers = group.show(future)
            del future
            assert_same_batch(answers[1][2], data)


def test_results_dropped_before_they_are_made_do_not_disturb_later_ones(client: Client) -> None:
    data = batch_of(8)
    with make_group(client, Rows, 4) as group:
        for _ in range(100):
            group.echo_later(data)
        kept = group.echo_later(data)
        assert not wait(kept.futures, timeout=LIMIT_S).not_done
        assert {future.status for future in kept.futures} == {"finished"}
        assert_same_batch(kept.get(timeout=LIMIT_S), data)
