"""The GRPO demo as a user runs it: embedded cluster, existing cluster, continued runs, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpo_arithmetic
import pytest
from distributed import Client
from grpo_lib.settings import settings_from
from grpo_single_process import train

SCRIPT = Path(grpo_arithmetic.__file__)
NUM_STEPS = 4


def run_demo(out: Path, *arguments: str) -> str:
    """Run the script on small settings, from a folder and with a path that do not have the examples."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--out", str(out), *arguments],
        cwd=out.parent,
        env={**environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def read_numbers(out: Path) -> list[dict[str, Any]]:
    """Return the metrics without the times, which differ from run to run."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def grpo_records(out: Path) -> list[dict[str, Any]]:
    return [record for record in read_numbers(out) if record["phase"] == "train"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An uninterrupted run on the script's own cluster, two ranks."""
    out = tmp_path_factory.mktemp("demo") / "whole"
    return out, run_demo(out, "--steps", str(NUM_STEPS), "--checkpoint-every", "2")


@pytest.mark.slow
def test_demo_leaves_numbers_plot_and_checkpoint(whole_run: tuple[Path, str]) -> None:
    out, printed = whole_run
    records = read_numbers(out)
    assert [record["step"] for record in records if record["phase"] == "warmup"] == list(range(1, 31))
    trained = grpo_records(out)
    assert [record["step"] for record in trained] == list(range(NUM_STEPS + 1))
    assert [record["step"] for record in trained if "accuracy" in record] == [0, 2, 4]
    for record in trained[1:]:
        assert 0 <= record["reward"] <= 1 and record["kl"] >= 0 and record["gradient_norm"] > 0
    assert any(record["reward"] > 0 for record in trained[1:])
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (out / "checkpoint.pt").exists()
    assert "Held-out problems answered right" in printed and str(out / "reward.png") in printed


@pytest.mark.slow
def test_demo_gives_the_numbers_of_one_process(whole_run: tuple[Path, str]) -> None:
    out, _ = whole_run
    settings = settings_from(grpo_arithmetic.parse_options(["--smoke"]))
    for here, there in zip(train(settings, NUM_STEPS), grpo_records(out), strict=True):
        assert {name: there[name] for name in here} == pytest.approx(here, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_continued_run_repeats_the_numbers_exactly(whole_run: tuple[Path, str], client: Client, tmp_path: Path) -> None:
    """On an existing cluster, twice in turn on the same hosts."""
    out, scheduler = tmp_path / "parts", client.scheduler.address
    run_demo(out, "--scheduler", scheduler, "--steps", "3", "--checkpoint-every", "2")
    checkpoint = (out / "checkpoint.pt").read_bytes()
    printed = run_demo(out, "--scheduler", scheduler, "--steps", str(NUM_STEPS), "--resume")
    assert "Continuing after step 3" in printed
    assert (out / "checkpoint.pt").read_bytes() != checkpoint
    repeated = read_numbers(out)
    # The first part measured at its own last step too.
    assert repeated[33].pop("accuracy") is not None and repeated[33].pop("well_formed") is not None
    assert repeated == read_numbers(whole_run[0])


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_batch_take_the_same_steps(
    whole_run: tuple[Path, str], client: Client, tmp_path: Path
) -> None:
    out = tmp_path / "three"
    run_demo(out, "--scheduler", client.scheduler.address, "--steps", "2", "--ranks", "3")
    for three, two in zip(grpo_records(out), grpo_records(whole_run[0])[:3], strict=True):
        assert three.pop("phase") == two.pop("phase")
        assert three == pytest.approx(two, rel=1e-3, abs=1e-5)


def test_a_scheduler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(grpo_arithmetic, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(SystemExit, match="2"), grpo_arithmetic.connected("tcp://127.0.0.1:1", 3):
        pass
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:1'" in capsys.readouterr().err


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
