"""Every exception of the package: its tree, its builtin kin, and the trip through a pickle."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

from dask_controller import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]

#: One instance per class whose every field differs from its default.
SAMPLES = {
    errors.DuplicateModeError: ("taken", "MINE"),
    errors.UnknownModeError: ("unknown", "MINNE", ("MINE",)),
    errors.InsufficientResourcesError: ("too few slots", 3, 2, 1, {"tcp://a:1": "group 'actor'"}),
    errors.RemoteError: ("mod.OddError", "went wrong", "Traceback ..."),
    errors.RankError: ("no answer", "update"),
    errors.RankFailedError: ("rank 1 failed", "update", {1: ValueError("x")}, {1: "tcp://a:1"}, (0, 2)),
    errors.RankLostError: ("host gone", "update", 1, "tcp://a:1", {1: "tcp://a:1", 3: "tcp://b:1"}),
    errors.ChunkLostError: ("data gone", "update", "key-1", 2, "tcp://a:1"),
    errors.RankTimeoutError: ("too slow", "update", 1.5, (0,), (1, 2)),
}

#: The builtin that `except` may name, for every class (DESIGN: each is also a builtin).
BUILTIN = {
    "RegistrationError": TypeError,
    "DuplicateModeError": ValueError,
    "ProtectedVariableError": ValueError,
    "UnknownModeError": KeyError,
    "NotRegisteredError": AttributeError,
    "DataProtoError": ValueError,
    "BatchMismatchError": ValueError,
    "ChunkError": ValueError,
    "KeyConflictError": ValueError,
    "UnsupportedTypeError": TypeError,
    "WireFormatError": ValueError,
    "DispatchError": ValueError,
    "PlacementError": RuntimeError,
    "InsufficientResourcesError": RuntimeError,
    "GroupStartTimeoutError": TimeoutError,
    "VersionMismatchError": RuntimeError,
    "RankError": RuntimeError,
    "RankFailedError": RuntimeError,
    "RankLostError": RuntimeError,
    "ChunkLostError": RuntimeError,
    "RankTimeoutError": TimeoutError,
    "GroupClosedError": RuntimeError,
    # Stands in for any exception of a rank, so it is none in particular.
    "RemoteError": Exception,
    "ControllerError": Exception,
}


def sample(cls: type[Exception]) -> Exception:
    """An instance with every field set, whatever fields are added later."""
    if cls in SAMPLES:
        return cls(*SAMPLES[cls])
    assert "__init__" not in vars(cls), f"{cls.__name__} has fields of its own: give it a row in SAMPLES"
    return cls("what happened")


def same(left: object, right: object) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, BaseException):
        return type(left) is type(right) and left.args == right.args  # type: ignore[attr-defined]
    return left == right


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_survives_plain_pickle(cls: type[Exception], protocol: int) -> None:
    error = sample(cls)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert str(back) == str(error)
    assert str(error)
    assert same(vars(back), vars(error))
    # A second trip (rank to host to controller) loses nothing either.
    again = pickle.loads(pickle.dumps(back, protocol))
    assert str(again) == str(error)
    assert same(vars(again), vars(error))


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda c: c.__name__)
def test_arguments_become_fields_of_the_same_name(cls: type[Exception]) -> None:
    names = list(inspect.signature(cls).parameters)
    if names and names[-1] == "args":
        names.pop()
    assert len(names) == len(SAMPLES[cls]), "the sample leaves an argument at its default"
    error = sample(cls)
    for name, value in zip(names, SAMPLES[cls], strict=True):
        assert same(getattr(error, name), value), name


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda c: c.__name__)
def test_a_message_alone_is_enough(cls: type[Exception]) -> None:
    error = cls("builtins.ValueError", "x") if cls is errors.RemoteError else cls("what happened")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_is_also_the_builtin(cls: type[Exception]) -> None:
    assert set(BUILTIN) == set(errors.__all__)
    assert issubclass(cls, BUILTIN[cls.__name__])
    assert issubclass(cls, errors.ControllerError)
    with pytest.raises(BUILTIN[cls.__name__]):
        raise sample(cls)


def test_everything_public_is_listed() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)
    assert errors.__all__ == sorted(errors.__all__)


def test_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str | None, str | None]] = {}
    parents: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^((?:│  |   |├─ |└─ )*)(\w+Error)(?:\((\w+)\))?", line.removeprefix("    "))
        if not match or not line.startswith("    "):
            continue
        depth = len(match[1]) // 3
        del parents[depth:]
        drawn[match[2]] = (parents[-1] if parents else None, match[3])
        parents.append(match[2])

    assert set(drawn) == set(errors.__all__)
    for name, (parent, builtin) in drawn.items():
        cls = getattr(errors, name)
        if parent is not None:
            assert cls.__bases__[0] is getattr(errors, parent), name
        others = [base for base in cls.__bases__ if base.__module__ == "builtins"]
        assert [base.__name__ for base in others] == ([builtin] if builtin else []), name
        if builtin:
            assert issubclass(getattr(builtins, builtin), Exception)


def test_insufficient_resources_names_the_holders() -> None:
    text = str(sample(errors.InsufficientResourcesError))
    assert "asked 3" in text
    assert "present 2" in text
    assert "free 1" in text
    assert "tcp://a:1 is held by group 'actor'" in text


def test_a_lost_rank_is_always_among_the_lost() -> None:
    assert errors.RankLostError("gone", "update", 1, "tcp://a:1").lost == {1: "tcp://a:1"}


def test_fields_are_copies() -> None:
    held = {"tcp://a:1": "x"}
    error = errors.InsufficientResourcesError("m", held=held)
    held.clear()
    assert error.held == {"tcp://a:1": "x"}
    assert error.args[-1] == {"tcp://a:1": "x"}


def test_key_error_text_is_not_quoted() -> None:
    assert str(errors.UnknownModeError("no mode 'X'")) == "no mode 'X'"
