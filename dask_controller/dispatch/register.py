"""The ``@register`` decorator: what marks a method of a Worker as callable through a group, and how marks are read.

Owns the mark and its checks. Does not wrap, call or look anything up: a marked method is the function the user wrote,
and what its mode does is found in :mod:`dask_controller.dispatch.registry` when a group is built.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

from dask_controller.dispatch._types import DispatchPair
from dask_controller.dispatch.modes import Dispatch, Execute, near_names
from dask_controller.errors import RegistrationError

__all__ = ["MAGIC_ATTR", "DispatchMode", "RegisteredSpec", "register", "registered_methods", "spec_of"]

#: Name of the attribute that holds the mark. verl's classes carry the same one, and theirs are read as ours.
MAGIC_ATTR = "attrs_3141562937"

#: What ``dispatch_mode`` may be.
DispatchMode: TypeAlias = Dispatch | DispatchPair | Mapping[str, Callable[..., Any]]

# A plain type variable and not Callable[P, R]: the decorator hands back the very function it was given.
F = TypeVar("F", bound=Callable[..., Any])

_PAIR_KEYS = ("dispatch_fn", "collect_fn")
_NOT_METHODS = (staticmethod, classmethod, property, functools.cached_property)


@dataclass(frozen=True)
class RegisteredSpec:
    """How a marked method is to be called, as read from its mark."""

    #: A member, or a ``{"dispatch_fn": f, "collect_fn": g}`` of the user's own.
    dispatch_mode: Dispatch | DispatchPair = Dispatch.ALL_TO_ALL
    #: Which ranks run it. ``Dispatch.RANK_ZERO`` means rank 0 whatever stands here.
    execute_mode: Execute = Execute.ALL
    #: Whether the caller waits for the result.
    blocking: bool = True
    #: Whether future arguments arrive on the rank as data.
    materialize_futures: bool = True


@overload
def register(dispatch_mode: F, /) -> F: ...


@overload
def register(
    dispatch_mode: DispatchMode = ...,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    materialize_futures: bool = ...,
) -> Callable[[F], F]: ...


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Any:
    """Mark a method of a Worker as callable through its group.

    Works bare (``@register``) and called (``@register(...)``), on ``def`` and ``async def`` methods. The function
    itself is returned, with the mark under :data:`MAGIC_ATTR`; calling it directly does what it did before.

    Parameters
    ----------
    dispatch_mode : Dispatch or mapping, default ``Dispatch.ALL_TO_ALL``
        How arguments go to the ranks and results come back. A mapping has exactly the keys ``"dispatch_fn"`` and
        ``"collect_fn"``, called as ``dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs)`` and
        ``collect_fn(worker_group, output) -> result``.
    execute_mode : Execute, default ``Execute.ALL``
        Which ranks run the method.
    blocking : bool, default True
        Whether the call through the group waits for its result. If not, it returns a future at once.
    materialize_futures : bool, default True
        Whether arguments that are futures arrive on the rank as the data they stand for.

    Returns
    -------
    callable
        The function that was given, or a decorator.

    Raises
    ------
    RegistrationError
        An argument cannot work; the message names it, what was expected and what was given.

    Examples
    --------
    >>> class Actor:
    ...     @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    ...     def update(self, batch): ...
    ...     @register
    ...     def ping(self): ...
    >>> sorted(registered_methods(Actor))
    ['ping', 'update']
    """
    if _is_bare_use(dispatch_mode):
        if (execute_mode, blocking, materialize_futures) != (Execute.ALL, True, True):
            raise RegistrationError(
                f"@register got the function {_describe(dispatch_mode)} as its dispatch mode. A dispatch function "
                "alone is no mode: give both functions, dispatch_mode={'dispatch_fn': ..., 'collect_fn': ...}."
            )
        return _mark(dispatch_mode, RegisteredSpec())
    spec = RegisteredSpec(
        _checked_dispatch_mode(dispatch_mode),
        _checked_execute_mode(execute_mode),
        _checked_flag("blocking", blocking),
        _checked_flag("materialize_futures", materialize_futures),
    )
    return functools.partial(_mark, spec=spec)


def spec_of(func: object) -> RegisteredSpec | None:
    """Read the mark of a function, method or class attribute.

    Parameters
    ----------
    func : object
        Anything; marks put by verl's decorator count as well. Members of another library's ``Dispatch`` and
        ``Execute`` stand for ours of the same name, and what its marks do not say has the default value.

    Returns
    -------
    RegisteredSpec or None
        None if there is no mark.

    Raises
    ------
    RegistrationError
        The mark is malformed, or names a mode that is not registered here.
    """
    mark = getattr(func, MAGIC_ATTR, None)
    if not isinstance(mark, Mapping):
        return None
    if "dispatch_mode" not in mark:
        raise RegistrationError(
            f"The mark of {_describe(func)} has no 'dispatch_mode': expected a mapping with dispatch_mode, "
            f"execute_mode and blocking, got the keys {sorted(map(str, mark))}. Mark the method with "
            "dask_controller.register."
        )
    mode = mark["dispatch_mode"]
    return RegisteredSpec(
        # A pair of another library passes as it is: only our own decorator is strict about further keys.
        _pair(mode) if isinstance(mode, Mapping) and set(_PAIR_KEYS) <= set(mode) else _member(Dispatch, mode, func),
        _member(Execute, mark.get("execute_mode", Execute.ALL), func),
        bool(mark.get("blocking", True)),
        bool(mark.get("materialize_futures", True)),
    )


def registered_methods(cls: type) -> dict[str, RegisteredSpec]:
    """Find the marked methods of a class, inherited ones included.

    Parameters
    ----------
    cls : type
        A Worker class.

    Returns
    -------
    dict of str to RegisteredSpec
        By name, in alphabetical order.

    Raises
    ------
    RegistrationError
        A mark is malformed, or sits inside a staticmethod, classmethod or property.

    Notes
    -----
    A method that overrides a marked one is marked only if it carries ``@register`` itself, as in verl: the override
    may well want another mode, and a mark that came from nowhere would be hard to find.
    """
    found = {}
    for name in sorted(dir(cls)):
        attribute = inspect.getattr_static(cls, name, None)
        if isinstance(attribute, _NOT_METHODS):
            inner = getattr(attribute, "fget", None) or getattr(attribute, "__func__", None)
            inner = inner or getattr(attribute, "func", None)
            if isinstance(getattr(inner, MAGIC_ATTR, None), Mapping):
                raise RegistrationError(
                    f"{cls.__qualname__}.{name} is a {type(attribute).__name__} around a function marked by @register. "
                    "Expected a plain method that takes self; remove one of the two decorators."
                )
            continue
        spec = spec_of(attribute)
        if spec is not None:
            found[name] = spec
    return found


def _is_bare_use(value: object) -> bool:
    if isinstance(value, (Dispatch, Mapping, type, Execute)):
        return False
    return callable(value) or isinstance(value, _NOT_METHODS)


def _mark(func: F, spec: RegisteredSpec) -> F:
    """Check the function, set the mark, return the function."""
    if isinstance(func, _NOT_METHODS):
        raise RegistrationError(
            f"@register cannot mark {_describe(func)}: it is a {type(func).__name__}. Expected a plain `def` or "
            "`async def` method that takes self, because it runs on the Worker object of each rank; remove one of the "
            "two decorators."
        )
    if not callable(func) or isinstance(func, type):
        raise RegistrationError(
            f"@register cannot mark {_describe(func)}. Expected a `def` or `async def` method, got a "
            f"{type(func).__name__}."
        )
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise RegistrationError(
            f"@register cannot mark {_describe(func)}: it is a generator function, and one call gives one result per "
            "rank. Return a list, or make one call per item."
        )
    if not hasattr(func, "__get__"):
        raise RegistrationError(
            f"@register cannot mark {_describe(func)}: a {type(func).__name__} stored in a class does not receive "
            "self. Expected a `def` or `async def` method; wrap it in one."
        )
    if MAGIC_ATTR in getattr(func, "__dict__", {}):
        raise RegistrationError(
            f"{_describe(func)} is marked by @register already. The mark sits on the function itself, so a second one "
            "would change it for every class that uses the function: keep one decorator, or define a new method."
        )
    mark = {
        "dispatch_mode": spec.dispatch_mode,
        "execute_mode": spec.execute_mode,
        "blocking": spec.blocking,
        "materialize_futures": spec.materialize_futures,
    }
    try:
        setattr(func, MAGIC_ATTR, mark)
    except (AttributeError, TypeError) as error:
        raise RegistrationError(
            f"@register cannot mark {_describe(func)}: a {type(func).__name__} takes no attributes. Call it from a "
            "method written in Python and mark that."
        ) from error
    return func


def _checked_dispatch_mode(mode: object) -> Dispatch | DispatchPair:
    if isinstance(mode, Dispatch):
        if mode not in Dispatch:
            raise RegistrationError(
                f"@register got the unknown dispatch mode {mode.name}: it was removed. Expected one of "
                f"{', '.join(Dispatch.names())}."
            )
        return mode
    if isinstance(mode, Mapping):
        missing = [key for key in _PAIR_KEYS if key not in mode]
        unknown = [key for key in mode if key not in _PAIR_KEYS]
        if missing or unknown:
            faults = [f"{key!r} is missing" for key in missing] + [f"{key!r} is unknown" for key in unknown]
            raise RegistrationError(
                f"@register got a dispatch_mode mapping that cannot work: {', '.join(faults)}. Expected exactly the "
                "keys 'dispatch_fn' and 'collect_fn'."
            )
        for key in _PAIR_KEYS:
            if not callable(mode[key]):
                raise RegistrationError(
                    f"@register got a dispatch_mode mapping whose {key!r} cannot be called: expected a function, got "
                    f"{mode[key]!r} of type {type(mode[key]).__name__}."
                )
        return _pair(mode)
    hint = ""
    if isinstance(mode, str):
        near = [mode.upper()] if Dispatch.from_name(mode) else near_names(mode, Dispatch.names())
        hint = f" Did you mean {' or '.join(f'Dispatch.{name}' for name in near)}?" if near else ""
    raise RegistrationError(
        f"@register got dispatch_mode={mode!r} of type {type(mode).__name__}. Expected a member of "
        f"dask_controller.Dispatch or a mapping with the keys 'dispatch_fn' and 'collect_fn'.{hint}"
    )


def _checked_execute_mode(mode: object) -> Execute:
    if isinstance(mode, Execute) and mode in Execute:
        return mode
    raise RegistrationError(
        f"@register got execute_mode={mode!r} of type {type(mode).__name__}. Expected a member of "
        f"dask_controller.Execute: {', '.join(f'Execute.{name}' for name in Execute.names())}."
    )


def _checked_flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise RegistrationError(f"@register got {name}={value!r} of type {type(value).__name__}. Expected True or False.")


def _pair(mode: Mapping[str, Any]) -> DispatchPair:
    return {"dispatch_fn": mode["dispatch_fn"], "collect_fn": mode["collect_fn"]}


M = TypeVar("M", Dispatch, Execute)


def _member(enum: type[M], value: object, func: object) -> M:
    """Our member for `value`: itself, or the namesake of another library's member."""
    if isinstance(value, enum):
        return value
    name = getattr(value, "name", None)
    member = enum.from_name(name) if isinstance(name, str) else None
    if member is None:
        shown = name if isinstance(name, str) else repr(value)
        raise RegistrationError(
            f"The mark of {_describe(func)} asks for the unknown {enum.__name__} mode {shown}. Expected one of "
            f"{', '.join(enum.names())}; add a mode of your own with "
            f"{'register_dispatch_mode' if enum is Dispatch else 'Execute.register'}."
        )
    return member


def _describe(func: object) -> str:
    inner = getattr(func, "__func__", None) or getattr(func, "fget", None) or func
    name = getattr(inner, "__qualname__", None)
    return name if isinstance(name, str) else repr(func)
