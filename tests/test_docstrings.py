"""Docstrings follow numpydoc and fit the code they stand on."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator

import pytest

import dask_controller

# Part of the `lint` extra, not of `test`.
validate = pytest.importorskip("numpydoc.validate").validate

#: What is wrong in a docstring that is there. That every public name has one is for ``test_public_api.py`` to see;
#: types of parameters stand in the signature, where mypy checks them.
CHECKS = {
    "GL05",  # tabs
    "GL06",  # an unknown section
    "GL07",  # sections out of order
    "GL10",  # a directive without its colons
    "PR02",  # documents a parameter that is not in the signature
    "PR03",  # parameters in another order than the signature
    "PR05",  # a type that ends with a full stop
    "PR07",  # a parameter without a description
    "PR10",  # no space before the colon
    "RT03",  # a return value without a description
    "SS01",  # no summary
    "SS02",  # a summary that does not start with a capital
    "SS03",  # a summary that does not end with a full stop
}


def module_names() -> list[str]:
    return [module.name for module in pkgutil.walk_packages(dask_controller.__path__, prefix="dask_controller.")]


def documented(module: types.ModuleType) -> Iterator[str]:
    """Yield the dotted names of what a module defines, with the methods and properties of its classes."""

    def has_docstring(value: object) -> bool:
        return bool((getattr(value, "__doc__", None) or "").strip())

    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if has_docstring(value):
            yield f"{module.__name__}.{name}"
        if inspect.isclass(value):
            for member, attribute in vars(value).items():
                function = attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute
                if (isinstance(function, property) or inspect.isfunction(function)) and has_docstring(function):
                    yield f"{module.__name__}.{name}.{member}"


def faults(name: str) -> list[str]:
    return [
        f"{name}: {code} {text}"
        for code, text in validate(name)["errors"]
        # numpydoc takes every `cls` for that of a class method and leaves it out of the signature.
        if code in CHECKS and text != "Unknown parameters {'cls'}"
    ]


@pytest.mark.parametrize("name", module_names())
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip() or not vars(module).get("__file__"), f"{name} does not say what it owns"
    assert [fault for documented_name in documented(module) for fault in faults(documented_name)] == []


class Faulty:
    """Stands here to be found."""

    def method(self, rows: int) -> int:
        """count rows

        Parameters
        ----------
        columns : int
            Not a parameter.
        """
        return rows


def test_faults_are_found() -> None:
    name = f"{__name__}.Faulty.method"
    assert name in documented(importlib.import_module(__name__))
    assert {fault.split()[1] for fault in faults(name)} == {"PR02", "SS02", "SS03"}
