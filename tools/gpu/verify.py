"""Verifies on GPUs what no test without one can: `python tools/gpu/verify.py --output DIR`.

    B   real NCCL: three ranks, of which one is lost (`ranks.py`); messages between two stages (`edges.py`); runs of two
        nodes of several GPUs (`nodes.py`)
    A   correct: NCCL's manners, copies, forked workers, failures of the device (`correct.py`); losses of disturbed runs
        (`runs.py`); losses beside a plain loop, memory beside the plan (`training.py`); all of it under torch's and
        CUDA's sanitizers (`sanitized.py`)
    C   fast: digests, copies, saves, the data sheet (`speed.py`); from a kill to the next step (`runs.py`); whole
        models beside plain loops (`training.py`)

It runs these tiers in this order, or one of them, and begins no check after its time is over. It needs nothing that is
not on the machine (`prerequisites.py` says what, before anything starts), prints a line for each check, and writes
`verified.json`, or `tier-A.json`. Ends with 0 if all that was run passed, 1 where anything falls short, and 3 where
nothing was verified. What cannot be run here is named with the reason, and is no failure.

A check measures numbers, and a rule of its own judges them; `tests/tools/test_verify.py` has every rule fail.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.gpu import correct, edges, nodes, prerequisites, ranks, runs, sanitized, speed, training
from tools.gpu.checks import Check, Outcome, Result, run

__all__ = ["CHECKS", "main", "verify"]

CHECKS: Sequence[Check] = (
    *edges.CHECKS,
    *ranks.CHECKS,
    *nodes.CHECKS,
    *correct.CHECKS,
    *sanitized.CHECKS,
    *runs.CHECKS,
    *training.CHECKS,
    *speed.CHECKS,
)
_TIERS = ("B", "A", "C")
_MINUTES = 10.0
_PACKAGES = ("pytest", "hypothesis", "pytest-timeout", "pytest-trio", "nvidia-ml-py")
_BEYOND = "NVLink, NVLS, InfiniBand and errors of a remote NIC"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tier", choices=sorted(_TIERS), help="only this one; all of them by default")
    parser.add_argument("--check", default="", metavar="WORDS", help="only those with these words in their names")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help="after which no check begins (default: %(default)g)"
    )
    parser.add_argument("--wheels", type=Path, help=f"a folder of wheels from which to install {', '.join(_PACKAGES)}")
    given = parser.parse_args(arguments)
    if given.wheels is not None:
        _install(given.wheels)
    machine = prerequisites.survey()
    missing = prerequisites.missing(machine)
    for need in prerequisites.Need:
        print(f"missing  {need.value}: {missing[need]}" if need in missing else f"there    {need.value}")
    given.output.mkdir(parents=True, exist_ok=True)
    file = given.output / ("verified.json" if given.tier is None else f"tier-{given.tier}.json")

    def keep(results: Sequence[Result]) -> None:
        document = {"tier": given.tier or "all", "machine": _machine(), "results": [asdict(each) for each in results]}
        file.write_text(json.dumps(document, indent=2) + "\n")

    tiers = _TIERS if given.tier is None else (given.tier,)
    checks = [check for tier in tiers for check in CHECKS if check.tier == tier and given.check in check.name]
    if not checks:
        parser.error(f"--check: no check of these tiers has {given.check!r} in its name")
    results = verify(checks, machine.num_gpus, missing, budget_s=60 * given.minutes, keep=keep)
    print(f"never to be seen on one machine: {_BEYOND}")
    outcome = Outcome.of(results)
    for words in _closing(results, outcome):
        print(words)
    return int(outcome)


def verify(
    checks: Sequence[Check],
    num_gpus: int,
    missing: Mapping[prerequisites.Need, str],
    *,
    budget_s: float,
    keep: Callable[[Sequence[Result]], None] = lambda _: None,
) -> Sequence[Result]:
    """Run checks in their order, and say and `keep` each result as it comes."""
    began_s = time.monotonic()
    results: list[Result] = []
    for check in checks:
        if num_gpus >= check.num_gpus and time.monotonic() - began_s > budget_s:
            check = replace(check, why_not=lambda: f"{budget_s / 60:g} minutes are over; --minutes allows more")
        results.append(run(check, num_gpus=num_gpus, missing=missing))
        each = results[-1]
        print(
            f"{each.outcome:8} {each.seconds:7.1f} s  {check.tier}  {each.name}{': ' if each.detail else ''}"
            f"{each.detail}",
            flush=True,
        )
        keep(results)
    return results


def _closing(results: Sequence[Result], outcome: Outcome) -> Sequence[str]:
    counts = {word: sum(each.outcome == word for each in results) for word in ("passed", "failed", "not run")}
    words = [", ".join(f"{count} {word}" for word, count in counts.items())]
    if outcome is Outcome.NOTHING_VERIFIED:
        words.append("nothing was verified: no check that needs a GPU was run")
    return words


def _install(wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(wheels), *_PACKAGES]
    subprocess.run(command, check=True)


def _machine() -> dict[str, str]:
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "gpu": "none"}
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


if __name__ == "__main__":
    sys.exit(main())
