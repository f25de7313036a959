"""Settings: defaults, every way to change them, and messages that name the setting."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest
import yaml

import dask_controller
from dask_controller import config

YAML = Path(dask_controller.__file__).with_name("controller.yaml")


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("start-timeout", 120.0),
        ("placement-timeout", 30.0),
        ("connect-timeout", 5.0),
        ("probe-timeout", 60.0),
        ("watch-interval", 1.0),
        ("close-timeout", 10.0),
        ("call-timeout", None),
        ("failure-grace", 0.05),
        ("paused-timeout", 60.0),
    ],
)
def test_default_times(name: str, seconds: float | None) -> None:
    assert config.get_seconds(name) == seconds


def test_other_defaults() -> None:
    assert config.get_nbytes("inline-limit") == 64 * 1024
    assert config.get_nbytes("bytes-in-flight") == 512 * 2**20
    assert config.get_nbytes("shared-memory-limit") == 2**30
    assert config.get_route() == "auto"
    assert config.get_port_range() is None


def test_every_default_is_in_dask_config_and_documented() -> None:
    text = YAML.read_text()
    assert yaml.safe_load(text)["controller"] == config.DEFAULTS
    lines = text.splitlines()
    for name, value in config.DEFAULTS.items():
        assert dask.config.get(f"controller.{name}") == value
        place = next(i for i, line in enumerate(lines) if line.startswith(f"  {name}:"))
        assert lines[place - 1].startswith("  # "), f"{name} has no comment above it"


def test_page_of_settings_names_every_setting() -> None:
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    for name in config.DEFAULTS:
        assert f"`{name}`" in page


def test_set_in_program_and_back() -> None:
    with dask.config.set({"controller.start-timeout": "5 minutes", "controller.inline_limit": "1 MiB"}):
        assert config.get_seconds("start_timeout") == 300.0
        assert config.get_nbytes("inline-limit") == 2**20
    assert config.get_seconds("start-timeout") == 120.0


@pytest.mark.parametrize(
    ("value", "seconds"), [(2, 2.0), ("2", 2.0), ("300ms", 0.3), (0, 0.0), (datetime.timedelta(minutes=1), 60.0)]
)
def test_forms_of_a_time(value: object, seconds: float) -> None:
    with dask.config.set({"controller.call-timeout": value}):
        assert config.get_seconds("call-timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["soon", "5 parsecs", -1, "-3s", float("nan"), float("inf"), True, [1], {}, ""])
def test_bad_time_is_named(value: object) -> None:
    with dask.config.set({"controller.close-timeout": value}):
        with pytest.raises(ValueError, match=r"controller\.close-timeout .*DASK_CONTROLLER__CLOSE_TIMEOUT") as caught:
            config.get_seconds("close-timeout")
    assert repr(value) in str(caught.value)


def test_null_is_no_limit_only_where_the_default_is_null() -> None:
    with dask.config.set({"controller.call-timeout": None, "controller.start-timeout": None}):
        assert config.get_seconds("call-timeout") is None
        with pytest.raises(ValueError, match="start-timeout"):
            config.get_seconds("start-timeout")


@pytest.mark.parametrize("value", ["a lot", -1, None, True, [64], float("inf")])
def test_bad_size_is_named(value: object) -> None:
    with dask.config.set({"controller.inline-limit": value}):
        with pytest.raises(ValueError, match=r"controller\.inline-limit"):
            config.get_nbytes("inline-limit")


def test_route() -> None:
    with dask.config.set({"controller.route": "scheduler"}):
        assert config.get_route() == "scheduler"
    with dask.config.set({"controller.route": "tcp"}):
        with pytest.raises(ValueError, match="auto, direct, scheduler"):
            config.get_route()


def test_port_range() -> None:
    with dask.config.set({"controller.master-port-range": [20000, 20010]}):
        assert config.get_port_range() == (20000, 20010)


@pytest.mark.parametrize("value", [[2, 1], [1], [0, 5], [1, 70000], "20000-20010", [1.0, 2], [True, 5], 7])
def test_bad_port_range_is_named(value: object) -> None:
    with dask.config.set({"controller.master-port-range": value}):
        with pytest.raises(ValueError, match=r"controller\.master-port-range"):
            config.get_port_range()


def test_unknown_setting_names_the_near_ones() -> None:
    with pytest.raises(ValueError, match="start-timeout"):
        config.get("start-timout")


def run_python(code: str, tmp_path: Path, **env: str) -> str:
    """Run code in a fresh process whose home and Dask configuration folder lie in ``tmp_path``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        # A short environment: nothing that the machine's user has set takes part.
        env={"HOME": str(tmp_path), "DASK_CONFIG": str(tmp_path), "PATH": "/usr/bin:/bin", **env},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_environment(tmp_path: Path) -> None:
    code = """
from dask_controller import config as c
print(c.get_seconds("start-timeout"), c.get_port_range(), c.get_seconds("call-timeout"), c.get_route())
"""
    printed = run_python(
        code,
        tmp_path,
        DASK_CONTROLLER__START_TIMEOUT="7s",
        DASK_CONTROLLER__MASTER_PORT_RANGE="[20000, 20005]",
        DASK_CONTROLLER__CALL_TIMEOUT="3",
    )
    assert printed == "7.0 (20000, 20005) 3.0 auto"


def test_users_file_is_read_and_none_is_written(tmp_path: Path) -> None:
    (tmp_path / "controller.yaml").write_text("controller:\n  route: direct\n")
    before = sorted(tmp_path.rglob("*"))
    code = "from dask_controller import config; print(config.get_route(), config.get_seconds('connect-timeout'))"
    assert run_python(code, tmp_path) == "direct 5.0"
    assert sorted(tmp_path.rglob("*")) == before


def test_defaults_survive_a_refresh_of_dasks_settings() -> None:
    with dask.config.set({"controller.route": "direct"}):
        dask.config.refresh()
        assert dask.config.get("controller.route") == "auto"
