"""Backward passes on a thread of their own, as torch runs those of tensors on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["AutogradThreads"]

_backward = torch.Tensor.backward


class AutogradThreads:
    """Has `Tensor.backward` run elsewhere, and wait for it. Each calling thread stands for a worker with its device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_caller = threading.local()
        self._pools: list[ThreadPoolExecutor] = []
        monkeypatch.setattr(torch.Tensor, "backward", lambda *args, **kwargs: self._run(*args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self._of_caller, "pool"):
            # The thread lives as long as the process in torch, and here as long as the test.
            pool = ThreadPoolExecutor(1, "autograd", initializer=partial(torch.set_num_threads, 1))
            self._of_caller.pool = pool
            self._pools.append(pool)
        # Torch takes the caller's modes along, and raises in the caller what a hook raises.
        modes = _get_current_dispatch_mode_stack()
        self._of_caller.pool.submit(_run_within, modes, partial(_backward, *args, **kwargs)).result()

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


def _run_within(modes: Sequence[TorchDispatchMode], run: Any) -> None:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        run()
