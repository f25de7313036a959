"""The order of machines and hosts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dask_controller.pool.hosts import hosts_by_node, natural_key, slot_count
from tests.pool.fake_hosts import make_host

quick = settings(deadline=None, max_examples=60)


def test_numbers_in_names_count_as_numbers() -> None:
    names = ["gpu-node10", "gpu-node9", "gpu-node", "tcp://10.0.0.10:80", "tcp://10.0.0.9:80", "1"]
    assert sorted(names, key=natural_key) == [
        "1",
        "gpu-node",
        "gpu-node9",
        "gpu-node10",
        "tcp://10.0.0.9:80",
        "tcp://10.0.0.10:80",
    ]


@quick
@given(st.lists(st.text(max_size=8), unique=True))
def test_natural_order_is_total(names: list[str]) -> None:
    assert len({natural_key(name) for name in names}) == len(names)


def test_hosts_of_a_machine_go_by_device_then_name_then_address() -> None:
    by_device = [make_host(i, devices=(mask,), name=f"w{9 - i}") for i, mask in enumerate(["10", "2", "0"])]
    unmasked = [make_host(20, name="w10"), make_host(21, name="w2")]
    uuid = make_host(22, name="w1", devices=("GPU-8932f937",))
    same_name = [make_host(30, name="w3", address="tcp://b:1"), make_host(31, name="w3", address="tcp://a:1")]
    ordered = hosts_by_node([*same_name, uuid, *unmasked, *by_device])["node-a"]
    assert [(h.name, h.address) for h in ordered] == [
        (h.name, h.address) for h in [*reversed(by_device), uuid, unmasked[1], *reversed(same_name), unmasked[0]]
    ]


def test_machines_go_in_natural_order() -> None:
    assert list(hosts_by_node([make_host(0, f"node{i}") for i in (10, 2, 1)])) == ["node1", "node2", "node10"]


def test_a_slot_is_a_whole_unit() -> None:
    assert slot_count(make_host(0, gpu=1.999), "GPU") == 1
    assert slot_count(make_host(0, gpu=0.99999999), "GPU") == 1
    assert slot_count(make_host(0, gpu=0.5), "GPU") == 0
    assert slot_count(make_host(0, gpu=0), "GPU") == 0
    assert slot_count(make_host(0, gpu=0), None) == 1
