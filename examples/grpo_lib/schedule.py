"""Which problems and random seeds each step uses, and which rank gets which rows.

Owns every random choice outside the model. All of them follow from the run's seed, the phase and the step alone, so a
run that is continued at step k makes the choices an uninterrupted run makes there, and no generator state is saved.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["deal_rows", "draw_problems", "row_seeds"]

#: Keeps the streams of the phases apart. 0 is taken by :func:`grpo_lib.arithmetic.split_problems`.
_PHASES = {"warmup": 1, "train": 2, "samples": 3}


def draw_problems(seed: int, phase: str, step: int, num_problems: int, num_drawn: int) -> np.ndarray:
    """Return the problems of one step, none of them twice.

    Parameters
    ----------
    seed : int
        The run's seed.
    phase : {"warmup", "train"}
    step : int
    num_problems, num_drawn : int
        How many there are, and how many to take.

    Returns
    -------
    numpy.ndarray
        Shape ``(num_drawn,)``, int64 indices.
    """
    return np.random.default_rng((seed, _PHASES[phase], step)).choice(num_problems, num_drawn, replace=False)


def row_seeds(seed: int, step: int, num_rows: int) -> Tensor:
    """Return one seed for each row that is sampled in a step, shape ``(num_rows,)``, int64."""
    drawn = np.random.default_rng((seed, _PHASES["samples"], step)).integers(0, 2**63 - 1, num_rows)
    return torch.from_numpy(drawn)


def deal_rows(num_rows: int, num_ranks: int, num_mini_batches: int) -> tuple[Tensor, Tensor]:
    """Order rows so that every mini-batch holds the same rows, however many ranks there are.

    A batch is cut into one run of rows per rank, and each rank cuts its run into mini-batches. All ranks' k-th
    mini-batches together make one optimiser step: here they are the k-th run of rows of the whole batch. Where
    that does not divide, rows are repeated; they must be masked out.

    Parameters
    ----------
    num_rows, num_ranks, num_mini_batches : int
        1 or more; at least as many rows as mini-batches.

    Returns
    -------
    order : Tensor
        Shape ``(n,)``, int64, where n is a multiple of ``num_ranks * num_mini_batches``: the row for each place.
    is_first : Tensor
        Shape ``(n,)``, bool: False where a row is repeated.

    Examples
    --------
    >>> order, is_first = deal_rows(6, num_ranks=2, num_mini_batches=2)
    >>> order.view(2, 2, 2).tolist()  # rank, mini-batch, row
    [[[0, 1], [3, 4]], [[2, 2], [5, 5]]]
    >>> is_first.view(2, 2, 2).tolist()
    [[[True, True], [True, True]], [[True, False], [True, False]]]
    """
    bounds = [index * num_rows // num_mini_batches for index in range(num_mini_batches + 1)]
    starts, stops = torch.tensor(bounds[:-1]).unsqueeze(1), torch.tensor(bounds[1:]).unsqueeze(1)
    longest = int((stops - starts).max())
    # Rows of a mini-batch, one after the other, up to a length that every rank gets an equal share of.
    places = starts + torch.arange(-(-longest // num_ranks) * num_ranks)
    order, is_first = torch.minimum(places, stops - 1), places < stops

    def by_rank(values: Tensor) -> Tensor:
        return values.view(num_mini_batches, num_ranks, -1).transpose(0, 1).flatten()

    return by_rank(order), by_rank(is_first)
