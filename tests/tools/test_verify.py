"""The verification on a GPU: every one of its rules can fail, and without a GPU it says what it could not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.comm.fake_nccl import FakeLibrary
from tests.training.fake_cuda import FakeCuda
from tools.gpu import correct, edges, ranks, runs, sanitized, speed, training, verify
from tools.gpu.checks import ROOT, Check, run

TINY = training.Size(hidden=32, blocks=2, length=16, num_steps=4, num_microbatches=2)

GOOD = {
    "fakes of CUDA and NCCL": {"exit_code": 0},
    "NCCL alone": {"is_whole": True, "abort_s": 0.1},
    "copies beside computing": {"wrong": 0},
    "CUDA in forked workers": {"exit_code": 0},
    "failures of the device": {"assert": 40, "oom": 41},
    "NVML": {"is_read": True, "max_mhz": 1980, "lanes": 16},
    "torch's CUDA sanitizer": {"exit_code": 0},
    "compute-sanitizer": {"exit_code": 0},
    "losses of four workers": {
        "steps": 60,
        "difference": 1e-12,
        "steps_lost": 0,
        "whole_recoveries": 0,
        "killed_recoveries": 1,
        "frozen_recoveries": 1,
    },
    "from a kill to the next step": {"next_step_s": 0.6, "stall_s": 0.2},
    "losses beside a plain loop": {**dict.fromkeys(training.WAYS, 1e-4), "skipped": 5},
    "memory beside the plan": {"over_plan": 0.97, "growth": 1.0, "pinned_growth": 1.0},
    "Llama of 1B beside a plain loop": {
        "of_plain": 1.01,
        "step_s": 1.0,
        "digest_share": 0.002,
        "flops_per_s": 3e14,
        "mfu": 0.5,
    },
    "two workers beside Schedule1F1B": {"of_torch": 1.2, "difference": 1e-5},
    "messages between stages": {"communicators": 4, "wrong": 0, "abort_s": 0.2},
    **{
        f"three ranks on one GPU, one {fault}": {"rounds": 40, "interrupted_s": 0.1, "wrong": 0}
        for fault in ranks.FAULTS
    },
    "digests": {"gb_per_s": 900.0},
    "copies beside a step": {"slowdown": 1.01, "wrong": 0},
    "a save beside a step": {"slowdown": 1.001, "pause_s": 0.002, "of_torch_save": 0.01, "of_async_save": 0.02},
    "data sheet": {"product": 0.72, "memory": 0.88},
}
BAD = {
    "fakes of CUDA and NCCL": [{"exit_code": 1}],
    "NCCL alone": [{"is_whole": False}, {"abort_s": 1.5}],
    "copies beside computing": [{"wrong": 1}],
    "CUDA in forked workers": [{"exit_code": 1}],
    "failures of the device": [{"assert": 42}, {"oom": 42}, {"assert": 0}],
    "NVML": [{"is_read": False}, {"max_mhz": 0}, {"lanes": 0}],
    "torch's CUDA sanitizer": [{"exit_code": 1}],
    "compute-sanitizer": [{"exit_code": 97}],
    "losses of four workers": [
        {"steps": 59},
        {"difference": 1e-6},
        {"steps_lost": 1},
        {"whole_recoveries": 1},
        {"killed_recoveries": 0},
        {"frozen_recoveries": 0},
    ],
    "from a kill to the next step": [{"next_step_s": 5.0}],
    "losses beside a plain loop": [{"skipped": 0}, *({way: 0.1} for way in training.WAYS)],
    "memory beside the plan": [{"over_plan": 1.2}, {"growth": 1.5}, {"pinned_growth": 7.0}],
    "Llama of 1B beside a plain loop": [{"of_plain": 0.9}, {"digest_share": 0.05}],
    "two workers beside Schedule1F1B": [{"of_torch": 0.9}, {"difference": 0.1}],
    "messages between stages": [{"communicators": 0}, {"wrong": 1}, {"abort_s": 3.0}],
    **{
        f"three ranks on one GPU, one {fault}": [{"rounds": 2}, {"interrupted_s": 4.0}, {"wrong": 1}]
        for fault in ranks.FAULTS
    },
    "digests": [{"gb_per_s": 0.8}],
    "copies beside a step": [{"slowdown": 1.3}, {"wrong": 1}],
    "a save beside a step": [{"slowdown": 1.4}, {"pause_s": 2.5}, {"of_torch_save": 1.1}, {"of_async_save": 1.1}],
    "data sheet": [{"product": 0.3}, {"memory": 0.4}],
}


def check_named(name: str) -> Check:
    (found,) = (check for check in verify.CHECKS if check.name == name)
    return found


def test_every_check_can_fail() -> None:
    assert [check.name for check in verify.CHECKS] == list(GOOD) == list(BAD)
    for check in verify.CHECKS:
        good, runnable = GOOD[check.name], replace(check, why_not=lambda: None)
        assert run(replace(runnable, measure=lambda good=good: good), num_gpus=8).outcome == "passed"
        for wrong in BAD[check.name]:
            measured = {**good, **wrong}
            result = run(replace(runnable, measure=lambda measured=measured: measured), num_gpus=8)
            assert result.outcome == "failed", (check.name, wrong)
            assert next(iter(wrong)) in result.detail


@pytest.mark.slow
def test_what_sanitizers_watch_trains_here_and_its_failure_is_seen() -> None:
    assert sanitized.measure_sanitized("cpu") == {"exit_code": 0}
    assert sanitized.measure_sanitized("no device")["exit_code"] != 0
    assert sanitized.measure_sanitized("cpu", command=["false"])["exit_code"] == 1


def test_a_sanitizer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(check_named("compute-sanitizer"), num_gpus=1)
    assert result.outcome == "not run"
    assert "compute-sanitizer is not on PATH" in result.detail


def test_a_check_that_cannot_measure_fails() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    result = run(replace(check_named("NCCL alone"), measure=broken), num_gpus=8)
    assert result.outcome == "failed"
    assert "illegal memory access" in result.detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("tier", ["B", "C"])
def test_without_a_gpu_it_says_what_it_could_not_run(tier: str, tmp_path: Path) -> None:
    assert verify.main(["--tier", tier, "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / f"tier-{tier}.json").read_text())
    assert found["machine"]["gpu"] == "none"
    assert {each["outcome"] for each in found["results"]} == {"not run"}
    assert all(each["detail"] for each in found["results"])


def test_the_fakes_that_it_runs_are_there() -> None:
    assert all((ROOT / name).is_file() for name in correct.FAKES)


def test_a_check_says_how_many_gpus_it_lacks() -> None:
    result = run(check_named("messages between stages"), num_gpus=1)
    assert result.outcome == "not run"
    assert "2 CUDA devices" in result.detail


def test_messages_between_stages_are_measured_with_fakes_as_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on two GPUs is to be the GPUs, not this tool."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    numbers = edges.measure_edges(FakeLibrary.of(["0", "1"]), num_messages=3, shape=(2, 8))
    assert (numbers["wrong"], numbers["communicators"]) == (0, 4)
    assert numbers["abort_s"] < 20
    assert (
        check_named("messages between stages").judge(
            edges.measure_edges(FakeLibrary.of(["0", "0"]), num_messages=1, shape=(2, 8))
        )
        is not None
    )


def test_a_check_says_why_it_cannot_be_run_on_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check = check_named("three ranks on one GPU, one frozen in a sum")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    result = run(replace(check, measure=dict), num_gpus=1)
    assert result.outcome == "not run"
    assert "torch has 2.28.3" in result.detail
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    good = GOOD[check.name]
    assert run(replace(check, measure=lambda: good), num_gpus=1).outcome == "passed"


def test_ranks_that_lose_one_are_interrupted_here_by_gloo() -> None:
    numbers = ranks.measure_fault("cpu", "frozen in a sum", num_rounds=1)
    assert (numbers["rounds"], numbers["wrong"]) == (1, 0)
    assert 0 < numbers["interrupted_s"] < 20, "a busy machine takes its time"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in ranks.FAULTS if fault.startswith("killed")])
def test_ranks_that_die_are_done_without_here_by_gloo(fault: str) -> None:
    numbers = ranks.measure_fault("cpu", fault, num_rounds=2)
    assert (numbers["rounds"], numbers["wrong"]) == (2, 0)


def test_training_is_compared_with_a_plain_loop_and_what_differs_is_found() -> None:
    """A float16 run that overflows at first; and a plain loop from another seed, whose losses are others."""
    numbers = training.measure_ways("cpu", size=TINY, ways=["float16"])
    assert numbers["float16"] < 2e-3
    assert numbers["skipped"] >= 1
    others = training.measure_ways("cpu", size=TINY, ways=["bfloat16"], plain=lambda job: replace(job, seed=1))
    good = GOOD["losses beside a plain loop"]
    assert check_named("losses beside a plain loop").judge({**good, **others}) is not None


@pytest.mark.slow
def test_each_way_to_train_comes_to_the_losses_of_a_plain_loop() -> None:
    """Compiled blocks are left out: compiling them takes a minute of a CPU."""
    ways = training.WAYS.keys() - {"compile"}
    numbers = training.measure_ways("cpu", size=TINY, ways=sorted(ways))
    assert max(numbers[way] for way in ways) < 2e-3


@pytest.mark.slow
def test_memory_and_speed_are_measured_on_a_cpu_as_on_a_gpu() -> None:
    memory = training.measure_memory("cpu", size=TINY, counts=(2, 8))
    assert all(memory[name] > 0 for name in ("over_plan", "growth"))
    assert check_named("memory beside the plan").judge(memory) is not None, "a process is more than a tiny model"
    alone = training.measure_speed("cpu", size=TINY, rounds=1)
    assert all(alone[name] > 0 for name in ("of_plain", "step_s", "digest_share", "flops_per_s"))
    beside = training.measure_pipeline("cpu", size=TINY, rounds=1)
    assert beside["of_torch"] > 0
    assert beside["difference"] < 2e-3


@pytest.mark.slow
def test_runs_that_lose_a_node_are_compared_with_one_that_is_alone() -> None:
    numbers = runs.measure_losses("cpu", num_steps=30)
    assert runs.CHECKS[0].judge({**numbers, "steps": numbers["steps"] + 30}) is None, numbers
    kill = runs.measure_kill("cpu", num_steps=30)
    assert 0 < kill["next_step_s"] < 60


def test_saves_and_copies_are_measured_on_a_cpu_as_on_a_gpu() -> None:
    saved = speed.measure_saves("cpu", num_elements=1 << 16, num_products=2, width=64)
    assert all(saved[name] > 0 for name in ("slowdown", "pause_s", "of_torch_save", "of_async_save"))
    copied = speed.measure_copies("cpu", num_elements=64, num_products=2, width=64)
    assert copied["wrong"] == 0 < copied["slowdown"]
