"""What every benchmark needs: clusters of one-thread hosts, timing in turns, a table, a file.

Figures are medians, and the peers are timed in turns with ours, so that a ratio holds when the machine's speed drifts.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

RESULTS = Path(__file__).with_name("results")


@dataclass
class Table:
    """Rows of one benchmark, printed as text and kept as JSON."""

    title: str
    columns: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Add a row and print it at once, for somebody is waiting."""
        if not self.rows:
            print(f"\n{self.title}\n" + "  ".join(f"{name:>{self._width(name)}}" for name in self.columns))
        self.rows.append(row)
        print("  ".join(f"{self._text(row.get(name)):>{self._width(name)}}" for name in self.columns), flush=True)

    @staticmethod
    def _width(name: str) -> int:
        return max(len(name), 9)

    @staticmethod
    def _text(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


@contextmanager
def cluster(n_workers: int) -> Iterator[Client]:
    """Hosts as processes of one thread each, and a client that talks to them directly."""
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit=0,
        ) as local,
        Client(local, direct_to_workers=True) as client,
    ):
        client.wait_for_workers(n_workers, timeout=60)
        yield client


def in_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, calls: int, warmup: int = 5
) -> dict[str, list[float]]:
    """Time contenders in turns.

    Parameters
    ----------
    contenders : mapping of str to callable
        What to time.
    rounds : int
        How often every contender has its turn.
    calls : int
        Calls in one turn.
    warmup : int
        Uncounted calls of each contender before the first turn.

    Returns
    -------
    dict of str to list of float
        Seconds of every counted call.
    """
    for function in contenders.values():
        for _ in range(warmup):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            for _ in range(calls):
                start = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3


def p95_ms(seconds: Sequence[float]) -> float:
    """The value that 95 % of the calls stay below, in milliseconds."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))] * 1e3


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    packages = ("dask", "distributed", "torch", "tensordict", "numpy", "dask-controller")
    return {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        **{name: version(name) for name in packages},
    }


def save(tables: Sequence[Table]) -> Path:
    """Write all tables of a run to one JSON file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    document = {"environment": environment(), "tables": {table.title: table.rows for table in tables}}
    path.write_text(json.dumps(document, indent=1))
    return path
