"""The pure parts of the GRPO demo: a task, a model, an algorithm, a learner, and what is written to disk.

Owns everything of ``examples/grpo_arithmetic.py`` that needs no cluster. Does not know ``dask_controller``: the
roles that run on ranks, and the program that drives them, are in ``examples/grpo_arithmetic.py``;
``examples/grpo_single_process.py`` drives the same parts in one process.

=================  =========================================================================
``arithmetic``     the problems, characters to tokens, the verifiable reward
``schedule``       which problems and seeds each step uses, which rank gets which rows
``model``          a small transformer, sampling, log-probabilities
``algorithm``      GRPO: group-relative advantages, clipped objective, KL estimate
``learner``        model + optimiser; one update, with gradients summed over ranks
``settings``       everything that decides the numbers of a run
``run_files``      checkpoints, ``metrics.jsonl``, the plot
``display``        the progress bars; stays on the controller
=================  =========================================================================
"""

from __future__ import annotations

import importlib

import cloudpickle

__all__ = ["ship_by_value"]


def ship_by_value() -> None:
    """Let cloudpickle send this folder's classes and functions as code rather than as an import.

    Dask hosts need not have the examples on their path: what a script defines in ``__main__`` travels by value
    anyway, and this does the same for the modules beside the script. A module counts only under its own name when
    Dask looks it up, so each is registered, not just the package.
    """
    for name in ("arithmetic", "schedule", "model", "algorithm", "learner", "settings", "run_files"):
        cloudpickle.register_pickle_by_value(importlib.import_module(f"{__name__}.{name}"))
