"""A class and the arguments to build it with, later and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask_controller.errors import RegistrationError

__all__ = ["ClassWithInitArgs", "DaskClassWithInitArgs"]


class ClassWithInitArgs:
    """Deferred construction: what to build, built when called.

    Parameters
    ----------
    cls : type
        Class of the rank's object.
    *args, **kwargs
        Arguments of its ``__init__``. Every rank gets its own copy.

    Examples
    --------
    >>> from dask_controller import ClassWithInitArgs
    >>> ClassWithInitArgs(dict, a=1)()
    {'a': 1}
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise RegistrationError(
                f"{type(self).__name__} needs a class, got {cls!r}. Give the class itself, not an instance of it"
            )
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        #: Set on classes made by ``create_colocated_worker_cls_fused`` and their subclasses.
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"dask_controller.{type(self).__name__}({self.cls.__name__})"


class DaskClassWithInitArgs(ClassWithInitArgs):
    """A rank class for :class:`DaskWorkerGroup`, with options for where its ranks may live.

    Parameters
    ----------
    cls : type
        Class of the rank's object; its methods marked with ``@register`` become methods of the group. It travels to
        the hosts by reference if they can import it, else (``__main__``, notebooks) by value.
    *args, **kwargs
        Arguments of its ``__init__``; Dask futures among them arrive as data.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}
        self.additional_resources: dict[str, float] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add Dask submit options for the actors of the ranks (``priority``, ``retries``)."""
        allowed = {"priority", "retries"}
        unknown = sorted(set(options) - allowed)
        if unknown:
            raise RegistrationError(
                f"unknown option(s) {', '.join(unknown)}; an actor's placement belongs to the pool. Known: "
                f"{', '.join(sorted(allowed))}"
            )
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for further Dask resources on every rank's host, held with the slot: ``{"NVME": 1}``."""
        for name, amount in additional_resource.items():
            if not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, (int, float)):
                raise RegistrationError(f"a resource is a name and a number, got {name!r}: {amount!r}")
            if amount <= 0:
                raise RegistrationError(f"resource {name!r} must be more than 0, got {amount!r}")
        self.additional_resources.update(additional_resource)
