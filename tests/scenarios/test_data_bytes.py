"""What bytes cost and whether they arrive: every kind of tensor, chunks sent once, checksums (A8, A12, D6)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed import Client

from dask_controller import DaskWorkerGroup, DataProto, DataProtoFuture, errors
from dask_controller.group import outgoing
from dask_controller.protocol.meta import equal_values
from tests.protocol.batches import assert_same_batch, zoo
from tests.scenarios.data_ranks import LIMIT_S, MeshRows, Rows, Traffic, batch_of, checksums, make_group

MB = 2**20


@pytest.fixture
def bytes_on_the_wire() -> Iterator[None]:
    """Nothing goes by shared memory, so that every byte is seen on a connection."""
    with dask.config.set({"controller.shared-memory-limit": 0}):
        yield


# ---------------------------------------------------------------------- A8 every tensor


def _more_tensors(rows: int) -> dict[str, torch.Tensor]:
    plain = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6)
    compound = torch.complex(plain, plain + 1)
    return {
        "conj": compound.conj(),
        "neg": compound.conj().imag,
        "grad": torch.rand(rows, 2, requires_grad=True),
        "strided": torch.arange(rows * 20).view(rows, 20)[:, ::3],
        "flipped": plain.flip(0),
        "expanded": torch.tensor([7, 8], dtype=torch.int8).expand(rows, 2),
        "offset": torch.arange(rows + 5)[5:],
        "empty": torch.zeros(rows, 0, 5, dtype=torch.bfloat16),
        "int64": torch.full((rows,), 2**62),
        "half": plain.to(torch.float16) / 3,
        "e5m2": plain.to(torch.float8_e5m2),
        "double": torch.tensor([[float("nan"), float("-inf")]] * rows, dtype=torch.float64),
    }


@pytest.mark.parametrize("cluster", ["client", "inproc_client"])
def test_every_kind_of_tensor_makes_the_round_trip(cluster: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(cluster)
    everything = zoo(8)
    more = DataProto.from_dict(_more_tensors(8))
    with make_group(client, Rows, 4) as group:
        for data in (everything, more):
            later = group.echo_later(data)
            results = [group.echo(data), later.get(timeout=LIMIT_S), group.echo(later), group.on_zero(data)]
            results.append(DataProtoFuture.concat(later.chunk(3)).get(timeout=LIMIT_S))
            results += [got for _, _, got in group.show(data)]
            for result in results:
                assert_same_batch(result, data, meta=False)
                assert equal_values(result.meta_info, data.meta_info)
        assert group.on_zero(more).batch["grad"].requires_grad
        del later


def test_tensors_outside_batches_make_the_round_trip(client: Client) -> None:
    values = {
        "0-d": torch.tensor(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "transposed": torch.arange(6).view(2, 3).t(),
        "large": torch.rand(300, 300),
        "array": np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2],
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }
    with make_group(client, Rows, 2) as group:
        for _, _, got in group.show(values):
            assert set(got) == set(values)
            for key, value in values.items():
                assert type(got[key]) is type(value) and equal_values(got[key], value), key


def _slice_of_large(rank: int, rows: DataProto) -> DataProto:
    return DataProto.from_dict({"x": torch.zeros(10_000, 1_000)[:5]})


@pytest.mark.usefixtures("bytes_on_the_wire")
def test_a_slice_costs_its_own_bytes(client: Client) -> None:
    large = torch.rand(10_000, 1_000)
    assert large.nbytes == 40_000_000
    data = DataProto.from_dict({"x": large[100:110]})
    with make_group(client, Rows, 2) as group:
        for call in (group.echo, partial(group.apply, _slice_of_large)):
            with Traffic() as traffic:
                result = call(data)
            assert result.batch["x"].shape == (10, 1000)
            # 10 rows of 4,000 bytes, and what else goes over the wire meanwhile.
            assert 40_000 <= traffic.written < 200_000
            assert 40_000 <= traffic.read < 200_000
        with Traffic() as traffic:
            later = group.echo_later(data)
            assert torch.equal(later.get(timeout=LIMIT_S).batch["x"], large[100:110])
        assert traffic.written < 200_000 and traffic.read < 200_000


def _lock_in_meta() -> DataProto:
    return batch_of(8, meta_info={"outer": {"inner": threading.Lock()}})


def _lock_in_column() -> DataProto:
    data = batch_of(8)
    # In the chunk of the last rank: the chunks before it can all be sent.
    data.non_tensor_batch["list"][7] = [threading.Lock()]
    return data


@pytest.mark.parametrize(("make", "key"), [(_lock_in_meta, "inner"), (_lock_in_column, "list")])
def test_what_cannot_travel_is_refused_before_any_rank_is_called(
    make: Callable[[], DataProto], key: str, client: Client
) -> None:
    data = make()
    with make_group(client, Rows, 4) as group:
        for call in (group.echo, group.echo_later, group.sizes, group.show):
            with pytest.raises(errors.UnsupportedTypeError) as caught:
                call(data)
            assert key in str(caught.value) and "lock" in str(caught.value)
        with pytest.raises(errors.UnsupportedTypeError, match="lock"):
            group.show({"deep": [threading.Lock()]})
        assert group.count() == [0] * 4
        assert_same_batch(group.echo(batch_of(8)), batch_of(8))


# ---------------------------------------------------------------------- A12 shared chunks


class PackCounter:
    """Counts the batches that a group serialises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        real = outgoing.pack

        def pack(value: Any, **options: Any) -> Any:
            packed = real(value, **options)
            if isinstance(value, DataProto):
                self.batches.append(packed.nbytes)
            return packed

        monkeypatch.setattr(outgoing, "pack", pack)


@pytest.mark.usefixtures("bytes_on_the_wire")
def test_a_chunk_is_serialised_once_for_all_its_peers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = PackCounter(monkeypatch)
    with make_group(client, MeshRows, 4) as group:
        small = batch_of(6)
        assert_same_batch(group.echo(small), small)
        assert len(counter.batches) == 2
        assert group.what_was_seen() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]

        counter.batches.clear()
        data = DataProto.from_dict({"x": torch.rand(8, MB // 4)})  # 8 MB
        with Traffic() as traffic:
            assert torch.equal(group.echo(data).batch["x"], data.batch["x"])
        assert len(counter.batches) == 2 and sum(counter.batches) == pytest.approx(8 * MB, rel=0.01)
        # Each of the four hosts needs its half; only two ranks send anything back.
        assert traffic.written == pytest.approx(16 * MB, rel=0.05)
        assert traffic.read == pytest.approx(8 * MB, rel=0.05)

        counter.batches.clear()
        later = group.echo_later(data)
        assert torch.equal(later.get(timeout=LIMIT_S).batch["x"], data.batch["x"])
        assert len(counter.batches) == 2


def test_one_value_for_all_is_serialised_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = PackCounter(monkeypatch)
    data = batch_of(8)
    with make_group(client, Rows, 4) as group:
        assert len(group.show(data)) == 4
        assert len(counter.batches) == 1
        counter.batches.clear()
        # The same object twice in one call.
        group.apply(lambda rank, left, right: left, data, data)
        assert len(counter.batches) == 8  # chunks are objects of their own


def test_ranks_outside_the_mask_send_nothing(client: Client) -> None:
    with make_group(client, MeshRows, 4) as group:
        result = group.apply(batch_of(8))
        # Collected ranks only: 0 and 2, one for each index.
        assert result.meta_info["metrics"] == {"loss": [0, 2]}
        assert result.meta_info["rank"] == [0, 2]
        assert_same_batch(result, batch_of(8), meta=False)


# ---------------------------------------------------------------------- D6 checksums


def _bytes_batch(nbytes: int) -> DataProto:
    """Four rows; each of the three columns has about ``nbytes`` in all."""
    each = max(nbytes // 4, 1)
    generator = np.random.default_rng(nbytes)
    raw = generator.integers(0, 256, size=(4, each), dtype=np.uint8)
    return DataProto.from_dict(
        {"tensor": torch.from_numpy(raw.copy())},
        {"array": raw[:, ::-1], "object": [row.tobytes() for row in raw]},
        {"nbytes": nbytes},
    )


def _check_bytes(left: DaskWorkerGroup, right: DaskWorkerGroup, nbytes: int) -> None:
    data = _bytes_batch(nbytes)
    whole, parts = checksums(data), [checksums(part) for part in data.chunk(2)]
    assert len(set(whole.values())) == 3
    assert left.digests(data) == parts
    assert left.digests_of_all(data) == [whole] * 2
    assert checksums(left.echo(data)) == whole
    later = left.echo_later(data)
    assert checksums(later.get(timeout=LIMIT_S)) == whole
    assert right.digests(later) == parts
    assert right.digests_of_all(later) == [whole] * 2
    low, high = later.chunk(2)
    assert right.digests(DataProtoFuture.concat([high, low])) == parts[::-1]


#: Around the limits below which bytes ride inside a message or a pickle stream.
SIZES = [1, 7, 1_023, 4 * 1_024, 4 * 1_024 + 4, 4 * 65_536, 4 * 65_536 + 4, 1_000_003, 4 * MB]


@pytest.mark.parametrize("shared_memory", ["1 GiB", 0])
@pytest.mark.parametrize("cluster", ["client", "scheduler_only_client"])
def test_every_byte_arrives(cluster: str, shared_memory: object, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(cluster)
    with (
        dask.config.set({"controller.shared-memory-limit": shared_memory}),
        make_group(client, Rows, 2) as left,
        make_group(client, Rows, 2) as right,
    ):
        for nbytes in SIZES:
            _check_bytes(left, right, nbytes)


def test_every_byte_arrives_in_one_process(inproc_client: Client) -> None:
    with make_group(inproc_client, Rows, 2) as group:
        for nbytes in SIZES:
            _check_bytes(group, group, nbytes)


def test_every_byte_of_16_mb_arrives(client: Client) -> None:
    with make_group(client, Rows, 2) as left, make_group(client, Rows, 2) as right:
        _check_bytes(left, right, 16 * MB)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_byte_of_256_mb_arrives(client: Client) -> None:
    data = DataProto.from_dict({"tensor": torch.randint(0, 256, (4, 64 * MB), dtype=torch.uint8)})
    whole, parts = checksums(data), [checksums(part) for part in data.chunk(2)]
    with make_group(client, Rows, 2) as left, make_group(client, Rows, 2) as right:
        assert left.digests(data) == parts
        assert checksums(left.echo(data)) == whole
        later = left.echo_later(data)
        assert right.digests(later) == parts
        assert checksums(later.get(timeout=300)) == whole
