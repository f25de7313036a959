"""Several classes in one process per rank.

Owns :class:`ColocatedWorker`, the class that builds one worker per role and lets them see each other, and the
functions that make such a class out of roles. The group reaches a role's methods by name (``role.method``), so no
behaviour is generated; the marked forwarders exist for code that looks at the class.
"""

from __future__ import annotations

import inspect
import keyword
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from dask_controller.dispatch.register import MAGIC_ATTR, registered_methods
from dask_controller.errors import RegistrationError
from dask_controller.group.class_args import ClassWithInitArgs, DaskClassWithInitArgs
from dask_controller.worker.base import Worker

__all__ = [
    "ColocatedWorker",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "is_forwarder",
    "role_classes",
]

#: Attribute that tells a forwarder from a method of the user's own.
_FORWARDS = "_dask_controller_forwards"


class ColocatedWorker(Worker):
    """Builds one worker per role in this process; each is an attribute here and sees the others.

    A subclass that defines ``__init__`` calls ``super().__init__()`` first.
    """

    _role_specs: ClassVar[Mapping[str, ClassWithInitArgs]] = {}

    def __init__(self) -> None:
        super().__init__()
        for role, spec in self._role_specs.items():
            worker = spec()
            self.fused_worker_dict[role] = worker
            setattr(self, role, worker)
        for worker in self.fused_worker_dict.values():
            # One dict for all: a role that adds a sibling later shows it to everybody.
            worker.fused_worker_dict = self.fused_worker_dict


def _forwarder(role: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        async def forward_async(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

        out: Callable[..., Any] = forward_async
    else:

        def forward(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

        out = forward
    out.__name__ = out.__qualname__ = f"{role}_{name}"
    out.__doc__ = function.__doc__
    setattr(out, MAGIC_ATTR, getattr(function, MAGIC_ATTR))
    setattr(out, _FORWARDS, role)
    return out


def is_forwarder(cls: type, name: str) -> bool:
    """Whether ``cls.name`` only passes calls on to a role."""
    return hasattr(inspect.getattr_static(cls, name, None), _FORWARDS)


def _checked(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    if not class_dict:
        raise RegistrationError("a colocated class needs at least one role, got an empty mapping")
    taken: dict[str, str] = {}
    for role, spec in class_dict.items():
        if not isinstance(role, str) or not role.isidentifier() or keyword.iskeyword(role):
            raise RegistrationError(f"a role is a Python name, such as 'actor'; got {role!r}")
        if not isinstance(spec, ClassWithInitArgs):
            raise RegistrationError(
                f"role {role!r} needs a DaskClassWithInitArgs, got {type(spec).__name__}: wrap the class and its "
                "arguments in one"
            )
        if hasattr(Worker, role):
            raise RegistrationError(f"role {role!r} has the name of a member of Worker; choose another")
        for name in registered_methods(spec.cls):
            full = f"{role}_{name}"
            if full in taken:
                raise RegistrationError(f"roles {taken[full]!r} and {role!r} both give a method {full!r}; rename one")
            taken[full] = role
    return dict(class_dict)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[ColocatedWorker]:
    """The class that holds one worker per role; subclass it to write methods over several roles.

    Parameters
    ----------
    class_dict : mapping of str to DaskClassWithInitArgs
        Role to class.

    Returns
    -------
    type
        A :class:`Worker`. In a subclass, ``self.actor`` is the worker of role ``"actor"``, and
        ``self.fused_worker_dict`` maps roles to workers.

    Raises
    ------
    RegistrationError
        A role is no Python name, has no class, or two roles give the same method name.
    """
    roles = _checked(class_dict)
    namespace: dict[str, Any] = {
        "_role_specs": roles,
        "__doc__": f"Roles {', '.join(roles)} in one process.",
        "__module__": __name__,
    }
    for role, spec in roles.items():
        for name in registered_methods(spec.cls):
            namespace[f"{role}_{name}"] = _forwarder(role, name, getattr(spec.cls, name))
    name = "ColocatedWorker_" + "_".join(roles)
    return types.new_class(name, (ColocatedWorker,), exec_body=lambda ns: ns.update(namespace))


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> DaskClassWithInitArgs:
    """Put several classes into one process per rank.

    Parameters
    ----------
    class_dict : mapping of str to DaskClassWithInitArgs
        Role to class with its arguments.

    Returns
    -------
    DaskClassWithInitArgs
        For :class:`DaskWorkerGroup`. The group's methods are reached as ``group.spawn(roles)[role].method()``,
        ``group.role_method()`` or ``group.role.method()``.
    """
    out = DaskClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))
    for spec in class_dict.values():
        if isinstance(spec, DaskClassWithInitArgs):
            out.options.update(spec.options)
            for resource, amount in spec.additional_resources.items():
                out.additional_resources[resource] = max(amount, out.additional_resources.get(resource, 0))
    return out


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> DaskClassWithInitArgs:
    """As :func:`create_colocated_worker_cls`, marked as fused: ``group.fuse(roles)`` makes the roles attributes."""
    out = create_colocated_worker_cls(class_dict)
    out.fused_worker_used = True
    return out


def role_classes(cls: type) -> dict[str, type]:
    """Role to class, for a colocated class or a subclass of one; empty for any other class."""
    specs: Mapping[str, ClassWithInitArgs] = getattr(cls, "_role_specs", {}) if issubclass(cls, ColocatedWorker) else {}
    return {role: spec.cls for role, spec in specs.items()}
