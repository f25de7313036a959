"""Everything that decides the numbers of a run.

Owns the settings and their command-line options. They are saved with a checkpoint, and a run is continued only
with the same ones. How many ranks share the work, and where the files go, is not among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .arithmetic import PROMPT_LENGTH, RESPONSE_LENGTH, VOCAB_SIZE
from .learner import LearnerConfig
from .model import ModelConfig

__all__ = ["Settings", "add_options", "count", "differences", "positive_int", "settings_from"]


@dataclass(frozen=True)
class Settings:
    """What is trained, on what, and how.

    Parameters
    ----------
    seed : int
        Of the initial weights, the split, the draws and the samples.
    num_held_out : int
        Problems never trained on.
    warmup_steps, warmup_rows : int
        Supervised steps before GRPO, and problems in each: enough to write numbers, not enough to add.
    prompts_per_step, samples_per_prompt : int
        Of a GRPO step. All samples of a prompt make one group.
    eval_every : int
        GRPO steps between two measurements on the held-out problems.
    model : ModelConfig
    learner : LearnerConfig
    """

    seed: int = 0
    num_held_out: int = 512
    warmup_steps: int = 120
    warmup_rows: int = 128
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    eval_every: int = 10
    model: ModelConfig = field(default_factory=lambda: ModelConfig(VOCAB_SIZE, PROMPT_LENGTH + RESPONSE_LENGTH))
    learner: LearnerConfig = field(default_factory=LearnerConfig)


def smoke_settings(seed: int) -> Settings:
    """Return settings so small that a run takes seconds; nothing much is learned."""
    full = Settings(seed=seed)
    return replace(
        full,
        num_held_out=100,
        warmup_steps=30,
        warmup_rows=64,
        prompts_per_step=8,
        samples_per_prompt=8,
        eval_every=2,
        model=replace(full.model, num_layers=2, num_heads=2, width=32),
        # Fast enough that a few answers are right, or every advantage would be 0.
        learner=replace(full.learner, warmup_learning_rate=5e-3, num_mini_batches=2),
    )


def positive_int(text: str) -> int:
    """Parse an option that must be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def count(text: str) -> int:
    """Parse an option that must not be negative."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def group_size(text: str) -> int:
    """Parse an option that must be 2 or more: one sample has nothing to be compared with."""
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be 2 or more, got {value}")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`settings_from` reads."""
    parser.add_argument("--seed", type=count, default=0, help="of weights, problems and samples (default: 0)")
    parser.add_argument("--warmup-steps", type=count, metavar="N", help="supervised steps first (default: 120)")
    parser.add_argument("--prompts", type=positive_int, metavar="N", help="prompts in a GRPO step (default: 64)")
    parser.add_argument("--samples", type=group_size, metavar="N", help="samples of each prompt (default: 8)")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="in the GRPO phase (default: 3e-4)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and tiny batches: does it run at all?")


def settings_from(options: argparse.Namespace) -> Settings:
    """Return the settings that the command line asks for."""
    settings = smoke_settings(options.seed) if options.smoke else Settings(seed=options.seed)
    given = {
        "warmup_steps": options.warmup_steps,
        "prompts_per_step": options.prompts,
        "samples_per_prompt": options.samples,
    }
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if options.learning_rate is not None:
        settings = replace(settings, learner=replace(settings.learner, learning_rate=options.learning_rate))
    return settings


def differences(settings: Settings, saved: Mapping[str, Any]) -> list[str]:
    """Say in which settings a run differs from the checkpoint it is to be continued from, one line each."""
    mine = asdict(settings)
    return [
        f"{name}: {saved.get(name)!r} in the checkpoint, {mine[name]!r} now"
        for name in (each.name for each in fields(Settings))
        if saved.get(name) != mine[name]
    ]
