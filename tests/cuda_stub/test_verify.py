"""`tools/gpu/verify.py` over the stub: tiers B and A run, and fail where the device is wrong; without one, status 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu import ranks
from tools.gpu.checks import ROOT
from tools.gpu.stub import device as stub

# A check each of what NCCL carries between processes and alone, and of copies.
_CHECKS = [("B", "messages"), ("A", "NCCL alone"), ("A", "copies")]
_WRONG = {"wrong": "1"}


def python(directory: Path, *arguments: str, devices: int = 1, **settings: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **stub.environment(directory, devices=devices, **settings), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )


def verified(directory: Path, tier: str, check: str, **settings: str) -> tuple[int, list[str]]:
    """The exit status, and what became of the checks."""
    script = str(ROOT / "tools" / "gpu" / "verify.py")
    done = python(directory, script, "--tier", tier, "--check", check, "--output", str(directory), **settings)
    file = directory / f"tier-{tier}.json"
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, [each["outcome"] for each in json.loads(file.read_text())["results"]]


@pytest.mark.parametrize(("tier", "check"), _CHECKS)
def test_a_device_that_is_right_is_verified(tmp_path: Path, tier: str, check: str) -> None:
    assert verified(tmp_path, tier, check) == (0, ["passed"])


@pytest.mark.parametrize(("tier", "check"), _CHECKS)
def test_a_device_that_is_wrong_is_found_out(tmp_path: Path, tier: str, check: str) -> None:
    assert verified(tmp_path, tier, check, **_WRONG) == (1, ["failed"])


_MEASURE = """
import json, sys
from tools.gpu import ranks
numbers = ranks.measure_fault("cuda", ranks.FAULTS[sys.argv[1]], num_rounds=3, budget_s=200.0)
print(json.dumps(dict(numbers)))
"""


@pytest.mark.parametrize("settings", [{}, _WRONG], ids=["right", "wrong"])
def test_ranks_that_share_a_device_lose_one_of_them(tmp_path: Path, settings: dict[str, str]) -> None:
    fault = "killed in a sum"
    done = python(tmp_path, "-c", _MEASURE, fault, **settings)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    (check,) = (each for each in ranks.CHECKS if each.name.endswith(fault))
    problem = check.judge(numbers)
    assert (problem is not None and "wrong is" in problem) if settings else problem is None, problem


@pytest.mark.parametrize("tier", ["A", "B"])
def test_without_a_device_nothing_is_verified(tmp_path: Path, tier: str) -> None:
    script = str(ROOT / "tools" / "gpu" / "verify.py")
    check = dict(_CHECKS)[tier]
    done = python(tmp_path, script, "--tier", tier, "--check", check, "--output", str(tmp_path), devices=0)
    assert done.returncode == 3, done.stderr
    assert "nothing was verified" in done.stdout
