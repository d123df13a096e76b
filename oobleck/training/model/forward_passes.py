"""What a block's forward pass is wrapped in: compiled by torch, or computed again on the way back.

Only `forward` is wrapped, not the module, so that what a stage does around a block (seeding, handing in what was
received) happens once and stays outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oobleck.errors import ConfigError

_COMPILERS = ("g++", "clang++")


def compile_forward(module: nn.Module) -> None:
    """Have a block's forward pass, and so its backward pass, compiled when it is first run.

    Blocks that are alike share what was compiled, and so do processes, through torch's cache on the disk; the first of
    them is the one that measures the profile, before any worker trains.
    """
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


def recompute_activations(module: nn.Module, *, draws_at_random: bool) -> None:
    """Have a block keep its input alone in training, and compute what is between again in its backward pass.

    Dropout draws the same numbers again. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    forward = module.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws_at_random, **kwargs)

    module.forward = forgetful


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What a stage keeps and computes in."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None
    """What autocast computes in; None for no autocast."""

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Read a job's `dtype`."""
        named: torch.dtype = getattr(torch, dtype)
        if named in (torch.float32, torch.float64):
            return cls(parameters=named)
        return cls(parameters=torch.float32, autocast=named)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would be lost below the smallest number: float16 has five bits of exponent."""
        return self.autocast == torch.float16
