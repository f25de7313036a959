"""Run the benchmarks, print their tables, keep the figures: ``python -m benchmarks.run [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks import latency
from benchmarks.common import Table, save

BENCHMARKS: dict[str, Callable[[bool], list[Table]]] = {"latency": latency.run}


def main() -> None:
    """Parse the command line and run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; the figures scatter more")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    tables = [table for name in options.names or BENCHMARKS for table in BENCHMARKS[name](options.quick)]
    print(f"\nKept in {save(tables)}")


if __name__ == "__main__":
    main()
