"""Tier B: `oobleck up` over two nodes of several GPUs each, as on a cluster: NCCL carries its edges and its sums.

Both nodes are on this machine, and dial in. One loses all of its processes, or one of its workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from oobleck.errors import OobleckError
from oobleck.runtime.control_client import KillRequest, SignalRequest, StatusRequest, request
from oobleck.runtime.files import RunDirectory
from tools.gpu.checks import Check, Numbers, within
from tools.gpu.prerequisites import Need
from tools.gpu.runs import NUM_STEPS, Run, RunPlace

__all__ = ["CHECKS", "FAULTS", "measure_nodes"]

_NODES = ("one", "two")
_MOST_DEVICES = 4
_TIMEOUT_S = 140.0
_END_S = 30.0
_POLL_S = 0.02
_CARRIED = "has NCCL carry "
"""What a worker's log says before the name of each of its communicators."""

FAULTS: Mapping[str, KillRequest | SignalRequest] = {
    "a killed node": KillRequest(node="two"),
    "a killed worker": SignalRequest(node="two", signal="KILL", processes="worker0"),
}


def measure_nodes(device: str, fault: str, *, num_devices: int, num_steps: int = NUM_STEPS) -> Numbers:
    """Losses of two nodes of so many devices, of which one is struck, beside those of one worker."""
    with tempfile.TemporaryDirectory() as directory:
        place = RunPlace(Path(directory), device, num_steps)
        alone = place.up(1)
        run, carried = _run_nodes(place, num_devices, FAULTS[fault])
    expected = ["/nccl ", "/nccl/"] if num_devices > 1 else ["/nccl "]  # sums, and ways between stages
    return {
        "steps": len(run.losses),
        "difference": max(abs(one - other) for one, other in zip(alone.losses, run.losses, strict=False)),
        "steps_lost": run.summary["steps_lost"],
        "recoveries": len(run.summary["recoveries"]),
        "communicators": len(carried),
        "not_by_nccl": sum(all(part not in f"{name} " for name in carried) for part in expected),
    }


def _run_nodes(place: RunPlace, num_devices: int, strike: SignalRequest | KillRequest) -> tuple[Run, Sequence[str]]:
    """Run until the last step; return what it came to, and the names of what workers had NCCL carry."""
    base_dir, command = place.command("up", "--dial-in", "127.0.0.1:0", "--nodes", str(len(_NODES)), "--no-check")
    run = RunDirectory(base_dir=base_dir, tag=place.tag)
    keys, until_s = run.path / "dial-in" / "node.json", time.monotonic() + _TIMEOUT_S
    with ExitStack() as stack:
        master = stack.enter_context(_process(command, base_dir / "master.log"))

        def wait_for(what: str, is_so: Callable[[], bool]) -> None:
            while not is_so():
                if master.poll() is not None or time.monotonic() > until_s:
                    said = (base_dir / "master.log").read_text()[-2000:]
                    raise RuntimeError(f"oobleck up ended, or took over {_TIMEOUT_S:g} s, before {what}: {said}")
                time.sleep(_POLL_S)

        wait_for("nodes could dial in", keys.is_file)
        for index, name in enumerate(_NODES):
            line = f"{name} devices={index * num_devices}-{(index + 1) * num_devices - 1} address=127.0.0.1"
            node = [sys.executable, "-m", "oobleck", "node", str(keys), line]
            stack.enter_context(_process(node, base_dir / f"{name}.log", HOME=str(base_dir)))  # their logs lie there
        wait_for("a third of its steps", lambda: _step(run) >= place.num_steps // 3)
        request(run.control_socket, strike)
        wait_for("its end", lambda: master.poll() == 0)
    logs = [log.read_text() for log in (base_dir / ".oobleck").glob("*/agent*.log")]
    said = [line.partition(_CARRIED)[2] for log in logs for line in log.splitlines()]
    return place.read(base_dir), [name for name in said if name]


@contextmanager
def _process(command: Sequence[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that is asked to end, if it still runs, with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _step(run: RunDirectory) -> int:
    with suppress(OobleckError):  # it does not listen yet, or is busy
        return int(str(request(run.control_socket, StatusRequest())["step"] or 0))
    return 0


def _on_gpus(fault: str) -> Numbers:
    return measure_nodes("cuda", fault, num_devices=min(_MOST_DEVICES, torch.cuda.device_count() // len(_NODES)))


CHECKS: Sequence[Check] = tuple(
    Check(
        tier="B",
        name=f"two nodes over NCCL, {fault}",
        measure=partial(_on_gpus, fault),
        judge=within(
            {"steps": NUM_STEPS, "recoveries": 1, "communicators": 2},
            {"difference": 1e-9, "steps_lost": 0, "not_by_nccl": 0},
        ),
        num_gpus=len(_NODES),
        needs=(Need.SHARED_GPU,),
    )
    for fault in FAULTS
)
