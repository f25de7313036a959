"""Files: whole or not there, read without running code, and what needs pickle says so."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dask_controller.errors import UnsupportedTypeError, WireFormatError
from dask_controller.protocol import DataProto, disk
from tests.protocol.batches import assert_same_batch, fingerprint, zoo


@pytest.mark.parametrize("rows", [0, 1, 5, 600])
def test_everything_comes_back_without_pickle(tmp_path: Path, rows: int) -> None:
    dp = zoo(rows)
    dp.meta_info |= {
        "tuple": (1, [2.5, None], b"bytes"), "set": {1, 2}, "complex": 1 + 2j, "scalar": np.float32(1.5), 7: "seven",
        "td": TensorDict({"a": torch.ones(2), "w": NonTensorData("x"), "s": NonTensorStack("p", "q")}, [2]),
        "sparse": torch.eye(3).to_sparse(), "param": torch.nn.Parameter(torch.ones(2)),
        "array": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "record": np.zeros(2, dtype=[("a", "<i4"), ("b", "<f8", (2,))]), "meta": torch.empty(2, device="meta"),
    }  # fmt: skip
    before = fingerprint(dp)
    dp.save_to_disk(tmp_path / "dp")
    assert fingerprint(dp) == before
    back = DataProto.load_from_disk(str(tmp_path / "dp"))
    assert_same_batch(back, dp, meta=False)
    td = back.meta_info.pop("td")
    assert torch.equal(td["a"], torch.ones(2)) and td["w"] == "x" and list(td["s"]) == ["p", "q"]
    assert back.meta_info.pop("sparse").to_dense().trace() == 3
    assert type(back.meta_info.pop("param")) is torch.nn.Parameter
    del dp.meta_info["td"], dp.meta_info["sparse"], dp.meta_info["param"]
    assert_same_batch(back, dp)
    back.batch["float"] += 1
    assert os.listdir(tmp_path) == ["dp"]


def test_a_view_is_saved_as_what_it_shows(tmp_path: Path) -> None:
    DataProto.from_dict({"x": torch.zeros(1_000_000, 2)})[:10].save_to_disk(tmp_path / "dp")
    assert (tmp_path / "dp").stat().st_size < 20_000


def test_no_batch_at_all(tmp_path: Path) -> None:
    DataProto(meta_info={"m": 1}).save_to_disk(tmp_path / "dp")
    back = DataProto.load_from_disk(tmp_path / "dp")
    assert back.batch is None and len(back) == 0 and back.meta_info == {"m": 1}


class Custom:
    loaded = 0

    def __setstate__(self, state: Any) -> None:
        Custom.loaded += 1
        self.__dict__.update(state)

    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_needs_pickle_is_named_and_runs_only_when_allowed(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    big = np.arange(1_000)
    dp = DataProto.from_dict(
        {"x": torch.arange(2)}, {"o": [Custom(1), Custom(big)], "plain": [[1], "a"]}, {"m": Custom(3), "cycle": cycle}
    )
    dp.save_to_disk(tmp_path / "dp")
    Custom.loaded = 0
    with pytest.raises(UnsupportedTypeError, match=r"non_tensor_batch\['o'\], meta_info\['m'\].*allow_pickle=True"):
        DataProto.load_from_disk(tmp_path / "dp")
    assert Custom.loaded == 0
    back = DataProto.load_from_disk(tmp_path / "dp", allow_pickle=True)
    assert Custom.loaded == 3 and back.meta_info["m"].value == 3 and (back.non_tensor_batch["o"][1].value == big).all()
    assert back.meta_info["cycle"][0] is back.meta_info["cycle"]


class Exploit:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EXPLOIT_TARGET"],)


@pytest.mark.parametrize("write", ["pickle", "torch", "tree"])
def test_foreign_files_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    monkeypatch.setenv("EXPLOIT_TARGET", str(tmp_path / "owned"))
    path = tmp_path / "dp"
    if write == "pickle":
        path.write_bytes(pickle.dumps(Exploit()))
    elif write == "torch":
        torch.save({"format": "dask_controller.DataProto", "version": 1, "x": Exploit()}, path)
    else:
        torch.save(["something", "else"], path)
    for allow in (False, True):
        with pytest.raises(WireFormatError, match="save_to_disk"):
            DataProto.load_from_disk(path, allow_pickle=allow)
    assert not (tmp_path / "owned").exists()


def test_a_maker_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    tree = {"format": "dask_controller.DataProto", "version": 1, "non_tensor_batch": [], "meta_info": []}
    torch.save(tree | {"batch": ("make", "system", ["echo"])}, tmp_path / "dp")
    with pytest.raises(WireFormatError, match="unknown kind"):
        DataProto.load_from_disk(tmp_path / "dp")


def test_damaged_and_newer_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo(3).save_to_disk(tmp_path / "dp")
    whole = (tmp_path / "dp").read_bytes()
    for size in (0, 10, len(whole) // 2):
        (tmp_path / "part").write_bytes(whole[:size])
        with pytest.raises(WireFormatError, match="damaged"):
            DataProto.load_from_disk(tmp_path / "part")
    monkeypatch.setattr(disk, "_VERSION", 2)
    zoo(3).save_to_disk(tmp_path / "newer")
    monkeypatch.setattr(disk, "_VERSION", 1)
    with pytest.raises(WireFormatError, match="version 2"):
        DataProto.load_from_disk(tmp_path / "newer")
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "nothing")


@pytest.mark.parametrize("step", ["save", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    zoo(2).save_to_disk(tmp_path / "dp")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch if step == "save" else os, step, fail)
        with pytest.raises(OSError, match="disk full"):
            zoo(5).save_to_disk(tmp_path / "dp")
    assert os.listdir(tmp_path) == ["dp"]
    assert len(DataProto.load_from_disk(tmp_path / "dp")) == 2


def test_the_file_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    zoo(2).save_to_disk(tmp_path / "dp")
    assert order[:2] == ["fsync", "replace"]
