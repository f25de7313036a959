"""The names of the dispatch and execution modes: two enumerations that users may extend.

Owns the members and their identity, in this process and across pickling. Does not know what a mode *does*: the
functions behind a mode are in :mod:`dask_controller.dispatch.registry`.

The enumerations are not :class:`enum.Enum`, because that one is closed once its class body has run.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from dask_controller.errors import DuplicateModeError, RegistrationError, UnknownModeError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dispatch", "Execute", "ExtensibleEnum"]

# Unbound, as in typeshed's EnumMeta: a metaclass method may not narrow its first argument to classes of its own.
T = TypeVar("T")

# Members are made at import time and while messages are unpickled, which several threads of a host do at once.
_lock = threading.RLock()


def near_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Names of `known` that `name` may be a slip of, best first."""
    return tuple(difflib.get_close_matches(name.upper(), list(known), n=3, cutoff=0.6))


def _restore(cls: type[ExtensibleEnum], name: str, value: int) -> ExtensibleEnum:
    """Find, or make, the member a pickle stands for."""
    with _lock:
        member = cls._members.get(name)
        if member is None:
            # The other process registered it and this one has not, or not yet: see `register`.
            member = cls._add(name, value)
            cls._provisional.add(name)
    return member


class _ExtensibleEnumMeta(type):
    """Gives the class itself iteration, ``in``, ``[name]`` and ``.NAME``."""

    _members: dict[str, Any]

    def __iter__(cls: type[T]) -> Iterator[T]:
        return iter(list(_members_of(cls).values()))

    def __len__(cls) -> int:
        return len(cls._members)

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, item: object) -> bool:
        if isinstance(item, str):
            return item in cls._members
        return isinstance(item, ExtensibleEnum) and cls._members.get(item.name) is item

    def __getitem__(cls: type[T], name: str) -> T:
        try:
            return _members_of(cls)[name]
        except (KeyError, TypeError):
            raise _unknown(cls, name) from None

    # Only reached when normal look-up fails, so members live in one table and nowhere else. It also tells mypy
    # that `Dispatch.MINE`, registered at run time, is a Dispatch.
    def __getattr__(cls: type[T], name: str) -> T:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        try:
            return _members_of(cls)[name]
        except KeyError:
            raise AttributeError(str(_unknown(cls, name)), name=name, obj=cls) from None

    def __setattr__(cls, name: str, value: object) -> None:
        if name in cls._members:
            raise AttributeError(f"{cls.__name__}.{name} is a member of an enumeration and cannot be replaced")
        super().__setattr__(name, value)

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *cls._members})

    def __repr__(cls) -> str:
        return f"<enumeration {cls.__name__!r}: {', '.join(cls._members)}>" if cls._members else super().__repr__()


def _members_of(cls: type[T]) -> dict[str, T]:
    return cast("dict[str, T]", cls.__dict__["_members"])


def _unknown(cls: type, name: object) -> UnknownModeError:
    known: dict[str, object] = cls.__dict__["_members"]
    near = near_names(name, known) if isinstance(name, str) else ()
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return UnknownModeError(
        f"{cls.__name__} has no member {name!r}.{hint} Expected one of {', '.join(known)}; "
        f"{cls.__name__}.register(name) adds another.",
        name if isinstance(name, str) else repr(name),
        near,
    )


class ExtensibleEnum(metaclass=_ExtensibleEnumMeta):
    """Base of :class:`Dispatch` and :class:`Execute`: an enumeration that can grow while the program runs.

    Members are compared by identity. Copying, deep-copying and pickling give the same object back; unpickling a
    member in a process that does not know its name yet registers the name there.

    Notes
    -----
    ``cls[name]`` and ``name in cls`` take the name as it is; ``register``, ``remove`` and ``from_name`` upper-case
    what they are given. ``value`` counts members in the order of their registration. It is kept through pickling
    where it is still free in the other process, so that equal programs agree on it, but only names identify.
    """

    __slots__ = ("__weakref__", "_name", "_value")

    _members: ClassVar[dict[str, Any]] = {}
    _provisional: ClassVar[set[str]] = set()
    _next_value: ClassVar[int] = 0

    _name: str
    _value: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._members = {}
        cls._provisional = set()
        cls._next_value = 0

    def __new__(cls, name: str) -> Self:
        """``Dispatch("DP_COMPUTE")`` looks a member up, as a closed enumeration does by value."""
        return cls[name]

    @classmethod
    def _add(cls, name: str, value: int | None = None) -> Self:
        taken = {member.value for member in cls._members.values()}
        if value is None or value in taken:
            value = cls._next_value
        member = object.__new__(cls)
        object.__setattr__(member, "_name", name)
        object.__setattr__(member, "_value", value)
        cls._members[name] = member
        cls._next_value = max(cls._next_value, value + 1)
        return member

    @classmethod
    def register(cls, name: str) -> Self:
        """Add a member.

        Parameters
        ----------
        name : str
            Its name; upper-cased.

        Returns
        -------
        member
            The new member, also reachable as ``cls.NAME`` and ``cls["NAME"]``.

        Raises
        ------
        DuplicateModeError
            The name is taken. It is a ``ValueError``.
        RegistrationError
            `name` is not a string, or empty.

        Notes
        -----
        A member that came in through unpickling before this process registered it is handed out by the first
        ``register``: the order in which a host imports a module and receives a message must not matter.
        """
        if not isinstance(name, str) or not name.strip():
            raise RegistrationError(f"{cls.__name__}.register needs a name. Expected a non-empty string, got {name!r}.")
        key = name.upper()
        with _lock:
            known = cls._members.get(key)
            if known is None:
                return cls._add(key)
            if key in cls._provisional:
                cls._provisional.discard(key)
                return cast("Self", known)
        raise DuplicateModeError(
            f"{cls.__name__}.{key} is already registered. Use the member that exists ({cls.__name__}[{key!r}]), "
            f"choose another name, or drop it first with {cls.__name__}.remove({key!r}).",
            key,
        )

    @classmethod
    def remove(cls, name: str) -> Self:
        """Drop a member and return it; an unknown name is an :class:`~dask_controller.errors.UnknownModeError`.

        The object stays what it was for those who still hold it, but it is no member any more: unpickling it, or
        registering the name again, makes a new one.
        """
        key = name.upper() if isinstance(name, str) else name
        with _lock:
            if key not in cls._members:
                raise _unknown(cls, name)
            cls._provisional.discard(key)
            member: Self = cls._members.pop(key)
            return member

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """Return the member of this name, in any case of letters, or None."""
        return cls._members.get(name.upper()) if isinstance(name, str) else None

    @classmethod
    def names(cls) -> list[str]:
        """Names of all members, in the order of their registration."""
        return list(cls._members)

    @classmethod
    def values(cls) -> list[Self]:
        """Return all members, in the order of their registration."""
        return list(cls._members.values())

    @property
    def name(self) -> str:
        """The name, in upper case."""
        return self._name

    @property
    def value(self) -> int:
        """A number that no other member has in this process."""
        return self._value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is a member of an enumeration: {name!r} cannot be set")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self._name}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self._name}"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self._name, self._value)


class Dispatch(ExtensibleEnum):
    """How the arguments of a call go to the ranks, and how their results come back.

    Examples
    --------
    >>> Dispatch.DP_COMPUTE_PROTO.name
    'DP_COMPUTE_PROTO'
    >>> "ONE_TO_ALL" in Dispatch
    True
    >>> Dispatch.from_name("nope") is None
    True
    """

    #: Runs on rank 0 only and returns its single result.
    RANK_ZERO: ClassVar[Dispatch]
    #: Every rank gets the same value; a list of results.
    ONE_TO_ALL: ClassVar[Dispatch]
    #: The arguments pass through as they are; a list of results.
    ALL_TO_ALL: ClassVar[Dispatch]
    #: Every argument already is a list with one element per rank.
    DP_COMPUTE: ClassVar[Dispatch]
    #: Every argument is a batch, cut into one chunk per rank; results are joined.
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    #: As DP_COMPUTE_PROTO, with a function sent to all ranks in front.
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    #: Arguments as DP_COMPUTE_PROTO; a list of results.
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    #: Called on the rank itself, never through the group.
    DIRECT_ROLLOUT_METHOD: ClassVar[Dispatch]


class Execute(ExtensibleEnum):
    """Which ranks run a call."""

    #: Every rank.
    ALL: ClassVar[Execute]
    #: Rank 0 only.
    RANK_ZERO: ClassVar[Execute]


for _enum in (Dispatch, Execute):
    for _name in _enum.__annotations__:
        _enum.register(_name)
