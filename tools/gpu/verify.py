"""Verifies on one GPU what no test without one can: `python tools/gpu/verify.py --tier A --output DIR`.

    A   correct: NCCL's manners, copies, forked workers, failures of the device (`correct.py`); losses of disturbed runs
        (`runs.py`); losses beside a plain loop, memory beside the plan (`training.py`); all of it under torch's and
        CUDA's sanitizers (`sanitized.py`)
    B   real NCCL: three ranks on one GPU, one of which is lost (`ranks.py`); messages between two GPUs (`edges.py`)
    C   fast: digests, copies, saves, the data sheet (`speed.py`); from a kill to the next step (`runs.py`); whole
        models beside plain loops (`training.py`)

Each tier takes less than eight minutes, needs nothing that is not on the machine, prints a table, and writes
`tier-A.json`. Ends with 1 where anything falls short. What cannot be run here is named with the reason, and is no
failure; on a machine without a GPU that is all but the fakes.

A check measures numbers, and a rule of its own judges them; `tests/tools/test_verify.py` has every rule fail.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.gpu import correct, edges, ranks, runs, sanitized, speed, training
from tools.gpu.checks import Check, run

__all__ = ["CHECKS", "main"]

CHECKS: Sequence[Check] = (
    *correct.CHECKS,
    *sanitized.CHECKS,
    *runs.CHECKS,
    *training.CHECKS,
    *edges.CHECKS,
    *ranks.CHECKS,
    *speed.CHECKS,
)
IMPOSSIBLE = "NVLink, NVLS, InfiniBand, errors of a remote NIC, and speed between GPUs: no single GPU shows them"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tier; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tier", choices=("A", "B", "C"), required=True)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument(
        "--wheels", type=Path, help="a folder of wheels, from which pytest is installed if it is missing"
    )
    given = parser.parse_args(arguments)
    if given.wheels is not None:
        _install(given.wheels)
    num_gpus = torch.cuda.device_count()
    results = [run(check, num_gpus=num_gpus) for check in CHECKS if check.tier == given.tier]
    given.output.mkdir(parents=True, exist_ok=True)
    document = {"tier": given.tier, "machine": _machine(), "results": [asdict(each) for each in results]}
    (given.output / f"tier-{given.tier}.json").write_text(json.dumps(document, indent=2) + "\n")
    for each in results:
        print(f"{each.outcome:8} {each.seconds:7.1f} s  {each.name}{': ' if each.detail else ''}{each.detail}")
    print(f"never to be seen on one GPU: {IMPOSSIBLE}")
    return int(any(each.outcome == "failed" for each in results))


def _install(wheels: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--find-links",
        str(wheels),
        "pytest",
        "hypothesis",
    ]
    subprocess.run(command, check=True)


def _machine() -> dict[str, str]:
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "gpu": "none"}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


if __name__ == "__main__":
    sys.exit(main())
