"""The decorator: what it accepts, what it refuses at once, and reading marks, those of other libraries included."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from types import MappingProxyType
from typing import Any

import cloudpickle
import pytest

from dask_controller.dispatch.modes import Dispatch, Execute
from dask_controller.dispatch.register import MAGIC_ATTR, RegisteredSpec, register, registered_methods, spec_of
from dask_controller.errors import RegistrationError


def split(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def join(worker_group: Any, output: Any) -> Any:
    return output


def test_attribute_name_is_the_one_verl_uses() -> None:
    assert MAGIC_ATTR == "attrs_3141562937"


def test_bare() -> None:
    def method(self: Any, x: int) -> int:
        """Doc."""
        return x + 1

    marked = register(method)
    assert marked is method
    assert marked(None, 1) == 2
    assert marked.__doc__ == "Doc."
    assert getattr(marked, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.ALL_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": True,
        "materialize_futures": True,
    }
    assert spec_of(marked) == RegisteredSpec()


@pytest.mark.parametrize(
    "decorator",
    [
        register(Dispatch.DP_COMPUTE, Execute.RANK_ZERO, False, False),
        register(Dispatch.DP_COMPUTE, execute_mode=Execute.RANK_ZERO, blocking=False, materialize_futures=False),
        register(
            dispatch_mode=Dispatch.DP_COMPUTE,
            execute_mode=Execute.RANK_ZERO,
            blocking=False,
            materialize_futures=False,
        ),
    ],
)
def test_called_with_positional_and_keyword_arguments(decorator: Callable[..., Any]) -> None:
    def method(self: Any) -> None: ...

    assert decorator(method) is method
    assert spec_of(method) == RegisteredSpec(Dispatch.DP_COMPUTE, Execute.RANK_ZERO, False, False)


def test_called_without_arguments() -> None:
    @register()
    def method(self: Any) -> None: ...

    assert spec_of(method) == RegisteredSpec()


def test_argument_names_are_those_of_the_field() -> None:
    assert list(inspect.signature(register).parameters) == [
        "dispatch_mode",
        "execute_mode",
        "blocking",
        "materialize_futures",
    ]


def test_async_methods_stay_async() -> None:
    class Rank:
        @register(Dispatch.ONE_TO_ALL)
        async def twice(self, x: int) -> int:
            return 2 * x

    assert inspect.iscoroutinefunction(Rank.twice)
    assert asyncio.run(Rank().twice(4)) == 8
    assert spec_of(Rank.twice) == RegisteredSpec(Dispatch.ONE_TO_ALL)
    assert spec_of(Rank().twice) == RegisteredSpec(Dispatch.ONE_TO_ALL), "a bound method shows the mark as well"


@pytest.mark.parametrize("wrap", [dict, MappingProxyType])
def test_a_mapping_is_a_mode(wrap: Callable[[dict[str, Any]], Any]) -> None:
    given = {"dispatch_fn": split, "collect_fn": functools.partial(join)}

    @register(dispatch_mode=wrap(given))
    def method(self: Any) -> None: ...

    spec = spec_of(method)
    assert spec is not None
    assert spec.dispatch_mode == given
    given.clear()
    assert spec_of(method) == spec, "the mark keeps a copy"
    assert type(getattr(method, MAGIC_ATTR)["dispatch_mode"]) is dict


# ---- refused at decoration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (None, "dispatch_mode=None of type NoneType"),
        (3, "of type int. Expected a member of dask_controller.Dispatch or a mapping"),
        ("DP_COMPUTE", r"of type str.*Did you mean Dispatch\.DP_COMPUTE\?"),
        ("dp_computee", r"Did you mean Dispatch\.DP_COMPUTE"),
        (Execute.ALL, "Expected a member of dask_controller.Dispatch"),
        (Dispatch, "Expected a member of dask_controller.Dispatch"),
        ([split, join], "of type list"),
        ({"dispatch_fn": split}, "'collect_fn' is missing"),
        ({"collect_fn": join}, "'dispatch_fn' is missing"),
        ({}, "'dispatch_fn' is missing, 'collect_fn' is missing"),
        ({"dispatch_fn": split, "collect": join}, "'collect_fn' is missing, 'collect' is unknown"),
        ({"dispatch_fn": split, "collect_fn": join, "mask": 1}, "'mask' is unknown"),
        ({"dispatch_fn": split, "collect_fn": None}, "'collect_fn' cannot be called.*got None of type NoneType"),
        ({"dispatch_fn": "split", "collect_fn": join}, "'dispatch_fn' cannot be called.*'split' of type str"),
    ],
)
def test_bad_dispatch_mode(mode: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        register(dispatch_mode=mode)
    with pytest.raises(TypeError, match=message):
        register(mode)


def test_removed_mode_is_unknown() -> None:
    gone = Dispatch.register("soon_gone")
    Dispatch.remove("soon_gone")
    with pytest.raises(RegistrationError, match="unknown dispatch mode SOON_GONE"):
        register(gone)


@pytest.mark.parametrize("mode", [None, "ALL", Dispatch.RANK_ZERO, Execute, 0])
def test_bad_execute_mode(mode: Any) -> None:
    with pytest.raises(
        RegistrationError, match=r"execute_mode=.*Expected a member of.*Execute\.ALL, Execute\.RANK_ZERO"
    ):
        register(execute_mode=mode)


@pytest.mark.parametrize("flag", ["blocking", "materialize_futures"])
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_are_booleans(flag: str, value: Any) -> None:
    with pytest.raises(RegistrationError, match=f"{flag}={value!r} of type .*Expected True or False"):
        register(**{flag: value})


def test_a_dispatch_function_is_no_mode() -> None:
    with pytest.raises(RegistrationError, match="A dispatch function alone is no mode"):
        register(split, blocking=False)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="dispatch_mod"):
        register(dispatch_mod=Dispatch.ONE_TO_ALL)  # type: ignore[call-overload]


def _generator(self: Any) -> Iterator[int]:
    yield 1


async def _async_generator(self: Any) -> AsyncIterator[int]:
    yield 1


class _Callable:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (staticmethod(split), "split: it is a staticmethod"),
        (classmethod(split), "split: it is a classmethod"),
        (property(split), "split: it is a property"),
        (functools.cached_property(split), "is a cached_property"),
        (_generator, "_generator: it is a generator function.*one result per rank"),
        (_async_generator, "_async_generator: it is a generator function"),
        (_Callable(), "a _Callable stored in a class does not receive self"),
        (functools.partial(split, 1), "does not receive self"),
        (str.upper, "takes no attributes"),
    ],
)
def test_bad_function(thing: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        register(thing)
    with pytest.raises(RegistrationError, match=message):
        register(Dispatch.ONE_TO_ALL)(thing)


@pytest.mark.parametrize("thing", [3, None, "method", int, _Callable])
def test_not_a_function(thing: Any) -> None:
    with pytest.raises(RegistrationError, match=r"Expected a `def` or `async def` method"):
        register(Dispatch.ONE_TO_ALL)(thing)


def test_marked_twice() -> None:
    class Base:
        @register(Dispatch.ONE_TO_ALL)
        def method(self) -> None: ...

    with pytest.raises(RegistrationError, match="Base.method is marked by @register already"):
        register(Dispatch.RANK_ZERO)(Base.method)
    assert spec_of(Base.method) == RegisteredSpec(Dispatch.ONE_TO_ALL)


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 3, "x", split, object(), Dispatch, {}])
def test_no_mark(thing: object) -> None:
    assert spec_of(thing) is None


class ForeignMember:
    """As verl's: an object with a name and a value, of a class that is not ours."""

    def __init__(self, name: str, value: int = 0) -> None:
        self.name = name
        self.value = value


def foreign(**mark: Any) -> Callable[..., Any]:
    def method(self: Any) -> None: ...

    setattr(method, MAGIC_ATTR, mark)
    return method


def test_foreign_members_are_read_by_name() -> None:
    method = foreign(
        dispatch_mode=ForeignMember("DP_COMPUTE_PROTO", 99), execute_mode=ForeignMember("RANK_ZERO"), blocking=False
    )
    assert spec_of(method) == RegisteredSpec(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO, False, True)


def test_foreign_pairs_pass_through() -> None:
    pair = {"dispatch_fn": split, "collect_fn": join}
    method = foreign(dispatch_mode=pair, execute_mode=ForeignMember("ALL"), blocking=True)
    assert spec_of(method) == RegisteredSpec(pair)


def test_what_a_foreign_mark_leaves_out_has_its_default() -> None:
    assert spec_of(foreign(dispatch_mode=ForeignMember("ONE_TO_ALL"))) == RegisteredSpec(Dispatch.ONE_TO_ALL)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"execute_mode": Execute.ALL}, r"has no 'dispatch_mode'.*\['execute_mode'\]"),
        ({"dispatch_mode": ForeignMember("THEIRS")}, "unknown Dispatch mode THEIRS.*register_dispatch_mode"),
        ({"dispatch_mode": {"dispatch_fn": split}}, "unknown Dispatch mode"),
        ({"dispatch_mode": Dispatch.ONE_TO_ALL, "execute_mode": ForeignMember("SOME")}, "unknown Execute mode SOME"),
    ],
)
def test_malformed_marks(mark: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message) as info:
        spec_of(foreign(**mark))
    assert "method" in str(info.value), "names the method"


def test_registered_methods() -> None:
    class Base:
        @register
        def inherited(self) -> None: ...

        @register(Dispatch.ONE_TO_ALL)
        def overridden_and_marked(self) -> None: ...

        @register(Dispatch.ONE_TO_ALL)
        def overridden(self) -> None: ...

        @property
        def explodes(self) -> int:
            raise AssertionError("a property was read")

    class Child(Base):
        number = 3

        @register(Dispatch.RANK_ZERO)
        def overridden_and_marked(self) -> None: ...

        def overridden(self) -> None: ...

        def plain(self) -> None: ...

        @staticmethod
        def helper() -> None: ...

        theirs = foreign(dispatch_mode=ForeignMember("DP_COMPUTE"))

    assert registered_methods(Child) == {
        "inherited": RegisteredSpec(),
        "overridden_and_marked": RegisteredSpec(Dispatch.RANK_ZERO),
        "theirs": RegisteredSpec(Dispatch.DP_COMPUTE),
    }
    assert list(registered_methods(Base)) == ["inherited", "overridden", "overridden_and_marked"]


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property, functools.cached_property])
def test_a_mark_inside_another_decorator_is_refused_when_read(wrap: Callable[..., Any]) -> None:
    class Rank:
        method = wrap(register(lambda self: None))

    with pytest.raises(RegistrationError, match=rf"Rank.method is a {wrap.__name__} around a function marked"):
        registered_methods(Rank)


def test_marks_travel_with_functions_and_specs_pickle() -> None:
    @register(Dispatch.DP_COMPUTE, blocking=False)
    def method(self: Any) -> None: ...

    back = cloudpickle.loads(cloudpickle.dumps(method))
    assert back is not method
    assert spec_of(back) == spec_of(method)
    assert pickle.loads(pickle.dumps(spec_of(method))) == spec_of(method)
