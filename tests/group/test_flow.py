"""Bytes in flight per host, without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dask_controller.errors import RankTimeoutError
from dask_controller.group import flow as flow_module
from dask_controller.group.flow import Flow


def refuse(host: str, waited_s: float) -> Exception:
    return RankTimeoutError(f"{host} after {waited_s}")


def never() -> None:
    return None


def start(function: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()

    def run() -> None:
        function()
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, done


def test_small_arguments_are_not_counted() -> None:
    flow = Flow(100, 10, 1.0)
    assert flow.admit({"a": 10}, never, refuse) == {}
    assert flow.in_flight("a") == 0


def test_a_call_alone_is_let_through_whatever_its_size() -> None:
    flow = Flow(100, 10, 1.0)
    counted = flow.admit({"a": 1000}, never, refuse)
    assert (counted, flow.in_flight("a")) == ({"a": 1000}, 1000)


def test_a_call_beyond_the_limit_waits_until_enough_is_done() -> None:
    flow = Flow(100, 10, 1.0)
    first = flow.admit({"a": 60}, never, refuse)
    second = flow.admit({"a": 40, "b": 40}, never, refuse)
    thread, done = start(lambda: flow.admit({"a": 50}, never, refuse))
    flow.dismiss(second)
    assert not done.wait(0.05) and flow.in_flight("a") == 60
    flow.dismiss(first)
    assert done.wait(10)
    thread.join(10)
    assert (flow.in_flight("a"), flow.in_flight("b")) == (50, 0)


def test_dismissing_twice_counts_once() -> None:
    flow = Flow(100, 10, 1.0)
    flow.admit({"a": 30}, never, refuse)
    counted = flow.admit({"a": 20}, never, refuse)
    flow.dismiss(counted)
    flow.dismiss(counted)
    assert flow.in_flight("a") == 30


def test_a_paused_host_is_waited_for_and_then_served() -> None:
    flow = Flow(100, 10, 60.0)
    flow.pause("a")
    assert flow.paused() == ["a"]
    thread, done = start(lambda: flow.admit({"a": 50}, never, refuse))
    assert not done.wait(0.05)
    flow.resume("a")
    assert done.wait(10)
    thread.join(10)


def test_a_host_that_stays_paused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "_CHECK_S", 0.01)
    flow = Flow(100, 10, 0.02)
    flow.pause("a")
    with pytest.raises(RankTimeoutError, match="^a after 0.0"):
        flow.admit({"a": 50}, never, refuse)
    assert flow.in_flight("a") == 0


def test_waiting_ends_when_the_group_cannot_be_used_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "_CHECK_S", 0.01)

    def gone() -> None:
        raise RuntimeError("closed")

    flow = Flow(100, 10, 60.0)
    flow.admit({"a": 90}, never, refuse)
    with pytest.raises(RuntimeError, match="closed"):
        flow.admit({"a": 50}, gone, refuse)
