"""Blocks compiled by torch: one kernel where there were several, for the price of a wait at the beginning.

Only `forward` is compiled, not the module, so that what a stage does around a block (seeding, handing in what was
received) stays outside. Blocks that are alike share what was compiled, and so do processes, through torch's cache on
the disk; the first of them is the one that measures the profile, before anybody trains.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch
from torch import nn

from oobleck.errors import ConfigError

__all__ = ["compile_forward", "require_compiler"]

_COMPILERS = ("g++", "clang++")


def compile_forward(module: nn.Module) -> None:
    """Have a block's forward pass, and so its backward pass, compiled when it is first run."""
    # Workers are one process a core already; torch would start several more to compile in.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    module.forward = torch.compile(module.forward, dynamic=False)


def require_compiler(device: torch.device, *, find: Callable[[str], str | None] = shutil.which) -> None:
    """Raise ConfigError where torch would find nothing to compile with."""
    if device.type != "cpu":
        return  # Triton comes with torch's builds for GPUs
    wanted = (os.environ["CXX"],) if "CXX" in os.environ else _COMPILERS
    if not any(find(name) for name in wanted):
        raise ConfigError(f"compile: there is no {' or '.join(wanted)} here; install it on every node, or leave it out")
