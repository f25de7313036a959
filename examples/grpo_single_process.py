"""The training of ``grpo_arithmetic.py`` in one process, without a cluster: what to compare it with.

It makes the same choices from the same seed, so both give the same numbers up to rounding::

    python examples/grpo_single_process.py --steps 100
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
from grpo_lib.algorithm import group_advantages
from grpo_lib.arithmetic import (
    EOS_ID,
    RESPONSE_LENGTH,
    encode,
    encode_answers,
    make_problems,
    response_mask,
    reward_of,
    split_problems,
)
from grpo_lib.learner import Learner
from grpo_lib.model import generate, response_log_probs
from grpo_lib.schedule import draw_problems, row_seeds
from grpo_lib.settings import Settings, add_options, count, settings_from
from torch import Tensor


def train(settings: Settings, num_steps: int) -> Iterator[dict[str, Any]]:
    """Train, and yield a record after every GRPO step; that of step 0 is from before the first."""
    train_set, held_out = split_problems(make_problems(), settings.num_held_out, settings.seed)
    prompts = torch.tensor([encode(problem.prompt) for problem in train_set])
    answers = encode_answers([problem.answer for problem in train_set])
    held_out_prompts = torch.tensor([encode(problem.prompt) for problem in held_out])
    learner = Learner(settings.model, settings.learner, settings.seed)

    def sample(rows: Tensor, seeds: Tensor, temperature: float) -> Tensor:
        return generate(learner.model, rows, seeds, length=RESPONSE_LENGTH, eos_id=EOS_ID, temperature=temperature)

    def accuracy() -> float:
        responses = sample(held_out_prompts, torch.zeros(len(held_out), dtype=torch.int64), 0.0).tolist()
        return sum(reward_of(r, p.answer) for r, p in zip(responses, held_out, strict=True)) / len(held_out)

    for step in range(1, settings.warmup_steps + 1):
        drawn = draw_problems(settings.seed, "warmup", step, len(train_set), settings.warmup_rows)
        learner.warm_up(prompts[drawn], answers[drawn], response_mask(answers[drawn]))
    reference = copy.deepcopy(learner.model)
    yield {"step": 0, "accuracy": accuracy()}

    for step in range(1, num_steps + 1):
        drawn = draw_problems(settings.seed, "train", step, len(train_set), settings.prompts_per_step)
        rows = torch.from_numpy(drawn).repeat_interleave(settings.samples_per_prompt)
        responses = sample(prompts[rows], row_seeds(settings.seed, step, len(rows)), 1.0)
        rewards = torch.tensor(
            [reward_of(r, train_set[i].answer) for r, i in zip(responses.tolist(), rows.tolist(), strict=True)]
        )
        with torch.no_grad():
            old_log_probs = response_log_probs(learner.model, prompts[rows], responses)
            reference_log_probs = response_log_probs(reference, prompts[rows], responses)
        report = learner.update(
            {
                "prompts": prompts[rows],
                "responses": responses,
                "response_mask": response_mask(responses),
                "old_log_probs": old_log_probs,
                "reference_log_probs": reference_log_probs,
                "advantages": group_advantages(rewards, settings.samples_per_prompt),
            }
        )
        record = {"step": step, "reward": rewards.mean().item(), **report}
        if step % settings.eval_every == 0 or step == num_steps:
            record["accuracy"] = accuracy()
        yield record


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="grpo_single_process", description="GRPO on two-digit addition, no cluster.")
    parser.add_argument("--steps", type=count, default=300, metavar="N", help="GRPO steps (default: 300)")
    add_options(parser)
    options = parser.parse_args()
    for record in train(settings_from(options), options.steps):
        if "accuracy" in record:
            print("  ".join(f"{name} {value:.4g}" for name, value in record.items()), flush=True)


if __name__ == "__main__":
    main()
