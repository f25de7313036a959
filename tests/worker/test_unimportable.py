"""A class that the rank's host does not have: the error says what to do about it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dask_controller.protocol.serialize import pack
from dask_controller.worker.runner import CONSTRUCT, Runner, Work


def test_a_class_that_cannot_be_imported_comes_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_on_the_controller.py").write_text("class Thing:\n    pass\n")
    with monkeypatch.context() as controller:
        controller.syspath_prepend(tmp_path)
        values = [pack(importlib.import_module("only_on_the_controller").Thing), pack(()), pack({})]
    del sys.modules["only_on_the_controller"]
    importlib.invalidate_caches()

    outcome = Runner().run(
        Work(call_id=0, method=CONSTRUCT, values=values, refs=[()] * 3, args=[0, 1, 2], kwargs={}, out="drop")
    )

    assert outcome.failure is not None
    assert outcome.failure["type"] == "builtins.ModuleNotFoundError"
    assert "'only_on_the_controller' cannot be imported on the rank's host" in outcome.failure["text"]
    assert "client.upload_file()" in outcome.failure["text"]
    assert "cloudpickle.register_pickle_by_value(only_on_the_controller)" in outcome.failure["text"]
