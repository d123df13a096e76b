"""Runs of `oobleck up` with workers that share a device: losses beside those of one worker, and how long a kill costs.

The same on a CPU, where tests run it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.checks import Check, Numbers, within
from tools.gpu.prerequisites import Need

__all__ = ["CHECKS", "NUM_STEPS", "SHARED", "Run", "RunPlace", "measure_kill", "measure_losses", "measure_shared"]

_JOB = """\
tag: verify
model: MODEL
data: {sequence_length: 32, vocab_size: 300, paths: [TEXT]}
max_steps: STEPS
global_batch_size: 16
microbatch_size: 2
dtype: float64
device: DEVICE
torch_threads: 1
checkpoint: {enabled: false}
log_level: debug
"""
NUM_STEPS = 60
"""Enough that a node freezes before the last, however quick the device is."""
_GPT2 = "{type: gpt2, n_embd: 32, n_layer: 4, n_head: 2}"
_LLAMA = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 2"
SHARED: Mapping[str, tuple[str, Sequence[str]]] = {
    "tensor_parallel": (f"{{type: llama, {_LLAMA}}}", ("tensor_parallel=2",)),
    "optimizer": (f"{{type: llama, {_LLAMA}}}", ("sharding=optimizer", "sharding_devices=2")),
    "gradients": (
        f"{{type: llama, {_LLAMA}}}",
        ("sharding=gradients", "sharding_devices=2", "recompute=selective"),
    ),
    "bfloat16": (
        f"{{type: llama, {_LLAMA}}}",
        ("dtype=bfloat16", "sharding=gradients", "sharding_devices=2", "recompute=selective"),
    ),
    "all": (f"{{type: llama, {_LLAMA}}}", ("sharding=all", "sharding_devices=2", "recompute=all")),
    "contexts": (
        f"{{type: llama, {_LLAMA}}}",
        ("sharding=gradients", "sharding_devices=2", "context_parallel=2", "dropout=false"),
    ),
    "experts": (
        f"{{type: mixtral, num_local_experts: 4, {_LLAMA}}}",
        ("sharding=all", "sharding_devices=2", "expert_parallel=true"),
    ),
}
"""Ways in which the two devices of a node hold one stage: the model, and settings of the job."""
_NODES = ("node0", "node1", "node2", "node3")
_FROZEN_AT_S = 0.1
_TIMEOUT_S = 140
_AT_ONCE = 2
"""Runs: each has up to four workers, and so contexts of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run of `oobleck up` came to."""

    summary: dict[str, Any]
    journal: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return list(self.summary["losses"])


class RunPlace:
    """A job on a device, and where its runs lie."""

    tag = "verify"

    def __init__(self, directory: Path, device: str, num_steps: int, *, model: str = _GPT2) -> None:
        self.num_steps = num_steps
        self._device = device
        self._directory = directory
        self._job = directory / "job.yaml"
        self._num_runs = 0
        (directory / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 4000)
        text = _JOB.replace("TEXT", str(directory / "text.txt")).replace("MODEL", model)
        self._job.write_text(text.replace("DEVICE", device).replace("STEPS", str(num_steps)))

    def up(self, nodes: int, *options: str) -> Run:
        return self._run("up", "--local", str(nodes), *options)

    def freeze(self, nodes: Sequence[str], node: str) -> Run:
        """Run until the last step, with a node that freezes on the way and stays so."""
        trace = self._directory / "trace.json"
        events = [{"t_s": _FROZEN_AT_S, "kind": "node_frozen", "node": node}]
        trace.write_text(
            json.dumps({"version": 1, "duration_s": 1e5, "nodes": nodes, "start": nodes, "events": events})
        )
        return self._run("chaos", str(trace), "--local", str(len(nodes)), "--steps", str(self.num_steps))

    def command(self, *arguments: str) -> tuple[Path, list[str]]:
        """Return a directory of its own for a run of `oobleck` with these arguments, and the whole command."""
        self._num_runs += 1
        base_dir = self._directory / f"runs{self._num_runs}"
        base_dir.mkdir()
        command = [sys.executable, "-m", "oobleck", *arguments, "--job", str(self._job), "--plain"]
        return base_dir, [*command, "--base-dir", str(base_dir), "--summary", str(base_dir / "summary.json")]

    def read(self, base_dir: Path) -> Run:
        """Read what the run that has ended came to."""
        lines = (base_dir / self.tag / "journal.jsonl").read_text().splitlines()
        summary = json.loads((base_dir / "summary.json").read_text())
        return Run(summary=summary, journal=[json.loads(line) for line in lines])

    def _run(self, *arguments: str) -> Run:
        base_dir, problem = self._try(arguments, os.environ)
        if problem and self._device == "cuda":
            # Kernels fail after the call that launches them, unless each is waited for.
            _, again = self._try(arguments, {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"})
            problem = f"{problem}\nwith CUDA_LAUNCH_BLOCKING=1: {again or 'no error'}"
        if problem:
            raise RuntimeError(problem)
        return self.read(base_dir)

    def _try(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Path, str]:
        """Return the run's directory, and how it failed, if it did."""
        base_dir, command = self.command(*arguments)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe) as process:
            try:
                _, told = process.communicate(timeout=_TIMEOUT_S)
            except BaseException:
                process.send_signal(signal.SIGINT)  # killed, it would leave its agents behind
                raise
        if not process.returncode:
            return base_dir, ""
        journal = base_dir / self.tag / "journal.jsonl"
        tracebacks = re.findall(r'"traceback": ?"((?:[^"\\]|\\.)*)"', journal.read_text() if journal.exists() else "")
        why = "\n".join([told[-2000:], *[json.loads(f'"{each}"')[-2000:] for each in tracebacks[:1]]])
        return base_dir, f"oobleck {' '.join(arguments)} ended with {process.returncode}: {why}"


def measure_losses(device: str, *, num_steps: int = NUM_STEPS) -> Numbers:
    """Losses of four workers, undisturbed, with a killed node and with a frozen one, beside those of one worker."""
    with tempfile.TemporaryDirectory() as directory:
        place = RunPlace(Path(directory), device, num_steps)
        alone = place.up(1)
        runs = {
            "whole": place.up(4),
            "killed": place.up(4, "--kill", f"node2@{num_steps // 3}"),
            "frozen": place.freeze(_NODES, "node2"),
        }
    differences = [
        abs(one - other)
        for run in runs.values()
        for one, other in zip(alone.losses, run.losses, strict=False)  # their numbers are judged by themselves
    ]
    return {
        "steps": min(len(run.losses) for run in runs.values()),
        "difference": max(differences),
        "steps_lost": sum(run.summary["steps_lost"] for run in runs.values()),
        **{f"{name}_recoveries": len(run.summary["recoveries"]) for name, run in runs.items()},
    }


def measure_shared(device: str, *, num_steps: int = NUM_STEPS, ways: Collection[str] = SHARED.keys()) -> Numbers:
    """Losses of two nodes whose two devices hold one stage, one of the nodes killed, beside those of one worker."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        measuring = {way: pool.submit(_measure_way, device, num_steps, way) for way in ways}
    if problems := [f"{way}: {error}" for way, each in measuring.items() if (error := each.exception())]:
        raise RuntimeError("\n".join(problems))
    measured = {way: each.result() for way, each in measuring.items()}
    return {
        **{name: min(each[name] for each in measured.values()) for name in ("steps", "recoveries")},
        "steps_lost": sum(each["steps_lost"] for each in measured.values()),
        **{way: each["difference"] for way, each in measured.items()},
    }


def _measure_way(device: str, num_steps: int, way: str) -> Numbers:
    model, settings = SHARED[way]
    options = list(itertools.chain.from_iterable(("--set", setting) for setting in settings))
    dtype = ("--set", "dtype=bfloat16") if "dtype=bfloat16" in settings else ()
    with tempfile.TemporaryDirectory() as directory:
        place = RunPlace(Path(directory), device, num_steps, model=model)
        alone = place.up(1, *dtype)
        run = place.up(2, *options, "--kill", f"node1@{num_steps // 3}")
    differences = (abs(one - other) for one, other in zip(alone.losses, run.losses, strict=False))
    return {
        "steps": min(len(alone.losses), len(run.losses)),
        "recoveries": len(run.summary["recoveries"]),
        "steps_lost": run.summary["steps_lost"],
        "difference": max(differences),
    }


def measure_kill(device: str, *, num_steps: int = NUM_STEPS) -> Numbers:
    """Seconds from the notice of a killed node to the next committed step, and without progress."""
    with tempfile.TemporaryDirectory() as directory:
        run = RunPlace(Path(directory), device, num_steps).up(4, "--kill", f"node2@{num_steps // 3}")
    (recovery,) = run.summary["recoveries"]
    after = (entry["t_s"] for entry in run.journal if entry["@type"] == "StepDone" and entry["t_s"] > recovery["t_s"])
    return {"next_step_s": min(after) - recovery["t_s"], "stall_s": recovery["stall_s"]}


CHECKS: Sequence[Check] = (
    Check(
        tier="A",
        name="losses of four workers",
        measure=lambda: measure_losses("cuda"),
        judge=within(
            {"steps": NUM_STEPS, "killed_recoveries": 1, "frozen_recoveries": 1},
            {"difference": 1e-9, "steps_lost": 0, "whole_recoveries": 0},
        ),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="A",
        name="losses of devices that share stages",
        measure=lambda: measure_shared("cuda"),
        judge=within(
            {"steps": NUM_STEPS, "recoveries": 1}, {"steps_lost": 0, **dict.fromkeys(SHARED, 1e-5), "bfloat16": 1e-2}
        ),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="C",
        name="from a kill to the next step",
        measure=lambda: measure_kill("cuda"),
        judge=within({}, {"next_step_s": 3.0}),
        needs=(Need.SHARED_GPU,),
    ),
)
