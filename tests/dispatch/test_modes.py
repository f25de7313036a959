"""The two extensible enumerations, and the identity of their members across copies, threads and processes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import cloudpickle
import pytest

from dask_controller.dispatch.modes import Dispatch, Execute, ExtensibleEnum
from dask_controller.errors import DuplicateModeError, RegistrationError, UnknownModeError

BUILTIN = [
    "RANK_ZERO",
    "ONE_TO_ALL",
    "ALL_TO_ALL",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC",
    "DIRECT_ROLLOUT_METHOD",
]


def test_builtin_members() -> None:
    assert Dispatch.names() == BUILTIN
    assert Execute.names() == ["ALL", "RANK_ZERO"]
    assert [m.value for m in Dispatch] == list(range(8))
    assert list(Dispatch) == Dispatch.values()
    assert len(Dispatch) == 8
    assert Dispatch.DP_COMPUTE is Dispatch["DP_COMPUTE"] is Dispatch.from_name("dp_compute") is Dispatch("DP_COMPUTE")
    assert Dispatch.RANK_ZERO != Execute.RANK_ZERO


def test_register_upper_cases_and_adds_everywhere() -> None:
    mine = Dispatch.register("mine")
    assert mine.name == "MINE"
    assert mine is Dispatch.MINE is Dispatch["MINE"] is Dispatch.from_name("Mine")
    assert mine in Dispatch
    assert "MINE" in Dispatch
    assert mine in list(Dispatch)
    assert "MINE" in dir(Dispatch)
    assert isinstance(mine, Dispatch)
    assert Execute.from_name("MINE") is None
    assert repr(mine) == f"<Dispatch.MINE: {mine.value}>"
    assert str(mine) == "Dispatch.MINE"
    assert "MINE" in repr(Dispatch)
    assert len({m.value for m in Dispatch}) == len(Dispatch)


@pytest.mark.parametrize("name", ["one_to_all", "ONE_TO_ALL"])
def test_register_twice(name: str) -> None:
    with pytest.raises(ValueError, match=r"Dispatch\.ONE_TO_ALL is already registered.*Dispatch\.remove") as info:
        Dispatch.register(name)
    assert isinstance(info.value, DuplicateModeError)
    assert isinstance(info.value, RegistrationError)
    assert info.value.name == "ONE_TO_ALL"


@pytest.mark.parametrize("name", ["", "  ", None, 3, Dispatch.ONE_TO_ALL])
def test_register_wants_a_name(name: object) -> None:
    with pytest.raises(RegistrationError, match="non-empty string"):
        Dispatch.register(name)  # type: ignore[arg-type]


def test_remove() -> None:
    mine = Dispatch.register("mine")
    assert Dispatch.remove("Mine") is mine
    assert mine not in Dispatch
    assert "MINE" not in Dispatch
    assert Dispatch.from_name("mine") is None
    again = Dispatch.register("mine")
    assert again is not mine
    assert again.value > mine.value, "a value is not given out twice"
    assert mine not in Dispatch
    with pytest.raises(UnknownModeError, match="Dispatch has no member 'gone'"):
        Dispatch.remove("gone")


def test_unknown_names_the_near_ones() -> None:
    with pytest.raises(KeyError, match=r"'DP_COMPUT'.*Did you mean DP_COMPUTE") as info:
        Dispatch["DP_COMPUT"]
    assert isinstance(info.value, UnknownModeError)
    assert info.value.near[0] == "DP_COMPUTE"
    with pytest.raises(AttributeError, match="Did you mean RANK_ZERO") as attribute:
        Dispatch.RANK_ZER  # noqa: B018
    assert attribute.value.name == "RANK_ZER"
    with pytest.raises(KeyError, match="Expected one of RANK_ZERO, ONE_TO_ALL"):
        Dispatch["something else altogether"]
    assert not hasattr(Dispatch, "__wrapped__")
    assert Dispatch.from_name("nope") is None
    assert Dispatch.from_name(None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("item", [None, 0, "one_to_all", Execute.ALL, Execute.RANK_ZERO, [], object()])
def test_not_in(item: object) -> None:
    assert item not in Dispatch


def test_members_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot be replaced"):
        Dispatch.ONE_TO_ALL = None  # type: ignore[assignment,misc]
    with pytest.raises(AttributeError):
        Dispatch.ONE_TO_ALL.name = "X"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Dispatch.ONE_TO_ALL.extra = "X"  # type: ignore[attr-defined]


@pytest.mark.parametrize("member", [*Dispatch, *Execute], ids=str)
def test_identity_is_kept(member: ExtensibleEnum) -> None:
    assert copy.copy(member) is member
    assert copy.deepcopy({"k": [member]})["k"][0] is member
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member
    assert cloudpickle.loads(cloudpickle.dumps(member)) is member
    assert {member: 1}[pickle.loads(pickle.dumps(member))] == 1
    assert pickle.loads(pickle.dumps(type(member))) is type(member)


def test_iteration_sees_one_state() -> None:
    seen = [Dispatch.register(f"LATER_{i}") for i, _ in enumerate(Dispatch)]
    assert len(seen) == len(BUILTIN)


def test_subclasses_have_members_of_their_own() -> None:
    class Colour(ExtensibleEnum):
        pass

    red = Colour.register("red")
    assert list(Colour) == [red]
    assert red.value == 0
    assert "RED" not in Dispatch
    assert bool(Colour)


CHILD = """
    import pickle, sys
    import cloudpickle
    from dask_controller.dispatch.modes import Dispatch, Execute
    from dask_controller.errors import DuplicateModeError

    first, second, as_class = pickle.loads(sys.stdin.buffer.read())
    assert as_class is Dispatch
    [a, b], [again] = pickle.loads(first), cloudpickle.loads(second)
    assert a is again is Dispatch.FROM_THE_CONTROLLER is Dispatch["FROM_THE_CONTROLLER"], a
    assert b is Execute.SLOWLY
    assert a in Dispatch and "FROM_THE_CONTROLLER" in Dispatch.names()
    assert a.value == 8, a
    # Its module is imported on this host only now: that registers the same name, once.
    assert Dispatch.register("from_the_controller") is a
    try:
        Dispatch.register("from_the_controller")
    except DuplicateModeError:
        pass
    else:
        raise SystemExit("second registration passed")
    sys.stdout.buffer.write(pickle.dumps([a, b]))
"""


def test_a_process_that_does_not_know_the_member_learns_it() -> None:
    # Other tests have used values up; the child starts afresh, and the two shall agree.
    Dispatch._next_value = len(Dispatch)
    a, b = Dispatch.register("from_the_controller"), Execute.register("slowly")
    message = pickle.dumps((pickle.dumps([a, b]), cloudpickle.dumps([a]), Dispatch))
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        input=message,
        capture_output=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()
    back = pickle.loads(child.stdout)
    assert back[0] is a
    assert back[1] is b


def test_a_taken_value_is_not_given_twice_by_a_pickle() -> None:
    mine = Dispatch.register("mine")
    stream = pickle.dumps(mine)
    Dispatch.remove("mine")
    other = Dispatch.register("other")
    Dispatch._next_value = mine.value
    back = pickle.loads(stream)
    assert back is Dispatch.MINE
    assert back is not mine
    assert back.value != other.value


def test_registering_from_many_threads_gives_one_winner() -> None:
    start = threading.Barrier(8)
    outcome: list[object] = []

    def run() -> None:
        start.wait(timeout=30)
        try:
            outcome.append(Dispatch.register("race"))
        except DuplicateModeError as error:
            outcome.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcome) == 8
    assert [x for x in outcome if isinstance(x, Dispatch)] == [Dispatch.RACE]
