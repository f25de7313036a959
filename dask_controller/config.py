"""Settings: defaults from ``controller.yaml``, read through ``dask.config`` under the key ``controller``.

Owns the names of the settings, their defaults, and the check of a value at the moment it is read, so that a wrong
one is reported by its name and not by what it breaks later. Does not own what a setting means to the code that asks
for it, and never writes a file: Dask's own search path finds the user's.
"""

from __future__ import annotations

import difflib
import math
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast, get_args

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

__all__ = [
    "DEFAULTS",
    "PREFIX",
    "Route",
    "get",
    "get_nbytes",
    "get_port_range",
    "get_route",
    "get_seconds",
    "parse_seconds",
]

#: How calls reach the hosts.
Route = Literal["auto", "direct", "scheduler"]

#: The key in ``dask.config`` under which every setting stands.
PREFIX = "controller"

with Path(__file__).with_name("controller.yaml").open(encoding="utf-8") as _file:
    _document: dict[str, dict[str, object]] = yaml.safe_load(_file)

#: The value of every setting where the user sets none.
DEFAULTS: dict[str, object] = dict(_document[PREFIX])

# Values that the user has set, in whichever way, stay: only defaults are laid under them.
dask.config.update_defaults(_document)


def get(name: str) -> object:
    """Return a setting as it stands, unchecked.

    Parameters
    ----------
    name : str
        Name without the prefix, such as ``"start-timeout"``; underscores are as good as hyphens.

    Returns
    -------
    object
        What the user set, else the default.

    Raises
    ------
    ValueError
        There is no such setting; names the near ones.
    """
    known = name.replace("_", "-")
    if known not in DEFAULTS:
        near = difflib.get_close_matches(known, DEFAULTS, n=3) or sorted(DEFAULTS)
        raise ValueError(f"there is no setting {PREFIX}.{name}; near it: {', '.join(near)}")
    return cast(object, dask.config.get(f"{PREFIX}.{known}", DEFAULTS[known]))


def get_seconds(name: str) -> float | None:
    """Return a setting that is a length of time.

    Parameters
    ----------
    name : str
        Name without the prefix.

    Returns
    -------
    float or None
        Seconds; None where the setting is null, which means no limit.

    Raises
    ------
    ValueError
        The value is no length of time, is negative, or is null where a limit is needed.

    Examples
    --------
    >>> get_seconds("connect-timeout")
    5.0
    """
    value = get(name)
    if value is None and DEFAULTS[name.replace("_", "-")] is None:
        return None
    return parse_seconds(value, _origin(name))


def parse_seconds(value: object, what: str) -> float:
    """Return a length of time in seconds.

    Parameters
    ----------
    value : object
        A number of seconds, a text such as ``"300ms"`` or ``"2 minutes"``, or a `datetime.timedelta`.
    what : str
        What the value is, for the error message.

    Returns
    -------
    float
        Seconds, finite and not negative.

    Raises
    ------
    ValueError
        The value is none of these.

    Examples
    --------
    >>> parse_seconds("2 minutes", "timeout")
    120.0
    """
    seconds = math.nan
    # True is a number to Python, but nobody means one second by it.
    if isinstance(value, (int, float, str, timedelta)) and not isinstance(value, bool):
        try:
            seconds = float(parse_timedelta(value, default="s"))
        except (ValueError, LookupError):
            pass
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(
            f"{what} is {value!r}; expected a length of time that is not negative: seconds, or a text such as "
            '"300ms", "2 minutes"'
        )
    return seconds


def get_nbytes(name: str) -> int:
    """Return a setting that is a size in memory.

    Parameters
    ----------
    name : str
        Name without the prefix.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        The value is no size, or is negative.

    Examples
    --------
    >>> get_nbytes("inline-limit")
    65536
    """
    value = get(name)
    nbytes = -1
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            nbytes = int(parse_bytes(value))
        except (ValueError, OverflowError):
            pass
    if nbytes < 0:
        raise ValueError(f'{_origin(name)} is {value!r}; expected a size: bytes, or a text such as "64 kiB"')
    return nbytes


def get_route() -> Route:
    """Return how calls are to reach the hosts.

    Returns
    -------
    {"auto", "direct", "scheduler"}
        The setting ``route``.

    Raises
    ------
    ValueError
        The value is none of the three.
    """
    value = get("route")
    if value not in get_args(Route):
        raise ValueError(f"{_origin('route')} is {value!r}; expected one of {', '.join(get_args(Route))}")
    return cast(Route, value)


def get_port_range() -> tuple[int, int] | None:
    """Return the ports from which rank 0 may take ``MASTER_PORT``.

    Returns
    -------
    tuple of int or None
        First and last, both included; None for any free port.

    Raises
    ------
    ValueError
        The value is no pair of ports in rising order.
    """
    value = get("master-port-range")
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2:
        first, last = value
        if type(first) is int and type(last) is int and 0 < first <= last < 65536:
            return first, last
    raise ValueError(
        f"{_origin('master-port-range')} is {value!r}; expected [first, last] with 1 <= first <= last <= 65535, or null"
    )


def _origin(name: str) -> str:
    """Return how a message names a setting: its key and its environment variable."""
    known = name.replace("_", "-")
    return f"setting {PREFIX}.{known} (environment DASK_{PREFIX.upper()}__{known.upper().replace('-', '_')})"
