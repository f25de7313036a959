"""GRPO, as functions of tensors.

Owns the numbers of the method: advantages, the clipped objective, the estimate of the divergence from the
reference. Does not know the model, the task, or ranks.

Sources
-------
Shao et al. 2024, "DeepSeekMath", section 4.1: GRPO (https://arxiv.org/abs/2402.03300).
Schulman et al. 2017, "Proximal Policy Optimization Algorithms": the clipped ratio (https://arxiv.org/abs/1707.06347).
Schulman 2020, "Approximating KL Divergence": the estimator k3 (http://joschu.net/blog/kl-approx.html).
Yu et al. 2025, "DAPO", section 3.3: averaging over tokens (https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clipped_objective", "group_advantages", "grpo_token_loss", "kl_k3"]


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Say how much better each sample did than the others of its prompt.

    Parameters
    ----------
    rewards : Tensor
        Shape ``(prompts * group_size,)``, float; the samples of one prompt are consecutive.
    group_size : int
        Samples per prompt, 2 or more.

    Returns
    -------
    Tensor
        Same shape. In each group: reward minus the mean, over the (population) standard deviation; exactly 0 where all
        rewards are equal, because then the group says nothing about what to do better.

    Raises
    ------
    ValueError
        The rewards do not part into groups of that size.

    Notes
    -----
    Shao et al. 2024, section 4.1.2. The group takes the place of a learned value function.
    """
    if group_size < 2 or rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} do not part into groups of {group_size} (2 or more)")
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    # Tested on the rewards: rounding can leave a tiny spread around the mean of equal numbers.
    is_flat = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    scaled = centred / torch.where(is_flat, 1.0, grouped.std(dim=1, keepdim=True, correction=0))
    return torch.where(is_flat, 0.0, scaled).flatten()


def clipped_objective(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return the pessimistic one of the plain and the clipped objective, to be maximised.

    ``min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)``: no gain from moving a token's probability further than
    `clip` from what it was when sampled (Schulman et al. 2017, equation 7).

    Parameters
    ----------
    ratio : Tensor
        New over old probability, any shape.
    advantages : Tensor
        Broadcasts against `ratio`.
    clip : float

    Returns
    -------
    Tensor
        Shape of `ratio`.
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def kl_k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from samples of the policy, token by token.

    ``q - log(q) - 1`` with ``q = reference / policy``: unbiased, never negative, 0 where both agree, and of lower
    variance than ``-log(q)`` (Schulman 2020; Shao et al. 2024, equation 4).

    Parameters
    ----------
    log_probs, reference_log_probs : Tensor
        Of the sampled tokens, same shape.

    Returns
    -------
    Tensor
        Same shape.
    """
    log_ratio = reference_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


def grpo_token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    kl_coefficient: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss **summed** over tokens, and sums to report.

    Parameters
    ----------
    log_probs : Tensor
        Under the weights being trained, shape ``(rows, length)``, with gradients.
    old_log_probs : Tensor
        Under the weights that sampled, same shape.
    reference_log_probs : Tensor
        Under the frozen reference, same shape.
    advantages : Tensor
        Shape ``(rows,)``: every token of a response shares its response's advantage.
    mask : Tensor
        Shape ``(rows, length)``, 1 for tokens that count and 0 for filling. A row of zeros has no effect at all.
    clip, kl_coefficient : float

    Returns
    -------
    loss_sum : Tensor
        Scalar with gradients. Divide by the number of tokens *of all ranks* for the mean.
    sums : dict of str to Tensor
        Scalars without gradients: ``loss``, ``kl``, ``clipped`` and ``tokens``.

    Notes
    -----
    The paper averages over the tokens of each response first, then over responses. Here all tokens weigh the same (Yu
    et al. 2025): sums over tokens simply add up over ranks, however the rows were dealt out.
    """
    ratio = (log_probs - old_log_probs).exp()
    objective = clipped_objective(ratio, advantages.unsqueeze(1), clip)
    kl = kl_k3(log_probs, reference_log_probs)
    loss_sum = ((kl_coefficient * kl - objective) * mask).sum()
    with torch.no_grad():
        sums = {
            "loss": loss_sum.detach(),
            "kl": (kl * mask).sum(),
            "clipped": ((objective < ratio * advantages.unsqueeze(1)) * mask).sum(),
            "tokens": mask.sum(),
        }
    return loss_sum, sums
