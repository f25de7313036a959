"""The base class of ranks: built from the environment, from a context, inside a rank; and meshes."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from typing import Any

import pytest
import torch
from distributed import Client

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    Dispatch,
    Worker,
    register,
)
from dask_controller.worker.context import RankContext, current_context, enter_context

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What ``torchrun`` sets for one of two ranks."""
    values = dict(zip(VARIABLES, ("1", "2", "1", "2", "node-a", "12345"), strict=True))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------------- from the environment


def test_a_worker_reads_the_environment(environment: dict[str, str]) -> None:
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (1, 2, 1, 2)
    assert worker.get_master_addr_port() == ("node-a", "12345")
    assert worker.device == torch.device("cpu")
    assert worker.fused_worker_dict == {}
    assert worker.get_fused_worker_by_name("actor") is None


def test_only_rank_and_world_size_are_needed(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    worker = Worker()
    assert (worker.local_rank, worker.local_world_size) == (0, 1)
    assert worker.get_master_addr_port() == ("127.0.0.1", "0")


def test_missing_variables_are_named(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="RANK and WORLD_SIZE not set.*DaskWorkerGroup"):
        Worker()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="its rank: WORLD_SIZE not set"):
        Worker()


class Quiet(Worker):
    def __init__(self) -> None:
        pass


def test_a_class_that_never_calls_super_says_so_when_asked(bare_environment: None) -> None:
    worker = Quiet()
    with pytest.raises(RuntimeError, match="RANK and WORLD_SIZE not set"):
        worker.rank  # noqa: B018
    with pytest.raises(AttributeError, match="never_there"):
        worker.never_there  # noqa: B018


def test_a_class_that_never_calls_super_has_its_rank(environment: dict[str, str]) -> None:
    worker = Quiet()
    assert (worker.rank, worker.world_size) == (1, 2)
    worker._register_dispatch_collect_info("mesh", 0, True)
    assert worker.query_collect_info("mesh") is True


def test_a_context_goes_before_the_environment(environment: dict[str, str]) -> None:
    context = RankContext(rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="b", master_port=7)

    def build() -> tuple[int, int, tuple[str, str], RankContext | None]:
        # A thread of its own: the context variable of this one stays as it is.
        enter_context(context)
        worker = Quiet()
        return worker.rank, worker.world_size, worker.get_master_addr_port(), current_context()

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(build()))
    thread.start()
    thread.join(10)
    assert found == [(5, 8, ("b", "7"), context)]
    assert current_context() is None
    assert Worker().rank == 1


def test_env_keys_are_those_that_a_group_protects() -> None:
    assert sorted(Worker.env_keys()) == sorted([*VARIABLES, "CUDA_VISIBLE_DEVICES"])


@pytest.mark.parametrize("mask", ["3", "3,0,1,2", "GPU-8a1c", ""])
def test_the_mask_is_read_as_it_is(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert Worker().get_cuda_visible_devices() == mask
    assert Worker("5").get_cuda_visible_devices() == mask
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask


def test_without_a_mask(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Worker().get_cuda_visible_devices() == "not set"
    assert Worker("5").get_cuda_visible_devices() == "5"
    assert Quiet().get_cuda_visible_devices() == "not set"


def test_a_free_port_is_free(environment: dict[str, str]) -> None:
    address, port = Worker().get_available_master_addr_port()
    assert isinstance(address, str) and isinstance(port, str)
    with socket.create_server(("", int(port))) as server:
        assert server.getsockname()[1] == int(port)
    ports = {Worker().get_available_master_addr_port()[1] for _ in range(5)}
    assert len(ports) > 1


# ---------------------------------------------------------------------- meshes


def test_meshes(environment: dict[str, str]) -> None:
    worker = Worker()
    worker._register_dispatch_collect_info("train", dp_rank=3, is_collect=False)
    worker._register_dispatch_collect_info(mesh_name="infer", dp_rank=1, is_collect=True)
    assert (worker._query_dispatch_info("train"), worker._query_collect_info("train")) == (3, False)
    assert (worker._query_dispatch_info("infer"), worker.query_collect_info("infer")) == (1, True)
    assert worker.get_dispatch_collect() == {
        "dispatch_dp_rank": {"train": 3, "infer": 1},
        "collect_dp_rank": {"train": False, "infer": True},
    }


def test_what_is_read_of_meshes_is_a_copy(environment: dict[str, str]) -> None:
    worker = Worker()
    worker._register_dispatch_collect_info("train", 0, True)
    worker.get_dispatch_collect()["dispatch_dp_rank"]["train"] = 9
    assert worker._query_dispatch_info("train") == 0


def test_a_mesh_is_registered_once(environment: dict[str, str]) -> None:
    worker = Worker()
    worker._register_dispatch_collect_info("train", 2, True)
    with pytest.raises(ValueError, match="mesh 'train' is registered already on rank 1 with dp_rank 2"):
        worker._register_dispatch_collect_info("train", 3, False)
    assert (worker._query_dispatch_info("train"), worker._query_collect_info("train")) == (2, True)


def test_an_unknown_mesh_names_the_known_ones(environment: dict[str, str]) -> None:
    worker = Worker()
    for ask in (worker._query_dispatch_info, worker._query_collect_info, worker.query_collect_info):
        with pytest.raises(ValueError, match="mesh 'infer' is not registered on rank 1 of Worker; registered: none"):
            ask("infer")
    worker._register_dispatch_collect_info("train", 0, True)
    with pytest.raises(ValueError, match=r"registered: \['train'\]"):
        worker._query_dispatch_info("infer")


def test_mesh_positions_are_copied_between_workers(environment: dict[str, str]) -> None:
    ref, actor, both = Worker(), Worker(), Worker()
    ref._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    actor._register_dispatch_collect_info("actor", dp_rank=1, is_collect=False)
    both.set_dispatch_collect(mesh_name="ref", **ref.get_dispatch_collect())
    both.set_dispatch_collect(mesh_name="actor", **actor.get_dispatch_collect())
    assert (both._query_dispatch_info("ref"), both._query_collect_info("ref")) == (0, True)
    assert (both._query_dispatch_info("actor"), both._query_collect_info("actor")) == (1, False)
    with pytest.raises(ValueError, match="'actor' is registered already"):
        both.set_dispatch_collect(mesh_name="actor", **actor.get_dispatch_collect())


def test_copying_of_several_meshes_needs_the_name(environment: dict[str, str]) -> None:
    source, target = Worker(), Worker()
    source._register_dispatch_collect_info("train", 2, True)
    source._register_dispatch_collect_info("infer", 3, False)
    target.set_dispatch_collect("infer", **source.get_dispatch_collect())
    assert (target._query_dispatch_info("infer"), target._query_collect_info("infer")) == (3, False)
    with pytest.raises(ValueError, match=r"cannot tell which of the meshes \['infer', 'train'\] to copy as 'ref'"):
        target.set_dispatch_collect("ref", **source.get_dispatch_collect())


# ---------------------------------------------------------------------- functions, marked methods called plainly


def test_functions_of_the_controller_run_as_methods(environment: dict[str, str]) -> None:
    worker = Worker()
    assert worker.execute_with_func_generator(lambda w, a, b=0: (w.rank, a, b), 1, b=2) == (1, 1, 2)
    assert worker.execute_func_rank_zero(lambda a, b=0: (a, b), 1, b=2) == (1, 2)


# ---------------------------------------------------------------------- on a rank


class Inner(Worker):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> int:
        return self.start + self.rank


class Outer(Worker):
    """Builds other workers inside itself and calls their marked methods as they are."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.inner = Inner(start)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> int:
        return self.inner.get()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build_later(self) -> tuple[int, int, bool]:
        built = Inner(100)
        return built.get(), built.world_size, built.get_master_addr_port() == self.get_master_addr_port()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def build_in_a_coroutine(self) -> int:
        return Inner(200).get()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def facts(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "address": self.get_master_addr_port(),
            "device": str(self.device),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_port(self) -> tuple[str, str]:
        address, port = self.get_available_master_addr_port()
        with socket.create_server((address, int(port))):
            return address, port


@pytest.mark.parametrize("fixture", ["inproc_client", "client"])
def test_a_worker_inside_a_worker_has_the_same_rank(fixture: str, request: pytest.FixtureRequest) -> None:
    client: Client = request.getfixturevalue(fixture)
    pool = DaskResourcePool([4], use_gpu=False)
    with DaskWorkerGroup(pool, DaskClassWithInitArgs(Outer, 2), client=client) as group:
        assert group.get() == [2, 3, 4, 5]
        assert group.build_later() == [(100 + rank, 4, True) for rank in range(4)]
        assert group.build_in_a_coroutine() == [200, 201, 202, 203]
        address = (group.master_address, group.master_port)
        assert group.facts() == [
            {
                "rank": rank,
                "world_size": 4,
                "local_rank": rank,
                "local_world_size": 4,
                "address": address,
                "device": "cpu",
            }
            for rank in range(4)
        ]
        assert [address for address, _ in group.free_port()] == ["127.0.0.1"] * 4


def test_a_class_pickles_with_its_marks() -> None:
    assert pickle.loads(pickle.dumps(Outer)) is Outer
