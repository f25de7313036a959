"""The tables of modes, and what a group is told about a marked method."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest

from dask_controller.dispatch import functions, mesh
from dask_controller.dispatch.modes import Dispatch, Execute
from dask_controller.dispatch.register import RegisteredSpec, register, registered_methods, spec_of
from dask_controller.dispatch.registry import (
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register_dispatch_mode,
    resolve,
    update_dispatch_mode,
)
from dask_controller.errors import DuplicateModeError, RegistrationError, UnknownModeError
from tests.dispatch.fake_group import FakeGroup


def split(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def join(worker_group: Any, output: Any) -> Any:
    return output


@pytest.mark.parametrize(
    ("mode", "dispatch_fn", "collect_fn"),
    [
        ("RANK_ZERO", "dispatch_rank_zero", "collect_rank_zero"),
        ("ONE_TO_ALL", "dispatch_one_to_all", "collect_all_to_all"),
        ("ALL_TO_ALL", "dispatch_all_to_all", "collect_all_to_all"),
        ("DP_COMPUTE", "dispatch_dp_compute", "collect_dp_compute"),
        ("DP_COMPUTE_PROTO", "dispatch_dp_compute_data_proto", "collect_dp_compute_data_proto"),
        (
            "DP_COMPUTE_PROTO_WITH_FUNC",
            "dispatch_dp_compute_data_proto_with_func",
            "collect_dp_compute_data_proto",
        ),
        ("DP_COMPUTE_METRIC", "dispatch_dp_compute_data_proto", "collect_dp_compute"),
        ("DIRECT_ROLLOUT_METHOD", "refuse_direct_rollout", "refuse_direct_rollout"),
    ],
)
def test_built_in_pairs(mode: str, dispatch_fn: str, collect_fn: str) -> None:
    assert get_predefined_dispatch_fn(Dispatch[mode]) == {
        "dispatch_fn": getattr(functions, dispatch_fn),
        "collect_fn": getattr(functions, collect_fn),
    }


def test_every_built_in_mode_has_functions() -> None:
    for mode in Dispatch:
        assert set(get_predefined_dispatch_fn(mode)) == {"dispatch_fn", "collect_fn"}


def test_execute_modes() -> None:
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
    mine = Execute.register("mine")
    with pytest.raises(UnknownModeError, match=r"calls of Execute\.MINE. Expected one of Execute\.ALL"):
        get_predefined_execute_fn(mine)
    for wrong in ("ALL", None, Dispatch.RANK_ZERO):
        with pytest.raises(RegistrationError, match="is no execution mode. Expected a member of Execute"):
            get_predefined_execute_fn(wrong)  # type: ignore[arg-type]


def test_answers_are_copies() -> None:
    get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["collect_fn"] = join
    get_predefined_execute_fn(Execute.ALL)["execute_fn_name"] = "x"
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["collect_fn"] is functions.collect_all_to_all
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}


def test_a_mode_of_ones_own() -> None:
    mine = register_dispatch_mode("mine", dispatch_fn=split, collect_fn=join)
    assert mine is Dispatch.MINE
    assert get_predefined_dispatch_fn(Dispatch.MINE) == {"dispatch_fn": split, "collect_fn": join}

    class Rank:
        @register(dispatch_mode=Dispatch.MINE)
        def method(self) -> None: ...

    mode = resolve(registered_methods(Rank)["method"])
    assert (mode.dispatch_fn, mode.collect_fn, mode.execute_fn_name) == (split, join, "execute_all")


@pytest.mark.parametrize("name", ["one_to_all", "ONE_TO_ALL"])
def test_second_registration(name: str) -> None:
    with pytest.raises(ValueError, match=r"Dispatch\.ONE_TO_ALL is already registered.*update_dispatch_mode") as info:
        register_dispatch_mode(name, split, join)
    assert isinstance(info.value, DuplicateModeError)
    register_dispatch_mode("mine", split, join)
    with pytest.raises(DuplicateModeError, match="MINE"):
        register_dispatch_mode("Mine", split, join)
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["collect_fn"] is functions.collect_all_to_all


def test_a_member_without_functions_receives_them() -> None:
    mine = Dispatch.register("mine")
    with pytest.raises(UnknownModeError, match=r"Dispatch\.MINE has no functions.*register_dispatch_mode\('MINE'"):
        get_predefined_dispatch_fn(mine)
    with pytest.raises(UnknownModeError, match="has no functions"):
        update_dispatch_mode(mine, split, join)
    assert register_dispatch_mode("mine", split, join) is mine
    assert get_predefined_dispatch_fn(mine)["dispatch_fn"] is split


def test_a_name_may_be_used_again_after_its_removal() -> None:
    old = register_dispatch_mode("mine", split, join)
    Dispatch.remove("mine")
    with pytest.raises(UnknownModeError, match=r"Dispatch\.MINE is unknown: it was removed"):
        get_predefined_dispatch_fn(old)
    with pytest.raises(UnknownModeError, match="is unknown"):
        update_dispatch_mode(old, split, join)
    new = register_dispatch_mode("mine", join, split)
    assert new is not old
    assert get_predefined_dispatch_fn(new)["dispatch_fn"] is join


def test_a_removed_member_takes_its_functions_along() -> None:
    def local(worker_group: Any, output: Any) -> Any: ...

    register_dispatch_mode("mine", split, local)
    gone = weakref.ref(local)
    del local
    Dispatch.remove("mine")
    gc.collect()
    assert gone() is None


def test_update() -> None:
    update_dispatch_mode(dispatch_mode=Dispatch.ONE_TO_ALL, dispatch_fn=split, collect_fn=join)
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL) == {"dispatch_fn": split, "collect_fn": join}
    for wrong in ("ONE_TO_ALL", None, Execute.ALL, {"dispatch_fn": split, "collect_fn": join}):
        with pytest.raises(RegistrationError, match="is no dispatch mode. Expected a member of Dispatch"):
            update_dispatch_mode(wrong, split, join)  # type: ignore[arg-type]


def test_functions_must_be_callable() -> None:
    for call in (
        lambda f, g: register_dispatch_mode("mine", f, g),
        lambda f, g: update_dispatch_mode(Dispatch.ONE_TO_ALL, f, g),
    ):
        with pytest.raises(RegistrationError, match="dispatch_fn cannot be called: expected a function, got None"):
            call(None, join)
        with pytest.raises(RegistrationError, match="collect_fn cannot be called.*'join' of type str"):
            call(split, "join")
    assert "MINE" not in Dispatch, "a failed registration leaves nothing behind"


# ---- what a group is told --------------------------------------------------------------------------------------------


def test_rank_zero_mode_runs_on_rank_zero_whatever_the_execution_mode() -> None:
    for execute_mode in Execute:
        mode = resolve(RegisteredSpec(Dispatch.RANK_ZERO, execute_mode))
        assert mode.execute_fn_name == "execute_rank_zero"
        assert mode.is_rank_zero
    assert mode.collect_mask is not None
    assert mode.collect_mask(FakeGroup(3)) == [True, False, False]


@pytest.mark.parametrize("dispatch_mode", [m for m in Dispatch if m is not Dispatch.RANK_ZERO], ids=str)
def test_other_modes_follow_the_execution_mode(dispatch_mode: Dispatch) -> None:
    everywhere = resolve(RegisteredSpec(dispatch_mode))
    assert everywhere.execute_fn_name == "execute_all"
    assert not everywhere.is_rank_zero
    assert everywhere.is_pass_through == (dispatch_mode is Dispatch.ALL_TO_ALL)
    assert everywhere.collect_mask is None
    assert resolve(RegisteredSpec(dispatch_mode, Execute.RANK_ZERO)).is_rank_zero


def test_a_pair_is_resolved_to_itself() -> None:
    partial = functools.partial(split, 1)
    mode = resolve(RegisteredSpec({"dispatch_fn": partial, "collect_fn": join}, Execute.RANK_ZERO))
    assert (mode.dispatch_fn, mode.collect_fn, mode.execute_fn_name) == (partial, join, "execute_rank_zero")


def test_the_pair_of_a_mesh_tells_its_mask() -> None:
    mode = resolve(RegisteredSpec(mesh.make_nd_compute_dataproto_dispatch_fn("train")))
    assert mode.collect_mask is not None
    assert mode.collect_mask(FakeGroup(2, [0, 0], [False, True])) == [False, True]


def test_modes_without_functions_are_refused_when_a_group_binds() -> None:
    class Rank:
        @register(Dispatch.register("mine"))
        def method(self) -> None: ...

    spec = spec_of(Rank.method)
    assert spec is not None
    with pytest.raises(UnknownModeError, match=r"Dispatch\.MINE has no functions"):
        resolve(spec)
    with pytest.raises(UnknownModeError, match=r"Execute\.SLOWLY"):
        resolve(RegisteredSpec(execute_mode=Execute.register("slowly")))


# ---- functions of verl's module, which want verl's own group ---------------------------------------------------------


def as_in_verl(name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("isinstance(worker_group, WorkerGroup)")

    function.__name__ = name
    function.__module__ = "verl.single_controller.base.decorator"
    return function


def test_functions_of_verl_stand_for_ours() -> None:
    pair = {
        "dispatch_fn": as_in_verl("dispatch_dp_compute_data_proto"),
        "collect_fn": as_in_verl("collect_dp_compute"),
    }
    mode = resolve(RegisteredSpec(pair))  # type: ignore[arg-type]
    assert mode.dispatch_fn is functions.dispatch_dp_compute_data_proto
    assert mode.collect_fn is functions.collect_dp_compute


def test_a_mesh_of_verl_is_a_mesh_of_ours() -> None:
    pair = {
        "dispatch_fn": functools.partial(as_in_verl("dispatch_lazy_compute_data_proto"), "actor"),
        "collect_fn": functools.partial(as_in_verl("collect_lazy_compute_data_proto"), "actor"),
    }
    mode = resolve(RegisteredSpec(pair))  # type: ignore[arg-type]
    assert {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn} == (
        mesh.make_nd_compute_dataproto_dispatch_fn("actor")
    )


def test_a_partial_of_verl_keeps_its_arguments() -> None:
    pair = {
        "dispatch_fn": functools.partial(as_in_verl("dispatch_nd_compute"), [1, 0], 2),
        "collect_fn": functools.partial(as_in_verl("collect_nd_compute"), collect_mask=[True, False]),
    }
    mode = resolve(RegisteredSpec(pair))  # type: ignore[arg-type]
    assert mode.dispatch_fn(FakeGroup(2), ["a", "b"]) == ((["b", "a"],), {})
    assert mode.collect_fn(worker_group=FakeGroup(2), output=["a", "b"]) == ["a"]


def test_other_functions_of_verl_pass_through() -> None:
    unknown = as_in_verl("something_newer")
    mode = resolve(RegisteredSpec({"dispatch_fn": unknown, "collect_fn": functools.partial(unknown, 1)}))
    assert mode.dispatch_fn is unknown
