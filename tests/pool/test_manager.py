"""Pools by role, and whether all of them fit."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from dask_controller.errors import InsufficientResourcesError, PlacementError
from dask_controller.pool.manager import ResourcePoolManager
from dask_controller.pool.pool import DaskResourcePool
from tests.pool.fake_hosts import addresses, make_host, make_machine, occupy


class Role(Enum):
    ACTOR = 1
    CRITIC = 2
    ROLLOUT = 3


def make_manager(**options: Any) -> ResourcePoolManager:
    spec = {"train_pool": [2, 2], "rollout_pool": [2]}
    mapping = {Role.ACTOR: "train_pool", Role.CRITIC: "train_pool", "rollout": "rollout_pool"}
    return ResourcePoolManager(**{"resource_pool_spec": spec, "mapping": mapping, **options})


def three_machines() -> list[Any]:
    return [host for node in "abc" for host in make_machine(2, node)]


def test_roles_find_their_pools() -> None:
    manager = make_manager()
    manager.create_resource_pool()
    train = manager.get_resource_pool(Role.ACTOR)
    assert train is manager.get_resource_pool(Role.CRITIC) is manager.resource_pool_dict["train_pool"]
    assert (train.store, train.name_prefix, train.max_colocate_count) == ([2, 2], "train_pool", 3)
    assert manager.get_resource_pool("rollout").store == [2]
    assert manager.get_n_gpus() == 6


def test_settings_reach_every_pool() -> None:
    client: Any = object()
    manager = make_manager(max_colocate_count=5, use_gpu=False, resource_name="NPU", detached=True, client=client)
    manager.create_resource_pool()
    for pool in manager.resource_pool_dict.values():
        assert (pool.max_colocate_count, pool.use_gpu, pool.resource_name, pool.detached) == (5, False, "NPU", True)
        assert pool.client is client


def test_pools_that_exist_are_kept() -> None:
    mine = DaskResourcePool([8])
    manager = make_manager(resource_pool_dict={"rollout_pool": mine})
    manager.create_resource_pool()
    train = manager.get_resource_pool(Role.ACTOR)
    manager.create_resource_pool()
    assert manager.get_resource_pool("rollout") is mine
    assert manager.get_resource_pool(Role.ACTOR) is train


def test_unknown_roles_and_pools() -> None:
    manager = make_manager()
    with pytest.raises(PlacementError, match=r"pool 'train_pool' of role <Role.ACTOR: 1> is not made yet"):
        manager.get_resource_pool(Role.ACTOR)
    manager.create_resource_pool()
    with pytest.raises(PlacementError, match="role 'rolout'; mapping has .*did you mean 'rollout'"):
        manager.get_resource_pool("rolout")
    with pytest.raises(PlacementError, match="did you mean <Role.ACTOR: 1>"):
        manager.get_resource_pool("actor")
    with pytest.raises(PlacementError, match="did you mean <Role.CRITIC: 2>"):
        manager.get_resource_pool("CRITIC")
    with pytest.raises(PlacementError, match="role <Role.ROLLOUT: 3>.*did you mean 'rollout'"):
        manager.get_resource_pool(Role.ROLLOUT)
    manager.mapping["ref"] = "trian_pool"
    for act in (manager.create_resource_pool, lambda: manager.get_resource_pool("ref")):
        with pytest.raises(
            PlacementError, match="role 'ref' is mapped to pool 'trian_pool'.*did you mean 'train_pool'"
        ):
            act()


def test_the_check_names_asked_present_and_holder() -> None:
    manager = make_manager()
    hosts = three_machines()
    manager.check(hosts)
    hosts[3] = make_host(1, "b", available=0, holders={"task preprocess-7": "GPU=1"})
    with pytest.raises(InsufficientResourcesError) as caught:
        manager.check(hosts)
    error = caught.value
    assert (error.asked, error.present, error.free) == (6, 6, 5)
    assert error.held == {"tcp://b:1": "task preprocess-7 (GPU=1)"}
    assert "train_pool [2, 2], rollout_pool [2]" in str(error)
    assert error.possible  # type: ignore[attr-defined]
    with pytest.raises(InsufficientResourcesError, match="whole cluster has 4") as caught:
        manager.check(hosts[:4])
    assert not caught.value.possible  # type: ignore[attr-defined]
    assert manager.resource_pool_dict == {}


def test_pools_with_live_groups_need_no_more_room() -> None:
    manager = make_manager()
    hosts = three_machines()
    manager.create_resource_pool()
    hosts = occupy(hosts, manager.get_resource_pool(Role.ACTOR).slots(hosts), "actor")
    manager.check(hosts)
    other = make_manager()
    with pytest.raises(InsufficientResourcesError) as caught:
        other.check(hosts)
    assert caught.value.free == 2 and len(caught.value.held) == 4


def test_pools_made_with_hosts_choose_together() -> None:
    # By itself, the first pool would take a host on each machine and leave no room for the second.
    hosts = [*make_machine(2, "a"), *make_machine(2, "b")]
    spec = {"small": [1, 1], "large": [2]}
    asked = []

    def probe() -> list[Any]:
        asked.append(1)
        return hosts

    for manager, given in (
        (ResourcePoolManager(spec, {}), hosts),
        (ResourcePoolManager(spec, {}, probe=probe), None),
    ):
        manager.create_resource_pool(given)
        small = addresses(manager.resource_pool_dict["small"].slots(hosts))
        large = addresses(manager.resource_pool_dict["large"].slots(hosts))
        assert sorted(small + large) == ["tcp://a:0", "tcp://a:1", "tcp://b:0", "tcp://b:1"]
    assert asked == [1]


def test_no_pool_is_made_if_they_do_not_all_fit() -> None:
    manager = make_manager()
    with pytest.raises(InsufficientResourcesError, match=r"do not fit .*together \(train_pool \[2, 2\], rollout_pool"):
        manager.create_resource_pool(three_machines()[:5])
    assert manager.resource_pool_dict == {}


def test_the_check_follows_the_executor() -> None:
    hosts = [make_host(0, gpu=6)]
    with pytest.raises(InsufficientResourcesError, match="one Dask worker per GPU"):
        make_manager().check(hosts)
    make_manager(slots_per_host="resource").check(hosts)
    make_manager(slots_per_host="resource", use_gpu=False).check([make_host(0, gpu=0)])


def test_a_manager_without_pools() -> None:
    manager = ResourcePoolManager({}, {})
    manager.create_resource_pool([])
    manager.check([])
    assert manager.get_n_gpus() == 0
    with pytest.raises(PlacementError, match="mapping has no roles"):
        manager.get_resource_pool("actor")
    with pytest.raises(PlacementError, match="it has no pools"):
        ResourcePoolManager({}, {"actor": "pool"}).create_resource_pool()
