"""Hand-over by memory between processes, without a cluster."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch

from dask_controller.protocol.serialize import pack, unpack
from dask_controller.runtime import shm
from dask_controller.runtime.shm import Link, SegmentPool, attach, process_token

MIB = 1 << 20

pytestmark = pytest.mark.skipif(shm.node_token() is None, reason="no memfd on this system")


def batch(n: int = MIB) -> dict[str, Any]:
    return {
        "x": torch.arange(n, dtype=torch.int64),
        "y": torch.ones(7, 3, dtype=torch.bfloat16),
        "z": np.arange(n // 2, dtype=np.float32),
        "s": "text",
    }


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert torch.equal(got["x"], want["x"]) and torch.equal(got["y"], want["y"])
    assert got["y"].dtype == torch.bfloat16 and got["s"] == want["s"]
    np.testing.assert_array_equal(got["z"], want["z"])


@pytest.fixture
def pool() -> Any:
    pool = SegmentPool(64 * MIB)
    yield pool
    pool.close()


def round_trip(pool: SegmentPool, value: Any, released: list[int]) -> Any:
    description = pool.write(pack(value), process_token())
    assert description is not None
    return unpack(attach(description, released.append))


def test_values_come_back_equal_and_writable(pool: SegmentPool) -> None:
    released: list[int] = []
    got = round_trip(pool, batch(), released)
    assert_same(got, batch())
    got["x"][0] = 5
    assert int(got["x"][0]) == 5 and released == []


def test_a_segment_is_given_back_when_the_last_view_is_gone(pool: SegmentPool) -> None:
    released: list[int] = []
    got = round_trip(pool, batch(), released)
    view = got["x"][10:20]
    del got
    gc.collect()
    assert released == [] and view.tolist() == list(range(10, 20))
    del view
    gc.collect()
    assert released == [0]


def test_segments_are_used_again(pool: SegmentPool) -> None:
    released: list[int] = []
    for _ in range(5):
        got = round_trip(pool, batch(), released)
        assert pool.num_in_use == 1
        del got
        gc.collect()
        pool.release(released)
        released.clear()
    assert pool.num_in_use == 0 and pool.nbytes < 2 * 10 * MIB


def test_a_segment_in_use_is_never_written_to(pool: SegmentPool) -> None:
    released: list[int] = []
    first = round_trip(pool, {"x": torch.zeros(MIB)}, released)
    second = round_trip(pool, {"x": torch.ones(MIB)}, released)
    assert float(first["x"].sum()) == 0.0 and float(second["x"].sum()) == MIB


def test_beyond_the_limit_nothing_is_written(pool: SegmentPool) -> None:
    held = [pool.write(pack({"x": torch.zeros(4 * MIB)}), process_token()) for _ in range(5)]
    assert [description is not None for description in held] == [True, True, True, False, False]
    assert pool.nbytes <= 64 * MIB
    pool.release([held[0]["segment"]])  # type: ignore[index]
    assert pool.write(pack({"x": torch.zeros(4 * MIB)}), process_token()) is not None


def test_what_a_dead_receiver_held_is_taken_back(pool: SegmentPool) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    token = (dead.pid, shm._start_time(dead.pid) or "0")
    dead.wait(timeout=30)
    for _ in range(3):
        assert pool.write(pack({"x": torch.zeros(4 * MIB)}), token) is not None
    assert pool.write(pack({"x": torch.zeros(4 * MIB)}), process_token()) is not None
    assert pool.num_in_use == 1


def test_small_values_and_a_limit_of_zero_take_the_usual_way(pool: SegmentPool) -> None:
    assert pool.write(pack({"x": torch.zeros(100)}), process_token()) is None
    assert SegmentPool(0).write(pack({"x": torch.zeros(4 * MIB)}), process_token()) is None


def test_links_meet_only_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = {"node": shm.node_token(), "pid": os.getppid(), "started": "1", "probe": (0, 0)}
    other_machine = Link(MIB)
    other_machine.meet({**parent, "node": "elsewhere"})
    assert other_machine.peer is None
    same_process = Link(MIB)
    same_process.meet(same_process.hello())
    assert same_process.peer is None
    closed = Link(MIB)
    closed.meet(parent)  # the same machine, but that memory cannot be opened
    assert closed.peer is None
    off = Link(0)
    off.meet(Link(MIB).hello())
    assert off.hello()["node"] is None and off.peer is None
    monkeypatch.delattr(os, "memfd_create")
    assert Link(MIB).hello()["node"] is None


def test_another_process_reads_it_and_a_killed_one_leaves_nothing() -> None:
    program = textwrap.dedent(
        """
        import os, pickle, signal, sys, torch
        from dask_controller.protocol.serialize import pack
        from dask_controller.runtime.shm import SegmentPool
        pool = SegmentPool(1 << 26)
        token = pickle.loads(bytes.fromhex(sys.argv[1]))
        description = pool.write(pack({"x": torch.arange(1 << 20)}), token)
        print(__import__("pickle").dumps(description).hex(), flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, pickle.dumps(process_token()).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        description = pickle.loads(bytes.fromhex(child.stdout.readline()))
        got = unpack(attach(description, lambda segment: None))
        assert torch.equal(got["x"], torch.arange(1 << 20))
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(timeout=30)
        # What is mapped stays readable after the sender's death; nothing has a name.
        assert torch.equal(got["x"], torch.arange(1 << 20))
        assert not [name for name in os.listdir("/dev/shm") if "dask-controller" in name]
        with pytest.raises(OSError, match="."):
            attach({**description, "inode": description["inode"] + 1}, lambda segment: None)
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        child.wait(timeout=30)
