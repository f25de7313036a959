"""A model and its optimiser, trained by one rank of many.

Owns the weights, the optimiser and how ranks agree on a gradient. Does not know where the batches come from, nor
``dask_controller``: it needs ``torch.distributed`` only, and not even that on a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithm import grpo_token_loss
from .model import ModelConfig, Transformer, response_log_probs

__all__ = ["LearnerConfig", "Learner", "all_reduce_sum_"]


def all_reduce_sum_(tensors: Sequence[Tensor], bucket_nbytes: int = 4 * 2**20) -> None:
    """Replace each tensor, in place, by its sum over all ranks.

    Parameters
    ----------
    tensors : sequence of Tensor
        float32; the same shapes in the same order on every rank.
    bucket_nbytes : int
        Tensors are laid end to end into buffers of about this size, and one message is sent per buffer: a message for
        every bias would cost more than the sums. A larger tensor gets a buffer of its own.

    Notes
    -----
    A collective: every rank must call it. Without a process group, or with one rank, the tensors stay as they are. All
    ranks end with the same bits, so weights that start equal stay equal.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    bucket: list[Tensor] = []
    filled_nbytes = 0
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        filled_nbytes += tensor.nbytes
        is_last = index == len(tensors) - 1
        if is_last or filled_nbytes + tensors[index + 1].nbytes > bucket_nbytes:
            flat = torch.cat([member.flatten() for member in bucket])
            dist.all_reduce(flat)
            for member, summed in zip(bucket, flat.split([member.numel() for member in bucket]), strict=True):
                member.copy_(summed.view_as(member))
            bucket, filled_nbytes = [], 0


@dataclass(frozen=True)
class LearnerConfig:
    """How a :class:`Learner` trains.

    Parameters
    ----------
    warmup_learning_rate, learning_rate : float
        Of AdamW, in the supervised and in the GRPO phase.
    weight_decay : float
    max_gradient_norm : float
        The mean gradient of all ranks is scaled down to this norm where it is longer.
    num_passes : int
        Optimiser passes over each batch of samples.
    num_mini_batches : int
        Optimiser steps per pass.
    clip, kl_coefficient : float
        See :func:`grpo_lib.algorithm.grpo_token_loss`.
    """

    warmup_learning_rate: float = 1e-3
    learning_rate: float = 3e-4
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    num_passes: int = 2
    num_mini_batches: int = 4
    clip: float = 0.2
    kl_coefficient: float = 0.01


class Learner:
    """One rank's copy of the model, and its AdamW state.

    Parameters
    ----------
    model_config : ModelConfig
    config : LearnerConfig
    seed : int
        The same on all ranks: they start from the same weights, and apply the same gradients ever after.
    """

    def __init__(self, model_config: ModelConfig, config: LearnerConfig, seed: int) -> None:
        self.config = config
        self.model = Transformer(model_config, seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def warm_up(self, prompts: Tensor, answers: Tensor, mask: Tensor) -> dict[str, float]:
        """Take one supervised step towards the right answers.

        Parameters
        ----------
        prompts, answers : Tensor
            This rank's rows, shapes ``(rows, prompt_length)`` and ``(rows, response_length)``, int64.
        mask : Tensor
            Shape of `answers`, float32: 1 for tokens that count.

        Returns
        -------
        dict of str to float
            ``loss`` (mean cross-entropy per token of all ranks, in nats) and ``gradient_norm``.
        """

        def token_loss() -> tuple[Tensor, dict[str, Tensor]]:
            loss_sum = -(response_log_probs(self.model, prompts, answers) * mask).sum()
            return loss_sum, {"loss": loss_sum.detach(), "tokens": mask.sum()}

        return self._step(token_loss, self.config.warmup_learning_rate)

    def update(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Train on one batch of samples by GRPO.

        Parameters
        ----------
        batch : mapping of str to Tensor
            This rank's rows; the same number on every rank. ``prompts`` and ``responses`` (int64);
            ``response_mask``, ``old_log_probs`` and ``reference_log_probs`` (float32, shape of the responses);
            ``advantages`` (float32, shape ``(rows,)``).

        Returns
        -------
        dict of str to float
            Means over the tokens of all ranks and all steps: ``loss``, ``kl``, ``clipped`` (share of tokens), and
            ``gradient_norm``.
        """
        num_rows = len(batch["prompts"])
        if num_rows % self.config.num_mini_batches:
            raise ValueError(f"{num_rows} rows do not part into {self.config.num_mini_batches} equal mini-batches")
        size = num_rows // self.config.num_mini_batches
        reports = []
        for _ in range(self.config.num_passes):
            for start in range(0, num_rows, size):
                part = {name: column[start : start + size] for name, column in batch.items()}
                reports.append(self._step(partial(self._grpo_loss, part), self.config.learning_rate))
        return {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}

    def _grpo_loss(self, part: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return grpo_token_loss(
            response_log_probs(self.model, part["prompts"], part["responses"]),
            part["old_log_probs"],
            part["reference_log_probs"],
            part["advantages"],
            part["response_mask"],
            clip=self.config.clip,
            kl_coefficient=self.config.kl_coefficient,
        )

    def _step(
        self, token_loss: Callable[[], tuple[Tensor, dict[str, Tensor]]], learning_rate: float
    ) -> dict[str, float]:
        """Take one optimiser step on the mean over the tokens of all ranks.

        Sums, not means, are added over ranks: a rank with fewer tokens then weighs as much less as it should, and n
        ranks take the very step that one rank with all the rows would take.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, sums = token_loss()
        loss_sum.backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        summed = torch.stack(list(sums.values())).float()
        all_reduce_sum_([*gradients, summed])
        totals = dict(zip(sums, summed.tolist(), strict=True))
        num_tokens = max(totals.pop("tokens"), 1.0)
        for gradient in gradients:
            gradient /= num_tokens
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return {**{name: total / num_tokens for name, total in totals.items()}, "gradient_norm": float(norm)}

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue: weights and optimiser state, as copies."""
        return {
            "model": {name: value.detach().clone() for name, value in self.model.state_dict().items()},
            "optimizer": _clone(self.optimizer.state_dict()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned; `state` is not changed and not kept."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(_clone(state["optimizer"]))


def _clone(value: Any) -> Any:
    """Copy nested dicts and lists of tensors, so that later steps do not write into what was handed out."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clone(item) for item in value]
    return value
