"""Which slots a pool gets, and what is said if it gets none."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_controller.errors import InsufficientResourcesError, PlacementError
from dask_controller.pool.hosts import Claim, HostInfo, Slot
from dask_controller.pool.placement import check_slots, choose_slots, explain_shortage, is_possible
from tests.pool.fake_hosts import addresses, make_host, make_machine, occupy

quick = settings(deadline=None, max_examples=100)


def choose(hosts: list[HostInfo], process_on_nodes: list[int], **options: Any) -> list[Slot]:
    settings = {
        "pool_id": "mine",
        "resource_name": "GPU",
        "slots_per_host": "one",
        "max_colocate_count": 10,
        **options,
    }
    return choose_slots(hosts, process_on_nodes, **settings)


def refuse(hosts: list[HostInfo], process_on_nodes: list[int], **options: Any) -> InsufficientResourcesError:
    with pytest.raises(InsufficientResourcesError) as caught:
        choose(hosts, process_on_nodes, **options)
    possible = is_possible(
        hosts,
        process_on_nodes,
        resource_name=options.get("resource_name", "GPU"),
        slots_per_host=options.get("slots_per_host", "one"),
    )
    assert caught.value.possible == possible  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.possible) == (str(caught.value), possible)
    assert caught.value.asked == sum(process_on_nodes)
    return caught.value


# ---------------------------------------------------------------------- the order of ranks


def test_ranks_go_by_machine_then_device() -> None:
    hosts = [
        make_host(7, "node2", devices=("1",)),
        make_host(8, "node2", devices=("0",)),
        make_host(1, "node10", devices=("0",)),
        make_host(2, "node10", devices=("1",)),
    ]
    slots = choose(hosts, [2, 2])
    assert addresses(slots) == ["tcp://node2:8", "tcp://node2:7", "tcp://node10:1", "tcp://node10:2"]
    assert [(s.node_rank, s.local_rank, s.local_world_size) for s in slots] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert {s.pool_id for s in slots} == {"mine"}
    assert [s.device for s in slots] == [0, 0, 0, 0]


def test_uneven_entries_keep_their_order_and_find_their_machines() -> None:
    slots = choose([*make_machine(1, "a"), *make_machine(2, "b")], [2, 1])
    assert addresses(slots) == ["tcp://b:0", "tcp://b:1", "tcp://a:0"]
    assert [(s.node_rank, s.local_rank, s.local_world_size) for s in slots] == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]


def test_entries_take_machines_of_their_own_if_there_are_enough() -> None:
    assert addresses(choose([*make_machine(4, "a"), *make_machine(4, "b")], [1, 1])) == ["tcp://a:0", "tcp://b:0"]


def test_entries_share_a_machine_if_there_are_too_few() -> None:
    slots = choose(make_machine(4), [2, 2])
    assert addresses(slots) == [f"tcp://node-a:{i}" for i in range(4)]
    assert [s.node_rank for s in slots] == [0, 0, 1, 1]


def test_a_small_pool_leaves_the_large_machine_whole() -> None:
    assert addresses(choose([*make_machine(4, "a"), *make_machine(1, "b")], [1])) == ["tcp://b:0"]


def test_ordinals_in_one_process_and_many() -> None:
    # Threads of one process see the same devices; so do the four workers of a SLURM job.
    assert [s.device for s in choose(make_machine(4, pid=1, device_count=4), [4])] == [0, 1, 2, 3]
    assert [s.device for s in choose(make_machine(4, devices=("0", "1", "2", "3")), [4])] == [0, 1, 2, 3]
    assert [s.device for s in choose(make_machine(2, device_count=4), [2], resource_name=None)] == [None, None]


hosts_strategy = st.lists(
    st.builds(
        make_host,
        st.integers(0, 99),
        st.sampled_from(["n1", "n2", "n10"]),
        gpu=st.sampled_from([0, 1, 2]),
        available=st.sampled_from([None, None, 0, 1]),
        devices=st.sampled_from([None, ("0",), ("1", "0"), ("0", "1"), ("GPU-a",), ()]),
        device_count=st.sampled_from([0, 2]),
        pid=st.integers(1, 4),
        claims=st.sampled_from([(), (), (), (Claim("other", "g", 0, 0),), (Claim("mine", "g", 0, 0),)]),
    ),
    max_size=7,
    unique_by=lambda host: host.address,
)
pools = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@quick
@given(hosts_strategy, pools, st.sampled_from(["GPU", None]), st.sampled_from(["one", "resource"]), st.randoms())
def test_the_order_in_which_hosts_come_means_nothing(
    hosts: list[HostInfo], sizes: list[int], resource_name: str | None, mode: str, rng: random.Random
) -> None:
    def outcome(hosts: list[HostInfo]) -> Any:
        try:
            return choose(hosts, sizes, resource_name=resource_name, slots_per_host=mode)
        except InsufficientResourcesError as error:
            return error.args, error.possible  # type: ignore[attr-defined]

    shuffled = list(hosts)
    rng.shuffle(shuffled)
    assert outcome(shuffled) == outcome(hosts)


@quick
@given(hosts_strategy, pools, st.sampled_from(["one", "resource"]))
def test_a_pool_is_placed_exactly_if_it_can_be(hosts: list[HostInfo], sizes: list[int], mode: str) -> None:
    """Against brute force over machines, with the free slots of each counted from the rules as they are written."""
    room: dict[str, int] = {}
    for host in hosts:
        claimed = any(h.claims and h.process == host.process for h in hosts)
        available = int(host.available.get("GPU", 0))
        if mode == "one":
            slots = int(available >= 1 and not claimed)
        else:
            own = any(c.pool_id == "mine" for c in host.claims)
            total = int(host.resources.get("GPU", 0))
            slots = min(total, min(available, total - (own and total > 0)) + (own and total > 0))
        room[host.node] = room.get(host.node, 0) + slots
    fits = any(
        all(sum(s for s, n in zip(sizes, where, strict=True) if n == node) <= room[node] for node in room)
        for where in itertools.product(room, repeat=len(sizes))
    )
    apart = any(
        all(size <= room[node] for size, node in zip(sizes, where, strict=True))
        for where in itertools.permutations(room, len(sizes))
    )
    try:
        chosen = choose(hosts, sizes, slots_per_host=mode)
    except InsufficientResourcesError as error:
        assert not fits
        assert error.present >= error.free >= 0
        return
    assert fits
    assert [s.local_world_size for s in chosen] == [size for size in sizes for _ in range(size)]
    assert len({(s.address, s.index) for s in chosen}) == len(chosen)
    nodes_of_entries = [{s.node for s in chosen if s.node_rank == i} for i in range(len(sizes))]
    assert all(len(nodes) == 1 for nodes in nodes_of_entries)
    if apart:
        assert len(set().union(*nodes_of_entries)) == len(sizes)
    if mode == "one":
        assert len({s.address for s in chosen}) == len(chosen)


# ---------------------------------------------------------------------- C2: pools that cannot be


def test_more_slots_than_there_are() -> None:
    error = refuse(make_machine(2), [3])
    assert (error.asked, error.present, error.free, error.held) == (3, 2, 2, {})
    assert "asks 3 GPU slots as [3]" in str(error)
    assert "the whole cluster has 2 GPU slot(s) (node-a has 2)" in str(error)
    assert not error.possible  # type: ignore[attr-defined]


def test_no_host_at_all() -> None:
    error = refuse([], [1])
    assert "no Dask workers" in str(error) and "wait_for_workers" in str(error)
    assert not error.possible  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("declared", "asked", "near"),
    [("gpu", "GPU", "gpu"), ("GPUs", "GPU", "GPUs"), ("NPU", "GPU", "NPU"), ("GPU", "Gpu", "GPU"), ("disk", "GPU", "")],
)
def test_a_resource_that_no_host_has(declared: str, asked: str, near: str) -> None:
    hosts = [make_host(i, resources={declared: 1.0}) for i in range(2)]
    error = refuse(hosts, [2], resource_name=asked)
    assert f"none of the 2 hosts declares the resource '{asked}'; they declare {declared}." in str(error)
    assert (f"Did you mean resource_name='{near}'?" in str(error)) == bool(near)
    assert f'--resources "{asked}=1"' in str(error)
    assert (error.present, error.free) == (0, 0)
    assert not error.possible  # type: ignore[attr-defined]


def test_hosts_that_declare_nothing() -> None:
    assert "they declare no resources at all" in str(refuse(make_machine(2, gpu=0), [1]))


def test_half_a_slot_is_no_slot() -> None:
    assert "no host declares a whole slot of 'GPU' (tcp://node-a:0 declares 0.5)" in str(
        refuse([make_host(0, gpu=0.5)], [1])
    )


def test_two_gpus_on_one_host_carry_one_inline_rank() -> None:
    hosts = [make_host(0, gpu=2, devices=("0", "1"))]
    text = str(refuse(hosts, [2]))
    assert "one Dask worker per GPU" in text and "declares GPU=2" in text
    slots = choose(hosts, [2], slots_per_host="resource")
    assert [(s.index, s.device) for s in slots] == [(0, 0), (1, 1)]


def test_an_entry_larger_than_any_machine() -> None:
    text = str(refuse([*make_machine(2, "a"), *make_machine(1, "b")], [3]))
    assert "entry 0 (3) is larger than any machine (a has 2, b has 1)" in text and "such as [2, 1]" in text


def test_entries_that_do_not_follow_the_machines() -> None:
    text = str(refuse([*make_machine(3, "a"), *make_machine(3, "b")], [2, 2, 2]))
    assert "cannot be arranged" in text and "a has 3, b has 3" in text


def test_more_inline_ranks_than_hosts() -> None:
    error = refuse(make_machine(2, gpu=0), [3], resource_name=None)
    assert "2 host(s) cannot carry them" in str(error) and "Start more Dask workers" in str(error)


# ---------------------------------------------------------------------- C1: slots that are held


def test_an_inline_host_carries_one_group() -> None:
    hosts = occupy(make_machine(2), choose(make_machine(2), [2], pool_id="theirs"), "actor")
    error = refuse(hosts, [2])
    assert (error.present, error.free) == (2, 0)
    assert error.held == {
        "tcp://node-a:0": "group 'actor' of pool 'theirs' (rank 0)",
        "tcp://node-a:1": "group 'actor' of pool 'theirs' (rank 1)",
    }
    for way_out in ("Close that group", "start more Dask workers", "create_colocated_worker_cls"):
        assert way_out in str(error)
    assert error.possible  # type: ignore[attr-defined]


def test_a_group_blocks_the_hosts_of_its_process() -> None:
    hosts = make_machine(2, gpu=0, pid=7)
    assert len(choose(hosts, [2], resource_name=None)) == 2
    hosts = occupy(hosts, choose(hosts, [1], resource_name=None, pool_id="theirs"), "actor", resource_name=None)
    error = refuse(hosts, [1], resource_name=None)
    assert error.held["tcp://node-a:1"] == (
        "group 'actor' of pool 'theirs' (rank 0 on tcp://node-a:0, in the same process)"
    )
    # The same process id on another machine is another process.
    elsewhere = make_host(0, "node-b", gpu=0, pid=7)
    assert addresses(choose([*hosts, elsewhere], [1], resource_name=None)) == [elsewhere.address]


def test_a_task_holds_a_slot() -> None:
    hosts = [make_host(0, available=0, holders={"task train-123": "GPU=1"}), make_host(1, available=0), make_host(2)]
    assert addresses(choose(hosts, [1])) == ["tcp://node-a:2"]
    error = refuse(hosts, [2])
    assert error.held["tcp://node-a:0"] == "task train-123 (GPU=1)"
    assert "0 of 1 GPU available" in error.held["tcp://node-a:1"]
    assert (error.asked, error.present, error.free) == (2, 3, 1)
    assert error.possible  # type: ignore[attr-defined]


def test_free_slots_that_lie_apart() -> None:
    hosts = [*make_machine(2, "a"), *make_machine(2, "b")]
    hosts = [h if h.address.endswith(":0") else make_host(1, h.node, available=0) for h in hosts]
    error = refuse(hosts, [2])
    assert "2 GPU slot(s) are free" in str(error) and "a has 1 free, b has 1 free" in str(error)
    assert error.possible  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the process executor


def test_groups_of_one_pool_share_a_slot_up_to_the_limit() -> None:
    hosts = make_machine(1)
    options = {"slots_per_host": "resource", "max_colocate_count": 2}
    for group in ("actor", "critic"):
        slots = choose(hosts, [1], **options)
        hosts = occupy(hosts, slots, group, executor="process")
    assert hosts[0].available["GPU"] == 0
    error = refuse(hosts, [1], **options)
    assert error.held == {"tcp://node-a:0": "groups actor, critic of this pool (max_colocate_count=2)"}
    assert refuse(hosts, [1], slots_per_host="resource", pool_id="theirs").held == {
        "tcp://node-a:0": "group 'actor' of pool 'mine', group 'critic' of pool 'mine'"
    }


def test_pools_take_different_slots_of_a_host() -> None:
    hosts = [make_host(0, gpu=2, device_count=2)]
    for number, pool_id in enumerate(["mine", "theirs"]):
        [slot] = choose(hosts, [1], slots_per_host="resource", pool_id=pool_id)
        assert (slot.index, slot.device) == (number, number)
        hosts = occupy(hosts, [slot], pool_id, executor="process")
    refuse(hosts, [1], slots_per_host="resource", pool_id="third")


def test_a_group_without_accelerator_takes_no_gpu_slot() -> None:
    # Slot numbers of pools without accelerator mean nothing to those with one.
    hosts = occupy(
        [make_host(0, device_count=1)], [Slot("tcp://node-a:0", "node-a", "cpu", 0, 0, 1)], "data", resource_name=None
    )
    assert len(choose(hosts, [1], slots_per_host="resource")) == 1
    two = [make_host(0, gpu=2, available=1, device_count=2)]
    two = occupy(two, [Slot("tcp://node-a:0", "node-a", "gpu", 0, 0, 1, 0, 0)], "train", resource_name=None)
    two = occupy(two, [Slot("tcp://node-a:0", "node-a", "cpu", 0, 0, 1, 1)], "data", resource_name=None)
    assert [(s.index, s.device) for s in choose(two, [1], slots_per_host="resource")] == [(1, 1)]


def test_ranks_without_accelerator_spread_evenly() -> None:
    options = {"resource_name": None, "slots_per_host": "resource"}
    slots = choose(make_machine(2, gpu=0), [5], **options)
    assert [(s.address, s.index) for s in slots] == [
        ("tcp://node-a:0", 0),
        ("tcp://node-a:0", 1),
        ("tcp://node-a:0", 2),
        ("tcp://node-a:1", 0),
        ("tcp://node-a:1", 1),
    ]
    slots = choose([*make_machine(1, "a", gpu=0), *make_machine(1, "b", gpu=0)], [2, 2, 2, 2], **options)
    assert [s.node for s in slots] == ["a"] * 4 + ["b"] * 4
    assert [s.index for s in slots] == [0, 1, 2, 3] * 2
    refuse([], [1], **options)


def test_idle_hosts_come_first() -> None:
    options = {"resource_name": None, "slots_per_host": "resource"}
    hosts = make_machine(3, gpu=0)
    hosts = occupy(hosts, choose(hosts, [1], **options), "one", resource_name=None)
    assert addresses(choose(hosts, [2], **options)) == ["tcp://node-a:1", "tcp://node-a:2"]


def test_pools_without_accelerator_leave_gpu_hosts_alone_if_they_can() -> None:
    hosts = [make_host(0), make_host(1, gpu=0), make_host(2, gpu=0)]
    assert addresses(choose(hosts, [2], resource_name=None)) == ["tcp://node-a:1", "tcp://node-a:2"]
    assert len(choose(hosts, [3], resource_name=None)) == 3


# ---------------------------------------------------------------------- slots chosen earlier


def check(hosts: list[HostInfo], slots: list[Slot], **options: Any) -> None:
    settings = {"resource_name": "GPU", "slots_per_host": "resource", "max_colocate_count": 2, **options}
    check_slots(hosts, slots, **settings)


def test_slots_of_a_host_that_left() -> None:
    hosts = make_machine(2)
    slots = choose(hosts, [2])
    check(hosts, slots)
    with pytest.raises(PlacementError, match="tcp://node-a:1 left the cluster, and pool 'mine'") as caught:
        check(hosts[:1], slots)
    assert not isinstance(caught.value, InsufficientResourcesError)


def test_a_slot_that_somebody_else_took() -> None:
    hosts = make_machine(1)
    slots = choose(hosts, [1])
    with pytest.raises(InsufficientResourcesError, match="group 'x' of pool 'theirs'"):
        check(occupy(hosts, choose(hosts, [1], pool_id="theirs"), "x"), slots)
    with pytest.raises(InsufficientResourcesError, match="GPU of pool 'mine' is taken"):
        check(hosts, slots, reserved={("tcp://node-a:0", 0)})
    with pytest.raises(InsufficientResourcesError, match="another part of the same request"):
        check(hosts, slots, reserved={("tcp://node-a:0", 0)}, slots_per_host="one")


def test_a_slot_that_another_pool_sits_on_is_not_offered_twice() -> None:
    hosts = [make_host(0, gpu=2)]
    mine = choose(hosts, [1], slots_per_host="resource")
    hosts = occupy(hosts, choose(hosts, [1], slots_per_host="resource", pool_id="theirs"), "x", executor="process")
    # One is available, but it is not the one that we had chosen.
    with pytest.raises(InsufficientResourcesError, match="group 'x' of pool 'theirs'"):
        check(hosts, mine)
    check(hosts, choose(hosts, [1], slots_per_host="resource"))


def test_reserved_slots_count_before_anybody_sits_there() -> None:
    hosts = [make_host(0, gpu=2, available=1)]
    options = {"slots_per_host": "resource", "reserved": [("tcp://node-a:0", 0)]}
    with pytest.raises(InsufficientResourcesError) as caught:
        choose(hosts, [1], **options)
    assert caught.value.held == {"tcp://node-a:0": "another part of the same request"}
    hosts = occupy([make_host(0, gpu=2)], choose(hosts, [1], slots_per_host="resource", pool_id="theirs"), "x")
    assert [slot.index for slot in choose(hosts, [1], **options)] == [1]


def test_several_slots_of_a_host_are_not_for_inline_ranks() -> None:
    hosts = [make_host(0, gpu=2)]
    slots = choose(hosts, [2], slots_per_host="resource")
    check(hosts, slots)
    with pytest.raises(InsufficientResourcesError, match="several slots on one host"):
        check(hosts, slots, slots_per_host="one")


def test_shortages_can_be_explained_without_choosing() -> None:
    error = explain_shortage(
        make_machine(1), [2], pool_id="p", resource_name="GPU", slots_per_host="one", max_colocate_count=1
    )
    assert (error.asked, error.present) == (2, 1)


def test_hundreds_of_hosts() -> None:
    hosts = [make_host(i, f"n{node}", device_count=8) for node in range(64) for i in range(8)]
    random.Random(0).shuffle(hosts)
    slots = choose(hosts, [8] * 64)
    assert [s.node for s in slots] == [f"n{node}" for node in range(64) for _ in range(8)]
    assert [s.device for s in slots] == list(range(8)) * 64
    assert refuse(hosts, [8] * 65).present == 512
