"""How much processor time a script takes in this checkout and in another one, run in turns.

    python tools/bench/in_turns.py --before ../main tools/bench/simulator.py --nodes 2048

Other programs on the machine slow both down alike, so their ratio counts, not the seconds. Both use this interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.smoke import parse_arguments

HERE = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, default=HERE, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("script", nargs="?", default="tools/bench/simulator.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parse_arguments(parser, rounds=1)
    arguments = ["--smoke"] if given.smoke else given.arguments
    used_s: dict[Path, list[float]] = {given.before.resolve(): [], HERE: []}
    for _ in range(given.rounds):
        for tree, found in used_s.items():
            found.append(processor_s(tree, given.script, arguments))
    before_s, after_s = (statistics.median(found) for found in used_s.values()) if len(used_s) == 2 else (0.0, 0.0)
    for tree, found in used_s.items():
        print(f"{tree.name}: {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")
    if before_s:
        print(f"{after_s / before_s:.3f} times as long")


def processor_s(tree: Path, script: str, arguments: list[str]) -> float:
    """Run a script to its end; return its processor seconds, in the kernel too, the start of Python included."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    program = subprocess.Popen(
        [sys.executable, script, *arguments], cwd=tree, env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise SystemExit(f"{script} failed in {tree}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
