"""Pools: sizes, and slots that stay as long as they can be used."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from dask_controller.errors import InsufficientResourcesError, PlacementError
from dask_controller.pool.hosts import HostInfo
from dask_controller.pool.pool import DaskResourcePool, ResourcePool, SubDaskResourcePool
from dask_controller.pool.split import merge_resource_pool, split_resource_pool
from tests.pool.fake_hosts import addresses, make_host, make_machine, occupy

# ---------------------------------------------------------------------- sizes


def test_local_ranks_of_uneven_nodes() -> None:
    pool = ResourcePool([2, 1])
    assert pool.world_size == 3
    assert pool.local_rank_list() == [0, 1, 0]
    assert pool.local_world_size_list() == [2, 2, 1]
    pool.add_node(3)
    assert pool.store == pool() == [2, 1, 3]
    assert pool.local_rank_list() == [0, 1, 0, 0, 1, 2]


def test_a_pool_starts_empty_and_keeps_its_own_list() -> None:
    first, second = ResourcePool(), ResourcePool([])
    first.add_node(2)
    assert (first.world_size, second.world_size, second.store) == (2, 0, [])
    sizes = [4]
    pool = ResourcePool(sizes)
    sizes.append(4)
    pool.store.append(4)
    assert pool.store == [4]


def test_defaults_and_argument_order() -> None:
    pool = ResourcePool([1], 3, 16)
    assert (pool.max_colocate_count, pool.n_gpus_per_node) == (3, 16)
    assert (ResourcePool().max_colocate_count, ResourcePool().n_gpus_per_node) == (10, 8)
    client: Any = object()
    pool = DaskResourcePool([1], False, "train", 2, True, "NPU", client)
    assert (pool.use_gpu, pool.name_prefix, pool.max_colocate_count, pool.detached) == (False, "train", 2, True)
    assert pool.resource_name == "NPU" and pool.client is client
    pool = DaskResourcePool([1])
    assert (pool.use_gpu, pool.max_colocate_count, pool.detached, pool.resource_name) == (True, 10, False, "GPU")


@pytest.mark.parametrize("cls", [ResourcePool, DaskResourcePool])
@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([2, 0], ValueError, r"process_on_nodes\[1\] must be at least 1, got 0"),
        ([-1], ValueError, r"process_on_nodes\[0\]"),
        ([1.5], TypeError, r"process_on_nodes\[0\] must be an int, got float"),
        ([True], TypeError, "got bool"),
        (["2"], TypeError, "got str"),
        (4, TypeError, r"such as \[8, 8\], got 4"),
        ("44", TypeError, "process_on_nodes must be a list"),
    ],
)
def test_bad_sizes(cls: type[ResourcePool], sizes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cls(sizes)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="max_colocate_count must be at least 1"):
        DaskResourcePool([1], max_colocate_count=0)
    with pytest.raises(ValueError, match="n_gpus_per_node"):
        ResourcePool([1], n_gpus_per_node=0)
    with pytest.raises(ValueError, match="process_count"):
        ResourcePool().add_node(0)
    with pytest.raises(TypeError, match="name_prefix must be a str"):
        DaskResourcePool([1], name_prefix=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resource_name must be a str"):
        DaskResourcePool([1], resource_name=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_gpu=False"):
        DaskResourcePool([1], resource_name="")
    with pytest.raises(ValueError, match="resource_name='A100' instead"):
        DaskResourcePool([1], accelerator_type="A100")  # type: ignore[arg-type]


def test_names_are_unique_and_readable() -> None:
    pools = [DaskResourcePool([1]), DaskResourcePool([1]), DaskResourcePool([1], name_prefix="train")]
    pools.append(DaskResourcePool([1], name_prefix="train"))
    assert len({pool.pool_id for pool in pools}) == 4
    assert pools[0].name_prefix != pools[1].name_prefix
    assert pools[2].name_prefix == "train" and pools[2].pool_id.startswith("train-")
    assert repr(pools[2]) == "<dask_controller.DaskResourcePool 'train': [1], resource 'GPU'>"
    assert repr(DaskResourcePool([2], False, "cpu")) == "<dask_controller.DaskResourcePool 'cpu': [2], no accelerator>"
    assert repr(ResourcePool([2, 1])) == "dask_controller.ResourcePool([2, 1], max_colocate_count=10)"


# ---------------------------------------------------------------------- slots


def test_two_groups_on_one_pool_and_one_too_many() -> None:
    pool = DaskResourcePool([2, 1], max_colocate_count=2)
    hosts: list[HostInfo] = [*make_machine(2, "a"), *make_machine(1, "b")]
    first = pool.slots(hosts, "resource")
    assert [(s.node_rank, s.local_rank, s.local_world_size) for s in first] == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    hosts = occupy(hosts, first, "actor", executor="process")
    second = pool.slots(hosts, "resource")
    assert second == first
    hosts = occupy(hosts, second, "critic", executor="process")
    with pytest.raises(InsufficientResourcesError, match=r"max_colocate_count=2.*Close one of them") as caught:
        pool.slots(hosts, "resource")
    assert caught.value.held["tcp://b:0"] == "groups 'actor', 'critic'"
    assert caught.value.possible  # type: ignore[attr-defined]


def test_a_second_inline_group_waits_for_the_first() -> None:
    pool = DaskResourcePool([2])
    hosts = make_machine(2)
    slots = pool.slots(hosts)
    busy = occupy(hosts, slots, "actor")
    with pytest.raises(InsufficientResourcesError, match="already carry a live group") as caught:
        pool.slots(busy)
    assert "group 'actor'" in caught.value.held["tcp://node-a:0"]
    assert caught.value.possible and pool.is_possible(busy)  # type: ignore[attr-defined]
    assert pool.slots(hosts) == slots


def test_slots_stay_when_the_cluster_grows() -> None:
    pool = DaskResourcePool([1])
    hosts = [make_host(5)]
    slots = pool.slots(hosts)
    assert pool.slots([make_host(1), *hosts]) == slots


def test_devices_are_dealt_out_again_between_groups() -> None:
    # A host that comes later sits before ours; another pool now counts its device as the first.
    pool, other = DaskResourcePool([1]), DaskResourcePool([1])
    ours, new = make_host(5, device_count=2), make_host(1, device_count=2)
    assert [s.device for s in pool.slots([ours])] == [0]
    theirs = other.slots([new, ours])
    assert [(s.address, s.device) for s in theirs] == [(new.address, 0)]
    hosts = occupy([new, ours], theirs, "theirs")
    assert [(s.address, s.device) for s in pool.slots(hosts)] == [(ours.address, 1)]


def test_a_device_in_use_does_not_change() -> None:
    pool = DaskResourcePool([1])
    ours, new = make_host(5, device_count=2), make_host(1, device_count=2)
    busy = occupy([ours], pool.slots([ours]), "first", executor="process")
    assert [s.device for s in pool.slots([new, *busy], "resource")] == [0]
    [slot] = DaskResourcePool([1]).slots([new, *busy], "resource")
    assert (slot.address, slot.device) == (new.address, 1)


def test_a_lost_host_is_replaced_once_the_pool_is_empty() -> None:
    pool = DaskResourcePool([2])
    hosts = make_machine(3)
    slots = pool.slots(hosts)
    assert addresses(slots) == ["tcp://node-a:0", "tcp://node-a:1"]
    alive = occupy(hosts, slots, "actor", executor="process")[1:]
    with pytest.raises(PlacementError, match="tcp://node-a:0 left the cluster.*Close the groups") as caught:
        pool.slots(alive, "resource")
    assert not isinstance(caught.value, InsufficientResourcesError)
    assert addresses(pool.slots(hosts[1:], "resource")) == ["tcp://node-a:1", "tcp://node-a:2"]


def test_slots_that_others_took_are_replaced() -> None:
    pool, other = DaskResourcePool([1]), DaskResourcePool([1])
    hosts = make_machine(2)
    assert addresses(pool.slots(hosts)) == addresses(other.slots(hosts)) == ["tcp://node-a:0"]
    hosts = occupy(hosts, other.slots(hosts), "faster")
    assert addresses(pool.slots(hosts)) == ["tcp://node-a:1"]
    hosts = occupy(hosts, pool.slots(hosts), "slower")
    with pytest.raises(InsufficientResourcesError) as caught:
        DaskResourcePool([1]).slots(hosts)
    assert sorted(caught.value.held) == ["tcp://node-a:0", "tcp://node-a:1"]


def test_a_choice_that_fails_changes_nothing() -> None:
    pool = DaskResourcePool([2])
    hosts = make_machine(2)
    slots = pool.slots(hosts)
    with pytest.raises(InsufficientResourcesError) as caught:
        pool.slots(hosts[:1])
    assert not caught.value.possible  # type: ignore[attr-defined]
    assert pool.slots([*hosts, make_host(9, "node-0"), make_host(8, "node-0")]) == slots


def test_the_executor_may_change_between_groups() -> None:
    pool = DaskResourcePool([2])
    hosts = [make_host(0, gpu=2), make_host(1)]
    assert [(s.address, s.index) for s in pool.slots(hosts, "resource")] == [
        ("tcp://node-a:0", 0),
        ("tcp://node-a:0", 1),
    ]
    assert addresses(pool.slots(hosts, "one")) == ["tcp://node-a:0", "tcp://node-a:1"]


def test_pools_without_accelerator() -> None:
    pool = DaskResourcePool([2], use_gpu=False)
    hosts = make_machine(2, gpu=0, device_count=4)
    slots = pool.slots(hosts)
    assert [(s.address, s.device) for s in slots] == [("tcp://node-a:0", None), ("tcp://node-a:1", None)]
    assert not DaskResourcePool([3], use_gpu=False).is_possible(hosts)
    assert DaskResourcePool([3], use_gpu=False).is_possible(hosts, "resource")


def test_an_empty_pool_has_no_slots() -> None:
    with pytest.raises(PlacementError, match="add_node"):
        DaskResourcePool().slots(make_machine(1))
    with pytest.raises(ValueError, match="'one' or 'resource', got 'two'"):
        DaskResourcePool([1]).slots(make_machine(1), "two")  # type: ignore[arg-type]


def test_nodes_can_be_added_until_slots_are_chosen() -> None:
    pool = DaskResourcePool([1])
    part = SubDaskResourcePool(pool, 0, 1)
    pool.add_node(1)
    assert len(pool.slots(make_machine(2))) == 2
    with pytest.raises(PlacementError, match="merge_resource_pool"):
        pool.add_node(1)
    with pytest.raises(PlacementError, match="cannot grow"):
        part.add_node(1)


def test_a_pickled_pool_is_the_same_pool() -> None:
    pool = DaskResourcePool([1, 1], client=threading.Lock())  # type: ignore[arg-type]
    hosts = make_machine(4)
    slots = pool.slots(hosts)
    left, right = split_resource_pool(pool, 1)
    copy, other = pickle.loads(pickle.dumps((pool, left)))
    assert (copy.pool_id, copy.client) == (pool.pool_id, None)
    assert copy.slots(hosts[::-1]) == slots
    # Even a mixture of originals and copies is one pool.
    assert addresses(merge_resource_pool(other, right).slots(hosts)) == addresses(slots)


def test_many_threads_get_the_same_slots() -> None:
    pool = DaskResourcePool([2, 2])
    parts = split_resource_pool(pool, 1)
    hosts = make_machine(8)
    barrier = threading.Barrier(8)
    out: list[tuple[int, list[str]]] = []

    def ask(i: int) -> None:
        barrier.wait(timeout=30)
        out.append((i, addresses(parts[i % 4].slots(hosts) if i < 4 else pool.slots(hosts))))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    everything = addresses(pool.slots(hosts))
    assert sorted(out) == [(i, [everything[i]] if i < 4 else everything) for i in range(8)]
