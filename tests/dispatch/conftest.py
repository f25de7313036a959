"""Modes and settings do not outlive a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dask_controller.dispatch import registry
from dask_controller.dispatch.modes import Dispatch, Execute
from dask_controller.protocol.config import DataProtoConfig


@pytest.fixture(autouse=True)
def _leave_modes_and_settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VERL_AUTO_PADDING", raising=False)
    names = {enum: enum.names() for enum in (Dispatch, Execute)}
    functions = dict(registry._dispatch_table)
    yield
    for enum, keep in names.items():
        for name in set(enum.names()) - set(keep):
            enum.remove(name)
    registry._dispatch_table.update(functions)
    DataProtoConfig.auto_padding = False


@pytest.fixture
def padding_on() -> None:
    DataProtoConfig.auto_padding = True
