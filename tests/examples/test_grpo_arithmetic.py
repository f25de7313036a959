"""The GRPO demo as a user runs it: embedded cluster, existing cluster, continued runs, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpo_arithmetic
import pytest
from distributed import Client, LocalCluster
from grpo_lib.settings import settings_from
from grpo_single_process import train

from dask_controller import DataProtoConfig

SCRIPT = Path(grpo_arithmetic.__file__)
NUM_STEPS = 12

#: Each of these starts the whole program once or more, and may be the first to make the hosts import torch.
runs_the_demo = [pytest.mark.slow, pytest.mark.timeout(300)]


def demo_command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-u", str(SCRIPT), "--smoke", "--checkpoint-every", "2", "--out", str(out), *arguments]


def demo_environment() -> dict[str, str]:
    """Return an environment whose Python path has neither the repository nor the examples."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run_demo(out: Path, *arguments: str) -> str:
    """Run the script on small settings and return what it printed."""
    done = subprocess.run(
        demo_command(out, *arguments),
        cwd=out.parent,
        env=demo_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def read_numbers(out: Path) -> list[dict[str, Any]]:
    """Return the metrics without the times, which differ from run to run."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def grpo_numbers(out: Path) -> list[dict[str, Any]]:
    """Return the metrics of the GRPO phase, numbers only."""
    records = [record for record in read_numbers(out) if record["phase"] == "train"]
    return [{name: value for name, value in record.items() if name != "phase"} for record in records]


@pytest.fixture(scope="module")
def whole_run(local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of an uninterrupted run with two ranks, on a cluster that was there before."""
    out = tmp_path_factory.mktemp("demo") / "whole"
    return out, run_demo(out, "--scheduler", local_cluster.scheduler_address, "--steps", str(NUM_STEPS))


class TestRuns:
    """The whole program, in processes of its own."""

    pytestmark = runs_the_demo

    def test_numbers_plot_and_checkpoint_are_left(self, whole_run: tuple[Path, str]) -> None:
        out, printed = whole_run
        warmup = [record for record in read_numbers(out) if record["phase"] == "warmup"]
        assert [record["step"] for record in warmup] == list(range(1, 31))
        assert warmup[-1]["loss"] < warmup[0]["loss"] / 1.5
        trained = grpo_numbers(out)
        assert [record["step"] for record in trained] == list(range(NUM_STEPS + 1))
        assert [record["step"] for record in trained if "accuracy" in record] == list(range(0, NUM_STEPS + 1, 2))
        for record in trained[1:]:
            assert 0 <= record["reward"] <= 1 and record["kl"] >= 0
        assert any(record["reward"] > 0 and record["gradient_norm"] > 0 for record in trained[1:])
        assert (out / "reward.png").read_bytes().startswith(b"\x89PNG\r\n")
        assert "Held-out problems answered right" in printed
        for name in ("reward.png", "metrics.jsonl", "checkpoint.pt"):
            assert str(out / name) in printed

    def test_numbers_are_those_of_one_process(self, whole_run: tuple[Path, str]) -> None:
        settings = settings_from(grpo_arithmetic.parse_options(["--smoke"]))
        # Rounding grows from step to step, so only the first are compared.
        for here, there in zip(train(settings, 4), grpo_numbers(whole_run[0]), strict=False):
            assert {name: there[name] for name in here} == pytest.approx(here, rel=1e-3, abs=1e-5)

    def test_ranks_that_do_not_divide_the_batch_take_the_same_steps(
        self, whole_run: tuple[Path, str], client: Client, tmp_path: Path
    ) -> None:
        out = tmp_path / "three"
        run_demo(out, "--scheduler", client.scheduler.address, "--steps", "2", "--ranks", "3")
        for three, two in zip(grpo_numbers(out), grpo_numbers(whole_run[0])[:3], strict=True):
            assert three == pytest.approx(two, rel=1e-3, abs=1e-5)

    def test_a_run_stopped_by_ctrl_c_is_continued_with_the_same_numbers(
        self, whole_run: tuple[Path, str], tmp_path: Path
    ) -> None:
        """On the program's own cluster."""
        out = tmp_path / "stopped"
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        printed = ""
        with subprocess.Popen(
            demo_command(out, "--steps", "100000"), start_new_session=True, env=demo_environment(), **pipes
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    printed += line
                    if line.startswith("step 2:"):
                        # What a terminal does: every process of the program gets it.
                        os.killpg(process.pid, signal.SIGINT)
                assert process.wait(60) == 130, printed
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert f"stopped; `--resume --out {out}` continues from the last checkpoint" in printed
        # Not "Traceback": a host whose last heartbeat finds no scheduler logs one.
        assert "KeyboardInterrupt" not in printed

        printed = run_demo(out, "--steps", str(NUM_STEPS), "--resume")
        assert "Continuing after step" in printed
        assert read_numbers(out) == read_numbers(whole_run[0])


def test_a_scheduler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(grpo_arithmetic, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(SystemExit, match="2"), grpo_arithmetic.connected("tcp://127.0.0.1:1", 3):
        pass
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:1'" in capsys.readouterr().err


def test_a_start_that_fails_leaves_the_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = grpo_arithmetic.RunFiles(tmp_path)
    grpo_arithmetic.save_checkpoint(files.checkpoint, {"step": 5})
    files.record("train", 5, {"reward": 1.0})
    monkeypatch.setattr(grpo_arithmetic, "CONNECT_TIMEOUT_S", 0.2)
    options = grpo_arithmetic.parse_options(["--scheduler", "tcp://127.0.0.1:1", "--out", str(tmp_path)])
    try:
        with pytest.raises(SystemExit, match="2"):
            grpo_arithmetic.run(options, settings_from(options))
    finally:
        DataProtoConfig.auto_padding = False  # the program has it on
    assert grpo_arithmetic.load_checkpoint(files.checkpoint) == {"step": 5}
    assert len(files.train_records()) == 1


def test_more_ranks_than_hosts(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grpo_arithmetic, "HOSTS_TIMEOUT_S", 0.1)
    with pytest.raises(SystemExit, match="2"), grpo_arithmetic.connected(client.scheduler.address, 9):
        pass
    error = capsys.readouterr().err
    assert "needs 9 Dask workers" in error and "the cluster has 4" in error and "--ranks" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "must be 1 or more"),
        (["--samples", "1"], "must be 2 or more"),
        (["--steps", "-1"], "must not be negative"),
        (["--ranks", "two"], "invalid"),
    ],
)
def test_bad_options_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        grpo_arithmetic.parse_options(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "num_steps", "message"),
    [
        ([], 9, "no checkpoint at"),
        (["--seed", "1"], 9, "seed: 0 in the checkpoint, 1 now"),
        ([], 5, "is at step 5 already"),
    ],
)
def test_what_cannot_be_continued(
    arguments: list[str], num_steps: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = grpo_arithmetic.RunFiles(tmp_path)
    saved = settings_from(grpo_arithmetic.parse_options([]))
    if "no checkpoint" not in message:
        state = {"step": 5, "settings": grpo_arithmetic.asdict(saved)}
        grpo_arithmetic.save_checkpoint(files.checkpoint, state)
    settings = settings_from(grpo_arithmetic.parse_options(arguments))
    with pytest.raises(SystemExit, match="2"):
        grpo_arithmetic.load_run(files, settings, num_steps)
    assert message in capsys.readouterr().err
