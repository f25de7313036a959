"""Parts of pools, joined pools, and parts out of the pools of roles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_controller.errors import InsufficientResourcesError, PlacementError
from dask_controller.pool.pool import DaskResourcePool, ResourcePool, SubDaskResourcePool
from dask_controller.pool.split import extract_from_existing, merge_resource_pool, split_resource_pool
from tests.pool.fake_hosts import addresses, make_host, make_machine, occupy

quick = settings(deadline=None, max_examples=60)


def layout(pool: DaskResourcePool, hosts: list[Any], mode: Any = "one") -> list[tuple[str, int, int, int]]:
    return [(s.address, s.node_rank, s.local_rank, s.local_world_size) for s in pool.slots(hosts, mode)]


def test_parts_of_uneven_nodes() -> None:
    pool = DaskResourcePool([2, 1], name_prefix="train")
    hosts = [*make_machine(2, "a"), *make_machine(1, "b")]
    first, second = split_resource_pool(pool, [1, 2])
    assert (first.store, second.store) == ([1], [1, 1])
    assert layout(first, hosts) == [("tcp://a:0", 0, 0, 1)]
    assert layout(second, hosts) == [("tcp://a:1", 0, 0, 1), ("tcp://b:0", 1, 0, 1)]
    assert second.local_rank_list() == [0, 0] and second.local_world_size_list() == [1, 1]
    assert first.pool_id == second.pool_id == pool.pool_id
    assert (second.start_bundle_index, second.subgroup_world_size, second.world_size) == (1, 2, 2)
    assert repr(second) == "<dask_controller.SubDaskResourcePool 'train_split_1': [1, 1], resource 'GPU'>"


def test_parts_keep_the_settings_of_the_whole() -> None:
    client: Any = object()
    pool = DaskResourcePool([4], False, "p", 3, True, "NPU", client, n_gpus_per_node=16)
    for part in split_resource_pool(pool, 2):
        assert isinstance(part, SubDaskResourcePool)
        for name in ("use_gpu", "max_colocate_count", "detached", "resource_name", "client", "n_gpus_per_node"):
            assert getattr(part, name) == getattr(pool, name)


def test_parts_can_be_split_again() -> None:
    pool = DaskResourcePool([2, 2, 2])
    hosts = make_machine(6)
    _, middle, _ = split_resource_pool(pool, [1, 4, 1])
    assert middle.store == [1, 2, 1]
    parts = split_resource_pool(middle, 1)
    assert [part.start_bundle_index for part in parts] == [1, 2, 3, 4]
    assert [addresses(part.slots(hosts))[0] for part in parts] == addresses(middle.slots(hosts))
    assert addresses(middle.slots(hosts)) == addresses(pool.slots(hosts))[1:5]


def test_groups_on_different_parts_do_not_meet() -> None:
    pool = DaskResourcePool([4], max_colocate_count=1)
    hosts = make_machine(5)
    left, right = split_resource_pool(pool, 2)
    hosts = occupy(hosts, left.slots(hosts), "left")
    hosts = occupy(hosts, right.slots(hosts), "right")
    assert [len(host.claims) for host in hosts] == [1, 1, 1, 1, 0]
    for part, group in ((left, "left"), (right, "right")):
        with pytest.raises(InsufficientResourcesError, match="live group") as caught:
            part.slots(hosts)
        assert all(group in who for who in caught.value.held.values())
        with pytest.raises(InsufficientResourcesError, match="max_colocate_count=1"):
            part.slots(hosts, "resource")


def test_a_part_does_not_care_for_hosts_of_the_others() -> None:
    pool = DaskResourcePool([2])
    hosts = make_machine(3)
    left, right = split_resource_pool(pool, 1)
    hosts = occupy(hosts, left.slots(hosts), "left")
    # The right part's host dies: its rebuild must wait for the left one; the left one's is none of its business.
    with pytest.raises(PlacementError, match="tcp://node-a:1 left"):
        right.slots([hosts[0], hosts[2]])
    assert addresses(left.slots([hosts[0], hosts[2]], "resource")) == ["tcp://node-a:0"]


@quick
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_parts_joined_are_the_whole(sizes: list[int], data: st.DataObject) -> None:
    pool = DaskResourcePool(sizes)
    cuts = data.draw(st.sets(st.integers(1, pool.world_size), max_size=4).map(sorted))
    bounds = [0, *[cut for cut in cuts if cut < pool.world_size], pool.world_size]
    parts = split_resource_pool(pool, [b - a for a, b in zip(bounds, bounds[1:], strict=False)])
    hosts = [host for node in range(len(sizes)) for host in make_machine(4, f"n{node}")]
    whole = pool.slots(hosts)
    assert [a for part in parts for a in addresses(part.slots(hosts))] == addresses(whole)
    # Every part is numbered as torchrun would: by node, with each node's own count.
    for part in parts:
        slots = part.slots(hosts)
        assert [s.local_rank for s in slots] == part.local_rank_list()
        assert [s.local_world_size for s in slots] == part.local_world_size_list()
        assert len({s.node_rank for s in slots}) == len(part.store)
    merged: DaskResourcePool = parts[0]
    for part in parts[1:]:
        merged = merge_resource_pool(merged, part)
    assert addresses(merged.slots(hosts)) == addresses(whole)
    assert {s.pool_id for s in merged.slots(hosts)} == {pool.pool_id}


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [
        (2, ValueError, "split_size 2 does not divide the 3 ranks"),
        (0, ValueError, "split_size must be at least 1"),
        (True, TypeError, "must be an int, got bool"),
        ("12", TypeError, "must be an int, got str"),
        ([1, 1], ValueError, r"\[1, 1\] sums to 2, but .* has 3 ranks"),
        ([3, 0], ValueError, r"split_size\[1\] must be at least 1"),
        ([], ValueError, "sums to 0"),
    ],
)
def test_sizes_that_do_not_fit(size: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        split_resource_pool(DaskResourcePool([2, 1]), size)


def test_parts_beyond_the_pool() -> None:
    with pytest.raises(ValueError, match="ranks 2 to 3 are not all in"):
        SubDaskResourcePool(DaskResourcePool([3]), 2, 2)
    with pytest.raises(ValueError, match="does not divide the 0 ranks"):
        split_resource_pool(DaskResourcePool(), 1)


# ---------------------------------------------------------------------- merge


def test_merged_pools_use_the_slots_of_both() -> None:
    reward, ref = DaskResourcePool([2], name_prefix="reward"), DaskResourcePool([1, 1], name_prefix="ref")
    hosts = [*make_machine(2, "a"), *make_machine(2, "b")]
    merged = merge_resource_pool(reward, ref)
    assert (merged.store, merged.name_prefix) == ([2, 1, 1], "reward_ref")
    slots = merged.slots(hosts)
    assert [s.pool_id for s in slots] == [reward.pool_id] * 2 + [ref.pool_id] * 2
    assert [(s.node_rank, s.local_rank, s.local_world_size) for s in slots] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 1),
        (2, 0, 1),
    ]
    # Device order: the first pool's ranks, then the second's, on the slots that each pool has by itself.
    assert addresses(slots) == addresses(reward.slots(hosts)) + addresses(ref.slots(hosts))
    assert len(set(addresses(slots))) == 4
    first, second = split_resource_pool(merged, 2)
    assert (first.pool_id, second.pool_id) == (reward.pool_id, ref.pool_id)
    across = split_resource_pool(merged, [1, 3])[1]
    assert across.pool_id not in (reward.pool_id, ref.pool_id)
    assert addresses(across.slots(hosts)) == addresses(slots)[1:]


def test_merged_pools_choose_together() -> None:
    # One after the other, [1, 1] would take a host on each machine and leave no room for [2].
    hosts = [*make_machine(2, "a"), *make_machine(2, "b")]
    slots = merge_resource_pool(DaskResourcePool([1, 1]), DaskResourcePool([2])).slots(hosts)
    assert addresses(slots) == ["tcp://a:0", "tcp://a:1", "tcp://b:0", "tcp://b:1"]


def test_pools_that_chose_the_same_slot_part_when_merged() -> None:
    hosts = make_machine(2)
    one, two = DaskResourcePool([1]), DaskResourcePool([1])
    assert addresses(one.slots(hosts)) == addresses(two.slots(hosts))
    assert addresses(merge_resource_pool(one, two).slots(hosts)) == ["tcp://node-a:0", "tcp://node-a:1"]


def test_a_merged_pool_keeps_slots_that_are_in_use() -> None:
    hosts = [make_host(i, gpu=2) for i in range(2)]
    one, two = DaskResourcePool([1]), DaskResourcePool([2])
    hosts = occupy(hosts, one.slots(hosts, "resource"), "first", executor="process")
    slots = merge_resource_pool(two, one).slots(hosts, "resource")
    assert [(s.address, s.index) for s in slots] == [
        ("tcp://node-a:0", 1),
        ("tcp://node-a:1", 0),
        ("tcp://node-a:0", 0),
    ]


def test_ranks_without_accelerator_can_be_merged() -> None:
    hosts = make_machine(2, gpu=0)
    one, two = DaskResourcePool([2], use_gpu=False), DaskResourcePool([2], use_gpu=False)
    merged = merge_resource_pool(one, two)
    assert [(s.address, s.index) for s in merged.slots(hosts, "resource")] == [
        ("tcp://node-a:0", 0),
        ("tcp://node-a:0", 1),
        ("tcp://node-a:1", 0),
        ("tcp://node-a:1", 1),
    ]
    with pytest.raises(InsufficientResourcesError, match="4 hosts"):
        merged.slots(hosts)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"use_gpu": False}, "use_gpu is True in one and False"),
        ({"resource_name": "NPU"}, "resource_name is 'GPU' in one and 'NPU'"),
        ({"max_colocate_count": 2}, "max_colocate_count is 10 in one and 2"),
        ({"detached": True}, "detached is False in one and True"),
        ({"n_gpus_per_node": 4}, "n_gpus_per_node is 8 in one and 4"),
        ({"client": object()}, "different clients"),
    ],
)
def test_pools_of_different_kinds_do_not_merge(settings: dict[str, Any], name: str) -> None:
    client: Any = object()
    with pytest.raises(PlacementError, match=name):
        merge_resource_pool(DaskResourcePool([1], client=client), DaskResourcePool([1], **settings))


def test_pools_that_overlap_do_not_merge() -> None:
    pool = DaskResourcePool([4])
    left, right = split_resource_pool(pool, 2)
    for other in (pool, left, merge_resource_pool(right, left)):
        with pytest.raises(PlacementError, match=r"share 2 slot\(s\) \(ranks 0 of"):
            merge_resource_pool(left, other)
    with pytest.raises(PlacementError, match="no ranks"):
        merge_resource_pool(left, DaskResourcePool())
    assert merge_resource_pool(right, left).store == [2, 2]


# ---------------------------------------------------------------------- extract


def test_parts_out_of_the_pools_of_roles() -> None:
    hosts = [*make_machine(2, "a"), *make_machine(4, "b"), *make_machine(1, "c")]
    pools = {"actor": DaskResourcePool([2, 4]), "critic": DaskResourcePool([1]), "ref": DaskResourcePool([1])}
    pools["actor"].slots(hosts)
    first, second = extract_from_existing(pools, ["actor", "critic"], DaskResourcePool([1, 3], name_prefix="rollout"))
    # The tightest node that has room.
    assert (first.parent, first.start_bundle_index, first.store) == (pools["critic"], 0, [1])
    assert (second.parent, second.start_bundle_index, second.store) == (pools["actor"], 2, [3])
    assert (first.name_prefix, second.name_prefix) == ("rollout_0", "rollout_1")
    assert addresses(second.slots(hosts)) == ["tcp://b:0", "tcp://b:1", "tcp://b:2"]


def test_a_pool_that_roles_share_counts_once() -> None:
    pool = DaskResourcePool([2])
    pools = {"actor": pool, "critic": pool}
    parts = extract_from_existing(pools, ["actor", "critic"], ResourcePool([1, 1]))
    assert [part.start_bundle_index for part in parts] == [0, 1]
    with pytest.raises(PlacementError, match=r"cannot take \[2, 1\].*\[2\] slots \(2 in all, 3 asked\)"):
        extract_from_existing(pools, ["actor", "critic"], ResourcePool([2, 1]))


def test_what_is_missing_is_named() -> None:
    pools = {"actor": DaskResourcePool([2]), "critic": DaskResourcePool([2])}
    with pytest.raises(
        PlacementError, match="role 'Actor'; there are pools for 'actor', 'critic'; did you mean 'actor'"
    ):
        extract_from_existing(pools, ["Actor"], ResourcePool([1]))
    with pytest.raises(PlacementError, match=r"cannot take \[3\] out of the pools of 'actor', 'critic'"):
        extract_from_existing(pools, ["actor", "critic"], ResourcePool([3]))
    with pytest.raises(PlacementError, match="different kinds of slot"):
        extract_from_existing(pools, ["actor"], DaskResourcePool([1], use_gpu=False))
    with pytest.raises(PlacementError, match="cannot take nothing"):
        extract_from_existing(pools, ["actor"], ResourcePool())
    with pytest.raises(TypeError, match="list of role names"):
        extract_from_existing(pools, "actor", ResourcePool([1]))
