"""What a run shows while it goes on: a bar for each phase, and a line for each measurement.

Owns the terminal. Where the output is no terminal, the lines come as they would, and the bars once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Display"]

#: Numbers shown after a measurement, with their names in words.
_SHOWN = {"accuracy": "held-out accuracy", "reward": "reward", "kl": "KL", "loss": "loss"}


class Display:
    """The progress of a run; a context manager."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(highlight=False, soft_wrap=True),
        )
        self._bar = self._progress.add_task("", visible=False, note="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, markup=False)

    def steps(self, phase: str, first: int, last: int) -> Iterator[int]:
        """Go through the steps from `first` to `last`, both included, with a bar named `phase`."""
        self._bar = self._progress.add_task(phase, total=last, completed=first - 1, note="")
        for step in range(first, last + 1):
            yield step
            self._progress.advance(self._bar)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show a step's numbers beside its bar; as a line of their own where the held-out problems were measured."""
        names = ("reward", "kl") if "reward" in numbers else ("loss",)
        note = "  ".join(f"{_SHOWN[name]} {numbers[name]:.2f}" for name in names if name in numbers)
        if note:
            self._progress.update(self._bar, note=f"{note}  {numbers['seconds']:.2f} s/step")
        if "accuracy" in numbers:
            told = (f"{text} {numbers[name]:.3f}" for name, text in _SHOWN.items() if name in numbers)
            self.say(f"step {step}: " + ", ".join(told))
