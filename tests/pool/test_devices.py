"""Which device each slot of a machine gets. No accelerator is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_controller
from dask_controller.errors import PlacementError
from dask_controller.pool.devices import (
    assign_device,
    assign_devices,
    get_device,
    parse_mask,
    visible_devices,
    visible_devices_variable,
)
from dask_controller.pool.hosts import Claim, HostInfo, hosts_by_node
from tests.pool.fake_hosts import make_host

quick = settings(deadline=None, max_examples=200)


def machine(*masks: str | None, device_count: int = 0, gpu: float = 1.0) -> list[HostInfo]:
    hosts = [make_host(i, devices=parse_mask(m), device_count=device_count, gpu=gpu) for i, m in enumerate(masks)]
    return hosts_by_node(hosts)["node-a"]


def ordinals(hosts: list[HostInfo]) -> dict[str, int | None]:
    """Ordinal by host number, asked slot by slot and all at once."""
    together = assign_devices(hosts, "GPU")
    one_by_one = {(host.address, 0): assign_device(hosts, host, 0, "GPU") for host in hosts}
    assert {key: value for key, value in together.items() if key[1] == 0} == one_by_one
    return {address.rpartition(":")[2]: ordinal for (address, _), ordinal in one_by_one.items()}


def physical(hosts: list[HostInfo]) -> list[str]:
    """The physical device of each slot."""
    by_address = {host.address: host for host in hosts}
    return [
        visible_devices(by_address[address])[ordinal]
        for (address, _), ordinal in assign_devices(hosts, "GPU").items()
        if ordinal is not None
    ]


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (None, None),
        ("", ()),
        ("  ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("none", ()),
        ("3", ("3",)),
        (" 3, 0,1 ", ("3", "0", "1")),
        ("0,-1,2", ("0",)),
        ("0,,2", ("0",)),
        ("1,", ("1",)),
        ("GPU-8932f937-d72c,MIG-3f1a", ("GPU-8932f937-d72c", "MIG-3f1a")),
    ],
)
def test_masks_are_read_as_cuda_reads_them(value: str | None, entries: tuple[str, ...] | None) -> None:
    assert parse_mask(value) == entries


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        pytest.param(["3"], [0], id="one entry"),
        pytest.param(["0", "1", "2", "3"], [0, 0, 0, 0], id="one entry each"),
        pytest.param(["3,0,1,2", "0,1,2,3", "1,2,3,0", "2,3,0,1"], [0, 0, 0, 0], id="dask-cuda rotation"),
        pytest.param(["0,1,2,3"] * 4, [0, 1, 2, 3], id="SLURM: all see all"),
        pytest.param(["0,1", "1,0"], [0, 0], id="swapped"),
        pytest.param(["0,1", "0,2"], [0, 1], id="overlap"),
        pytest.param(["0,1", "0"], [1, 0], id="the first must give way"),
        pytest.param(["0,1", "1,2", "0"], [1, 1, 0], id="a chain gives way"),
        pytest.param(["GPU-aa", "GPU-bb"], [0, 0], id="uuid"),
        pytest.param(["GPU-aa,GPU-bb", "GPU-bb,GPU-aa"], [0, 0], id="uuid rotation"),
        pytest.param(["GPU-aa,GPU-bb"] * 2, [0, 1], id="uuid, all see all"),
        pytest.param(["MIG-1", "MIG-2"], [0, 0], id="MIG"),
        pytest.param(["", "1"], [None, 0], id="one without"),
        pytest.param(["", ""], [None, None], id="masks that hide all"),
        pytest.param([None, None], [None, None], id="no device, no mask"),
        pytest.param(["00", "0,1"], [0, 1], id="leading zeros"),
    ],
)
def test_masks(masks: list[str | None], expected: list[int | None]) -> None:
    hosts = machine(*masks)
    assert ordinals(hosts) == {str(i): ordinal for i, ordinal in enumerate(expected)}


def test_without_masks_the_ith_host_gets_device_i() -> None:
    assert ordinals(machine(None, None, None, device_count=4)) == {"0": 0, "1": 1, "2": 2}


def test_what_torch_does_not_see_is_not_used() -> None:
    # Two names in the mask, but the second device does not exist.
    hosts = machine("0,7", "0,7", device_count=1)
    assert ordinals(hosts) == {"0": 0, "1": 0}


def test_several_slots_of_a_host_use_several_devices() -> None:
    [host] = machine("4,5,6", gpu=3)
    assert assign_devices([host], "GPU") == {(host.address, i): i for i in range(3)}
    assert assign_device([host], host, 2) == 2


def test_two_hosts_that_see_all_devices_take_a_share_each() -> None:
    hosts = machine(None, None, device_count=4, gpu=2)
    assert list(assign_devices(hosts, "GPU").values()) == [0, 1, 2, 3]


def test_slots_share_only_if_the_machine_declares_more_than_it_has() -> None:
    hosts = machine("0,1", "0,1", "0,1")
    assert list(assign_devices(hosts, "GPU").values()) == [0, 1, 0]
    [host] = machine("5", gpu=2)
    assert list(assign_devices([host], "GPU").values()) == [0, 0]


def test_hosts_without_the_resource_take_no_device_from_others() -> None:
    cpu = make_host(0, gpu=0, device_count=2)
    gpu = [make_host(i, device_count=2) for i in (1, 2)]
    assert assign_devices([cpu, *gpu], "GPU") == {(gpu[0].address, 0): 0, (gpu[1].address, 0): 1}


def test_devices_in_use_stay_where_they_are() -> None:
    # The second host was alone when its group started, and took device 0.
    new = make_host(0, device_count=2)
    old = make_host(1, device_count=2, claims=(Claim("P", "actor", 0, 0, device=0),))
    assert assign_devices([new, old], "GPU") == {(new.address, 0): 1, (old.address, 0): 0}


masks = st.lists(st.sampled_from("0123"), min_size=1, max_size=4, unique=True).map(",".join)


@quick
@given(st.lists(masks, min_size=1, max_size=4))
def test_no_device_is_shared_by_accident(values: list[str]) -> None:
    hosts = machine(*values)
    used = physical(hosts)
    assert len(used) == len(hosts)
    # Every device that can be in use at once is: brute force over one choice per host.
    best: set[frozenset[str]] = {frozenset()}
    for value in values:
        best = {chosen | {device} for chosen in best for device in value.split(",")}
    assert len(set(used)) == max(map(len, best))


def test_variables_of_the_backends() -> None:
    assert visible_devices_variable() == "CUDA_VISIBLE_DEVICES"
    assert visible_devices_variable("npu") == "ASCEND_RT_VISIBLE_DEVICES"
    assert visible_devices_variable("hip") == "HIP_VISIBLE_DEVICES"
    assert visible_devices_variable("xpu") == "ZE_AFFINITY_MASK"
    with pytest.raises(ValueError, match="'Cuda', expected one of cuda, .*did you mean 'cuda'"):
        visible_devices_variable("Cuda")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_the_ordinal_names_the_device() -> None:
    assert get_device(1) == torch.device("cuda", 1)
    assert get_device(None) == torch.device("cpu")
    with pytest.raises(PlacementError, match=r"device 2 .* sees 2 device\(s\).*CUDA_VISIBLE_DEVICES"):
        get_device(2)
    with pytest.raises(PlacementError, match="device -1"):
        get_device(-1)


def test_without_cuda_every_rank_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device(0) == get_device(None) == torch.device("cpu")


def test_pools_need_neither_torch_nor_a_cluster() -> None:
    # Without the package's own __init__, which imports everything.
    code = (
        "import sys, types; package = types.ModuleType('dask_controller'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['dask_controller'] = package; from dask_controller.pool import devices, manager, split; "
        "print(*({'torch', 'distributed', 'dask', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(Path(dask_controller.__file__).parent)]
    assert subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout == "\n"
