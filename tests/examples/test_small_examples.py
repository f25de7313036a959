"""The small examples: each is run as a reader runs it, and prints what its text promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: File to the lines that it prints: as they are, or as a pattern.
PRINTED = {
    "01_hello_group.py": [
        "<dask_controller.DaskWorkerGroup 'greeters': Greeter on 2 rank(s), ready, route direct>",
        "['Hello, Ada! from rank 0 of 2, call 1', 'Hello, Ada! from rank 1 of 2, call 1']",
        "['Hello, Grace! from rank 0 of 2, call 2', 'Hello, Grace! from rank 1 of 2, call 2']",
        "ranks in processes of their own: True",
        "rank that answered: 0",
    ],
    "02_custom_mode.py": [
        "TO (rank 1 has 13 letters)",
        "BE (rank 1 has 13 letters)",
        "OR (rank 1 has 13 letters)",
        "NOTWITHSTANDING (rank 0 has 15 letters)",
        "NOT (rank 1 has 13 letters)",
        "TO (rank 1 has 13 letters)",
        "BE (rank 1 has 13 letters)",
    ],
    "03_uneven_batch.py": [
        re.compile(r"without padding: .*10 rows, which 3 ranks cannot share evenly.*No rank was called\."),
        "rows on each rank: [4, 4, 4]",
        "rows sent and received: 10 10",
        "squares: [0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0, 64.0, 81.0]",
        "names: abcdefghij",
        "metrics: {'rank': [0, 1, 2]}",
    ],
    "04_future_handover.py": [
        "both calls returned at once: True",
        "scores: [0.5, 10.5, 20.5, 31.5, 41.5, 51.5]",
        "rows on each producer: [3, 3]",
        "second half: [31, 41, 51]",
    ],
    "05_mesh.py": [
        "rows on ranks 0 to 3, by their first column: [[0.0, 4.0], [0.0, 4.0], [8.0, 12.0], [8.0, 12.0]]",
        "4 rows in, 4 rows out: (4, 2)",
        "equal to one matrix product: True",
    ],
    "06_colocated_roles.py": [
        "by spawn: [2.5, 2.5]",
        "by role: [2.5, 2.5]",
        "by prefix: [3.5, 3.5]",
        "on rank 0 alone: 3.5",
        "actions: [3.5, 3.5, 3.5, 3.5]",
    ],
    "07_split_pools.py": [
        "trainer: ['rank 0 of 2', 'rank 1 of 2']",
        "generator: ['rank 0 of 1']",
        "no host in both: True",
        "own rendezvous: True",
        "plain task: ran at once",
        "task that needs a slot, while the groups live: pending",
        "task that needs a slot, after they closed: had a slot",
    ],
    "08_detached_group.py": [
        "first program: [3, 3]",
        "second program finds: ['counter']",
        "second program: [7, 7]",
        "still there: ['counter']",
        "destroyed: []",
    ],
}


# Each starts up to five processes that import torch: seconds on an idle machine, a minute on a busy one.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PRINTED)
def test_prints_what_it_promises(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed, expected = done.stdout.splitlines(), PRINTED[name]
    assert len(printed) == len(expected), f"{done.stdout}\n{done.stderr}"
    for line, wanted in zip(printed, expected, strict=True):
        if isinstance(wanted, str):
            assert line == wanted
        else:
            assert wanted.fullmatch(line), line


def test_every_small_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("[0-9]*.py")) == sorted(PRINTED)


def test_they_stay_small() -> None:
    lengths = {name: len((EXAMPLES / name).read_text().splitlines()) for name in PRINTED}
    assert {name: length for name, length in lengths.items() if length > 65} == {}
