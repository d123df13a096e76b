"""A trainer whose script was started by plain `python`: it starts a run on this machine's devices itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import TrainOutput

import oobleck
from oobleck.errors import UsageError, UserError
from oobleck.host.script import SCRIPT_WAITS

if TYPE_CHECKING:
    from .trainer import Trainer

TRAINS_ONCE = "a run trains once, as workers run the script up to its first train(); start another script for more"
_RANK = "LOCAL_RANK"
_NUM_NODES = "OOBLECK_LOCAL"
"""How many virtual nodes there are, if it is set."""
_launched: list[object] = []
"""The job of this process's run, once there is one."""


def train_here(trainer: Trainer) -> TrainOutput:
    """Train on the devices of this machine, and return what `train()` returns.

    Raises UsageError where there is no script that workers could run, and what `oobleck.launch` raises.
    """
    if _RANK in os.environ:
        raise UsageError(
            "Trainer.train(): this process is a rank of torchrun or `oobleck run`, and oobleck.transformers.Trainer "
            "starts a run of its own; start the script by `oobleck up`, or import Trainer from transformers"
        )
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise UsageError("Trainer.train(): workers run the script, and there is none here; put the lines into a file")
    job = trainer.job()
    job.check()
    if _launched:
        raise UsageError(f"{type(trainer).__name__}.train() comes after that of another trainer: {TRAINS_ONCE}")
    _launched.append(job)
    num_nodes, set_keys = _num_nodes(), {}
    if num_nodes == 1:  # there is no pipeline to keep busy
        set_keys["microbatch_size"] = trainer.args.per_device_train_batch_size
    with _while_it_waits():
        run = oobleck.launch(
            Path(script), arguments=sys.argv[1:], local=num_nodes, resume=_resume(trainer), set=set_keys
        )
    follower = trainer.follow(job)
    for event in run:
        follower.take(event.entry)
        if follower.wants_stop:
            run.stop()
    run.wait()
    return follower.finish(run.checkpoints)


def show_user_errors_alone() -> None:
    """Have a UserError that ends this process shown by its message: where our own code raised it helps nobody."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            sys.stderr.write(f"oobleck: {error}\n")
        else:
            before(kind, error, trace)

    sys.excepthook = show


def _num_nodes() -> int:
    """As many as this machine has GPUs, or one."""
    given = os.environ.get(_NUM_NODES, "")
    if given and not given.isdecimal():
        raise UsageError(f"{_NUM_NODES}={given}: it must be a number of virtual nodes")
    return int(given or 0) or torch.cuda.device_count() or 1


def _resume(trainer: Trainer) -> str:
    """As transformers, a script starts from its model unless it says otherwise."""
    wanted: Any = trainer.resume()
    return "auto" if wanted is True else wanted or "never"


@contextmanager
def _while_it_waits() -> Iterator[None]:
    """Within the block, runs that are started know that the script is here, and does not run once more for that."""
    os.environ[SCRIPT_WAITS] = "1"
    try:
        yield
    finally:
        del os.environ[SCRIPT_WAITS]
