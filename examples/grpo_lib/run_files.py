"""What a run writes: its checkpoint, ``metrics.jsonl`` and the plot.

Owns the files of one output folder. Knows neither the model nor the method: a checkpoint is a dict of tensors and
plain values, a metrics record a dict of numbers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

__all__ = [
    "RunFiles",
    "append_record",
    "keep_records",
    "load_checkpoint",
    "plot_curves",
    "read_records",
    "save_checkpoint",
]


def _write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Make `path` hold either what it held before or all that `write` writes, also when the power fails half-way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` (nested dicts and lists of tensors and plain values) to `path`, whole or not at all."""
    _write_atomically(path, lambda file: torch.save(dict(state), file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote. Runs no code from the file.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint to continue from.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"there is no checkpoint at {path}: run without --resume first, or name its --out folder"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Add one line to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines; none where there is no file.

    A last line without its line end is left out: the run that wrote it was stopped in the middle.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def keep_records(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the other records, such as those behind the checkpoint that a run is continued from."""
    text = "".join(json.dumps(record) + "\n" for record in read_records(path) if is_kept(record))
    _write_atomically(path, lambda file: file.write(text.encode()))


def plot_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draw reward, held-out accuracy, loss and divergence over the steps, as PNG.

    Parameters
    ----------
    records : list of dict
        Of the GRPO phase. With ``step``, ``reward``, ``loss`` and ``kl``; ``accuracy`` where the held-out problems were
        measured. A record need not have all.
    path : pathlib.Path
    """
    # Not pyplot: it would look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])

    def curve(axes: Any, name: str, **style: Any) -> None:
        points = [(record["step"], record[name]) for record in records if name in record]
        axes.plot([step for step, _ in points], [value for _, value in points], **style)

    curve(top, "reward", alpha=0.5, label="training reward")
    curve(top, "accuracy", marker="o", markersize=3, label="held-out accuracy")
    top.set(ylim=(0, 1), title="GRPO on two-digit addition")
    top.legend(loc="upper left")
    curve(middle, "loss")
    middle.set(ylabel="loss")
    curve(bottom, "kl")
    # One token that has become very unlikely can outweigh all others in the estimate.
    bottom.set(ylabel="KL to reference\n(nats per token)", yscale="log", xlabel="GRPO step")
    _write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


class RunFiles:
    """One run's files, all in one folder.

    Parameters
    ----------
    folder : pathlib.Path
        Made when the run starts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.checkpoint = folder / "checkpoint.pt"
        self.plot = folder / "reward.png"

    def start_over(self) -> None:
        """Remove what an earlier run has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.metrics, self.checkpoint, self.plot):
            path.unlink(missing_ok=True)

    def record(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
        """Write down the numbers of a step; `phase` is ``"warmup"`` or ``"train"``."""
        append_record(self.metrics, {"phase": phase, "step": step, **numbers})

    def forget_after(self, step: int) -> None:
        """Drop the GRPO records after `step`, for a run that continues from there and writes them again."""
        keep_records(self.metrics, lambda record: record["phase"] != "train" or record["step"] <= step)

    def train_records(self) -> list[dict[str, Any]]:
        """Return the records of the GRPO phase."""
        return [record for record in read_records(self.metrics) if record["phase"] == "train"]
