"""Converting checkpoints without loading torch into this process: a process of its own does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from oobleck.errors import ConfigError, ResourceLost

__all__ = ["convert"]


def convert(what: str, source: Path, target: Path) -> str:
    """Run `export` or `import` from one path to another; returns what it said. Takes as long as it takes.

    Raises ConfigError for input that cannot be used, ResourceLost when the process fails.
    """
    command = [sys.executable, "-m", "oobleck.training.conversion", what, str(source), str(target)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    last_line = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == 78:
        raise ConfigError(last_line)
    if done.returncode != 0:
        raise ResourceLost(f"the checkpoint could not be converted: {last_line}")
    return done.stdout.strip()
