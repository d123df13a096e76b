"""How to start our own processes: the interpreter, its module path, and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from oobleck import __version__

# `python -m` alone puts the current directory first on the module path, and a shell on a node starts in the home
# directory, so a file `random.py` there would replace Python's. With `-P`, only installed modules and PYTHONPATH count.
MODULE: Final = "-P -m"

_NOT_FOUND: Final = 127  # a shell's exit status for a command that does not exist

# Children of torchrun, mpirun and srun inherit these, and a script's libraries would wait for ranks that do not exist.
_PLACES: Final = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        *("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    }
)
_PREFIXES: Final = ("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE_", "MV2_COMM_", "MPI_LOCAL")


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules under this interpreter."""
    return [sys.executable, *MODULE.split(), module, *arguments]


def why_it_ended(python: str, errors: str, exit_status: int | None) -> str:
    """Explain from its stderr and the shell's exit status why a process of ours failed to start on a node."""
    lines = errors.strip().splitlines()
    if exit_status == _NOT_FOUND:
        return f"there is no {python}; name the interpreter there with --python"
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), None)
    if fatal is not None:
        return f"{python} cannot start there ({fatal}); look at the variables there that begin with PYTHON"
    if "Unknown option: -P" in lines:
        return f"{python} is older than Python 3.11; name a newer interpreter with --python"
    missing = next((line for line in reversed(lines) if "No module named" in line), None)
    if missing is not None:
        module = missing.rpartition("No module named")[2].strip()
        return (
            f"{python} has no module {module}; install oobleck-train {__version__} there, or name another interpreter "
            "with --python"
        )
    return lines[-1] if lines else f"exit status {exit_status}"


def as_no_rank(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without the variables that make a process one rank among several."""
    return {
        name: value for name, value in environment.items() if name not in _PLACES and not name.startswith(_PREFIXES)
    }
