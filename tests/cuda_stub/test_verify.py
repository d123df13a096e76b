"""`tools/gpu/verify.py` over the stub: tiers B and A run, and fail where the device is wrong; without one, status 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu import runs, verify
from tools.gpu.checks import ROOT
from tools.gpu.stub import device as stub

pytestmark = pytest.mark.timeout(900)
_WRONG = {"wrong": "1"}


def python(directory: Path, *arguments: str, devices: int = 1, **settings: str) -> subprocess.CompletedProcess[str]:
    visible = ",".join(map(str, range(devices)))  # as `--local` counts GPUs, where no driver does
    variables = {**os.environ, **stub.environment(directory, devices=devices, **settings), "PYTHONPATH": str(ROOT)}
    variables["CUDA_VISIBLE_DEVICES"] = visible
    return subprocess.run(
        [sys.executable, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )


def verified(directory: Path, tier: str, check: str, *, devices: int = 1, **settings: str) -> tuple[int, list[str]]:
    """The exit status, and what became of the checks."""
    script = str(ROOT / "tools" / "gpu" / "verify.py")
    given = ("--tier", tier, "--check", check, "--output", str(directory))
    done = python(directory, script, *given, devices=devices, **settings)
    file = directory / f"tier-{tier}.json"
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, [each["outcome"] for each in json.loads(file.read_text())["results"]]


def test_tier_a_verifies_a_device_that_is_right_and_finds_one_out_that_is_wrong(tmp_path: Path) -> None:
    assert verified(tmp_path, "A", "NCCL alone") == (0, ["passed"])
    assert verified(tmp_path, "A", "NCCL alone", **_WRONG) == (1, ["failed"])


_MEASURE = """
import json
from tools.gpu import edges, ranks
print(json.dumps(dict(MEASURED)))
"""
_MEASURED = {
    "messages between stages": "edges.measure_edges('cuda', num_messages=3, shape=(8, 64, 64))",
    "three ranks, one killed in a sum": (
        "ranks.measure_fault('cuda', ranks.FAULTS['killed in a sum'], num_rounds=3, budget_s=200.0)"
    ),
}


@pytest.mark.parametrize("check", _MEASURED)
@pytest.mark.parametrize("settings", [{}, _WRONG], ids=["right", "wrong"])
def test_tier_b_measures_processes_that_share_a_device(tmp_path: Path, check: str, settings: dict[str, str]) -> None:
    """Small, for all of it takes minutes: `device.py tools/gpu/verify.py --tier B --output DIR`."""
    done = python(tmp_path, "-c", _MEASURE.replace("MEASURED", _MEASURED[check]), **settings)
    assert done.returncode == 0, done.stderr
    (rule,) = (each for each in verify.CHECKS if each.name == check)
    problem = rule.judge(json.loads(done.stdout.splitlines()[-1]))
    assert (problem is not None and "wrong is" in problem) if settings else problem is None, problem


_SHARES = """
import json
from tools.gpu import runs
print(json.dumps(dict(runs.measure_shared("cuda", num_steps=12, ways=["WAY"]))))
"""


@pytest.mark.parametrize("way", runs.SHARED)
def test_devices_that_share_a_stage_and_a_gpu_come_to_the_losses_of_one_worker(tmp_path: Path, way: str) -> None:
    """A node of the two is killed; Gloo carries what devices exchange, through pinned memory."""
    done = python(tmp_path, "-c", _SHARES.replace("WAY", way))
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert (numbers["steps"], numbers["recoveries"], numbers["steps_lost"]) == (12, 1, 0)
    assert numbers[way] < (1e-2 if way == "bfloat16" else 1e-9)


@pytest.mark.parametrize(("tier", "check"), [("A", "NCCL alone"), ("B", "messages")])
def test_without_a_device_nothing_is_verified(tmp_path: Path, tier: str, check: str) -> None:
    assert verified(tmp_path, tier, check, devices=0) == (3, ["not run"])
