"""The verification on a GPU: every one of its rules can fail, and without a GPU it says what it could not run."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.comm.fake_nccl import FakeLibrary
from tests.training.fake_cuda import FakeCuda
from tools.gpu import correct, edges, nodes, prerequisites, ranks, runs, sanitized, speed, training, verify
from tools.gpu.checks import ROOT, Check, NotHere, Outcome, run
from tools.gpu.prerequisites import Machine, Need

TINY = training.Size(hidden=32, blocks=2, length=16, num_steps=4, num_microbatches=2)
EAGER = tuple(way for way in training.WAYS if way != "compile")

GOOD = {
    "messages between stages": {"communicators": 4, "wrong": 0, "abort_s": 0.2},
    **{
        f"three ranks, one {fault}": {
            "rounds": 8,
            "interrupted_s": 0.1,
            "wrong": 0,
            "stood_still_s": 0.05,
            "posted_s": 0.001,
        }
        for fault in ranks.FAULTS
    },
    **{
        f"two nodes over NCCL, {fault}": {
            "steps": 60,
            "difference": 1e-12,
            "steps_lost": 0,
            "recoveries": 1,
            "communicators": 16,
            "not_by_nccl": 0,
        }
        for fault in nodes.FAULTS
    },
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
    "losses of devices that share stages": {
        "steps": 60,
        "recoveries": 1,
        "steps_lost": 0,
        **dict.fromkeys(runs.SHARED, 1e-15),
    },
    "from a kill to the next step": {"next_step_s": 0.6, "stall_s": 0.2},
    "losses beside a plain loop": {**dict.fromkeys(EAGER, 1e-4), "skipped": 5},
    "compiled blocks beside a plain loop": {"compile": 1e-4},
    "memory beside the plan": {"over_plan": 0.97, "growth": 1.0, "pinned_growth": 1.0},
    "Llama of 1B beside a plain loop": {
        "of_plain": 1.01,
        "step_s": 1.0,
        "digest_share": 0.002,
        "flops_per_s": 3e14,
        "mfu": 0.5,
    },
    "two workers beside Schedule1F1B": {"of_torch": 1.2, "difference": 1e-5},
    "digests": {"gb_per_s": 900.0},
    "copies beside a step": {"slowdown": 1.01, "wrong": 0},
    "a save beside a step": {"slowdown": 1.001, "pause_s": 0.002, "of_torch_save": 0.01, "of_async_save": 0.02},
    "data sheet": {"product": 0.72, "memory": 0.88},
}
BAD = {
    "messages between stages": [{"communicators": 0}, {"wrong": 1}, {"abort_s": 3.0}],
    **{
        f"three ranks, one {fault}": [
            {"rounds": 2},
            {"interrupted_s": 4.0},
            {"wrong": 1},
            {"stood_still_s": 0.9},
            {"posted_s": 76.0},
        ]
        for fault in ranks.FAULTS
    },
    **{
        f"two nodes over NCCL, {fault}": [
            {"steps": 59},
            {"difference": 1e-6},
            {"steps_lost": 1},
            {"recoveries": 0},
            {"communicators": 0},
            {"not_by_nccl": 1},
        ]
        for fault in nodes.FAULTS
    },
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
    "losses of devices that share stages": [
        {"steps": 59},
        {"recoveries": 0},
        {"steps_lost": 1},
        *({way: 0.1} for way in runs.SHARED),
    ],
    "from a kill to the next step": [{"next_step_s": 5.0}],
    "losses beside a plain loop": [{"skipped": 0}, *({way: 0.1} for way in EAGER)],
    "compiled blocks beside a plain loop": [{"compile": 0.1}],
    "memory beside the plan": [{"over_plan": 1.2}, {"growth": 1.5}, {"pinned_growth": 7.0}],
    "Llama of 1B beside a plain loop": [{"of_plain": 0.9}, {"digest_share": 0.05}],
    "two workers beside Schedule1F1B": [{"of_torch": 0.9}, {"difference": 0.1}],
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
        assert run(replace(runnable, measure=lambda good=good: good), num_gpus=8, missing={}).outcome == "passed"
        for wrong in BAD[check.name]:
            measured = {**good, **wrong}
            result = run(replace(runnable, measure=lambda measured=measured: measured), num_gpus=8, missing={})
            assert result.outcome == "failed", (check.name, wrong)
            assert next(iter(wrong)) in result.detail


@pytest.mark.slow
def test_what_sanitizers_watch_trains_here_and_its_failure_is_seen() -> None:
    assert sanitized.measure_sanitized("cpu") == {"exit_code": 0}
    assert sanitized.measure_sanitized("no device")["exit_code"] != 0
    assert sanitized.measure_sanitized("cpu", command=["false"])["exit_code"] == 1


def test_a_sanitizer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(check_named("compute-sanitizer"), num_gpus=1, missing={})
    assert result.outcome == "not run"
    assert "compute-sanitizer is not on PATH" in result.detail


def test_a_check_that_cannot_measure_fails() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    result = run(replace(check_named("NCCL alone"), measure=broken), num_gpus=8, missing={})
    assert result.outcome == "failed"
    assert "illegal memory access" in result.detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("tier", ["B", "C"])
def test_without_a_gpu_it_says_what_it_could_not_run_and_that_nothing_was_verified(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(["--tier", tier, "--output", str(tmp_path / "out")]) == 3
    found = json.loads((tmp_path / "out" / f"tier-{tier}.json").read_text())
    assert found["machine"]["gpu"] == "none"
    assert {each["outcome"] for each in found["results"]} == {"not run"}
    assert all(each["detail"] for each in found["results"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("missing  GPUs: torch")
    assert said[-1] == "nothing was verified: no check that needs a GPU was run"


def test_the_exit_status_says_whether_a_gpu_was_verified() -> None:
    """Passed fakes are not a verified GPU, and whatever fails fails it all."""

    def broken() -> dict[str, float]:
        raise RuntimeError("CUDA error")

    fakes = run(
        replace(check_named("fakes of CUDA and NCCL"), measure=lambda: {"exit_code": 0}), num_gpus=0, missing={}
    )
    digests = check_named("digests")
    lacking = run(digests, num_gpus=0, missing={})
    good = run(replace(digests, measure=lambda: {"gb_per_s": 900.0}), num_gpus=1, missing={})
    slow = run(replace(digests, measure=lambda: {"gb_per_s": 0.1}), num_gpus=1, missing={})
    assert Outcome.of([]) == Outcome.of([lacking]) == Outcome.of([fakes, lacking]) == 3
    assert Outcome.of([fakes, good, lacking]) == 0
    assert Outcome.of([fakes, good, slow]) == 1
    failed = run(replace(check_named("fakes of CUDA and NCCL"), measure=broken), num_gpus=0, missing={})
    assert Outcome.of([failed, lacking]) == Outcome.of([failed, good]) == 1


def test_a_device_that_is_not_known_is_not_a_failure() -> None:
    def unknown() -> dict[str, float]:
        raise NotHere("no data sheet of NVIDIA B200 is known")

    result = run(replace(check_named("data sheet"), measure=unknown), num_gpus=1, missing={})
    assert (result.outcome, result.detail) == ("not run", "no data sheet of NVIDIA B200 is known")


def test_no_check_begins_after_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = check_named("digests"), check_named("copies beside a step")
    first = replace(first, measure=lambda: {"gb_per_s": 900.0})
    second = replace(second, measure=lambda: pytest.fail("begun"))
    kept: list[int] = []
    results = verify.verify([second], 1, {}, budget_s=-60.0, keep=lambda so_far: kept.append(len(so_far)))
    assert [each.outcome for each in results] == ["not run"]
    assert "-1 minutes are over; --minutes allows more" in capsys.readouterr().out
    assert [each.outcome for each in verify.verify([first], 1, {}, budget_s=60.0)] == ["passed"]
    assert kept == [1]


def test_a_check_that_hangs_fails_in_time() -> None:
    hanging = Check(tier="A", name="hanging", measure=lambda: {"set": threading.Event().wait()}, judge=lambda _: None)
    result = run(hanging, num_gpus=1, missing={}, limit_s=0.1)
    assert result.outcome == "failed"
    assert result.detail == "TimeoutError: it has taken more than 0.1 s"


WHOLE = Machine(
    cuda="13.0",
    num_gpus=1,
    compute_modes=["Default"],
    shared_memory_bytes=16 << 30,
    compiler="gcc",
    has_python_headers=True,
    packages=frozenset({"pytest", "hypothesis", "pytest_timeout", "pytest_trio", "pynvml"}),
)


@pytest.mark.parametrize(
    ("change", "need", "words"),
    [
        ({"cuda": None, "num_gpus": 0}, Need.DRIVER, "a build without CUDA"),
        ({"num_gpus": 0}, Need.DRIVER, "built for CUDA 13.0, sees no GPU"),
        ({"shared_memory_bytes": 64 << 20}, Need.SHARED_MEMORY, "/dev/shm has 0.06 GiB free"),
        ({"compute_modes": ["Default", "Exclusive_Process"]}, Need.SHARED_GPU, "compute mode Exclusive_Process"),
        ({"compiler": None}, Need.COMPILER, "no C compiler"),
        ({"has_python_headers": False}, Need.COMPILER, "no Python.h"),
        ({"packages": frozenset({"pytest", "pynvml"})}, Need.TESTS, "hypothesis, pytest_timeout, pytest_trio"),
        ({"packages": WHOLE.packages - {"pynvml"}}, Need.NVML, "pip install nvidia-ml-py"),
    ],
)
def test_what_is_missing_is_named_and_keeps_the_checks_that_need_it_from_running(
    change: dict[str, Any], need: Need, words: str
) -> None:
    assert prerequisites.missing(WHOLE) == {}
    missing = prerequisites.missing(replace(WHOLE, **change))
    assert list(missing) == [need]
    assert words in missing[need]
    for check in verify.CHECKS:
        if need in check.needs:
            result = run(replace(check, measure=lambda: pytest.fail("it was run")), num_gpus=8, missing=missing)
            assert (result.outcome, result.detail) == ("not run", missing[need])
    assert need is Need.DRIVER or any(need in check.needs for check in verify.CHECKS)


def test_this_machine_is_looked_at() -> None:
    machine = prerequisites.survey()
    assert machine.packages == WHOLE.packages, "`make` brings all that checks import"
    assert (machine.cuda, machine.num_gpus) == (torch.version.cuda, torch.cuda.device_count())
    assert machine.shared_memory_bytes > 0


def test_the_fakes_that_it_runs_are_there() -> None:
    assert all((ROOT / name).is_file() for name in correct.FAKES)


def test_a_check_says_how_many_gpus_it_lacks() -> None:
    result = run(check_named("two nodes over NCCL, a killed node"), num_gpus=1, missing={})
    assert result.outcome == "not run"
    assert "2 CUDA devices" in result.detail


def test_messages_between_stages_are_measured_with_fakes_as_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on two GPUs is to be the GPUs, not this tool."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def measured(identities: list[str], num_messages: int) -> dict[str, float]:
        libraries = FakeLibrary.of(identities)

        def start(pipe: Connection, index: int) -> None:
            arguments = (pipe, index, torch.device("cuda", index), libraries[index], num_messages, (2, 8))
            threading.Thread(target=edges.play, args=arguments, daemon=True).start()

        return dict(edges.measure_stages(start))

    numbers = measured(["0", "1"], 3)
    assert (numbers["wrong"], numbers["communicators"]) == (0, 4)
    assert numbers["abort_s"] < 20
    assert check_named("messages between stages").judge(measured(["0", "0"], 1)) is not None


def test_messages_between_stages_are_measured_between_processes() -> None:
    numbers = edges.measure_edges("cpu", num_messages=2, shape=(2, 8))
    assert numbers == {"wrong": 0, "communicators": 0, "abort_s": 0.0}, "Gloo has carried them"


@pytest.mark.slow
def test_ranks_share_a_gpu_where_torch_alone_can_have_them_and_else_it_is_said_why_not() -> None:
    assert ranks.why_not("gloo", "cpu") is None
    reason = ranks.why_not("nccl", "cpu")
    assert reason is not None
    assert reason.startswith("two ranks cannot share a GPU: ")
    assert "NCCL" in reason or "nccl" in reason


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl() -> None:
    hosts = {ranks.sharing(rank)["NCCL_HOSTID"] for rank in range(3)}
    assert len(hosts) == 3


def test_threads_that_cannot_run_because_a_call_keeps_the_interpreter_are_noticed() -> None:
    still = ranks.StandStill()
    time.sleep(0.05)
    ctypes.PyDLL(None).usleep(400_000)  # holds the interpreter's lock, as `Work.is_completed` does
    time.sleep(0.05)
    assert still.end() > 0.35


@pytest.mark.parametrize("fault", ["frozen in sums of two groups"])
def test_ranks_that_lose_one_are_interrupted_here_by_gloo(fault: str) -> None:
    numbers = ranks.measure_fault("cpu", ranks.FAULTS[fault], num_rounds=1)
    assert (numbers["rounds"], numbers["wrong"]) == (1, 0)
    assert 0 < numbers["interrupted_s"] < 20, "a busy machine takes its time"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name, fault in ranks.FAULTS.items() if fault.num_groups == 1])
def test_ranks_that_die_are_done_without_here_by_gloo(fault: str) -> None:
    numbers = ranks.measure_fault("cpu", ranks.FAULTS[fault], num_rounds=2)
    assert (numbers["rounds"], numbers["wrong"]) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", nodes.FAULTS)
def test_two_nodes_of_several_devices_are_struck_here_and_gloo_is_not_taken_for_nccl(fault: str) -> None:
    check = check_named(f"two nodes over NCCL, {fault}")
    numbers = nodes.measure_nodes("cpu", fault, num_devices=2, num_steps=30)
    assert numbers["not_by_nccl"] == 2
    by_nccl = {"steps": 60, "communicators": 16, "not_by_nccl": 0}
    assert check.judge({**numbers, **by_nccl}) is None, numbers
    assert check.judge({**numbers, "steps": 60}) is not None


@pytest.mark.slow
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
    shared = runs.measure_shared("cpu", num_steps=18, ways=["gradients", "experts"])
    assert (shared["steps"], shared["recoveries"], shared["steps_lost"]) == (18, 1, 0)
    assert max(shared["gradients"], shared["experts"]) < 1e-5
    kill = runs.measure_kill("cpu", num_steps=30)
    assert 0 < kill["next_step_s"] < 60


def test_saves_and_copies_are_measured_on_a_cpu_as_on_a_gpu() -> None:
    saved = speed.measure_saves("cpu", num_elements=1 << 16, num_products=2, width=64)
    assert all(saved[name] > 0 for name in ("slowdown", "pause_s", "of_torch_save", "of_async_save"))
    copied = speed.measure_copies("cpu", num_elements=64, num_products=2, width=64)
    assert copied["wrong"] == 0 < copied["slowdown"]
