"""Starts a run on this machine's devices from a script that was started by plain `python`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

import oobleck
from oobleck.control.training import NOTHING_TO_CONTINUE
from oobleck.errors import ConfigError, UsageError, UserError
from oobleck.host.places import place_of
from oobleck.host.script import SCRIPT_ANSWERS, SCRIPT_WAITS

from .follower import RunFollower
from .job import TrainerJob

TRAINS_ONCE = "a run trains once, as workers run the script up to its first train(); start another script for more"
_RANK = "LOCAL_RANK"
_NUM_NODES = "OOBLECK_LOCAL"
"""The number of virtual nodes, if it is set."""
_RESUMES = "Trainer.train(resume_from_checkpoint=…)"
_launched: list[object] = []
"""The job of this process's run, if there is one."""


def script_to_launch() -> Path:
    """Return the script for workers to run. Raises UsageError where there is none, or in a rank of another run."""
    # Each rank would start a run of its own.
    if _RANK in os.environ:
        raise UsageError(
            "Trainer.train(): this process is a rank of torchrun or `oobleck run`, and oobleck.transformers.Trainer "
            "starts a run of its own; start the script by `oobleck up`, or import Trainer from transformers"
        )
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise UsageError("Trainer.train(): workers run the script, and there is none here; put the lines into a file")
    return Path(script)


def train_here(trainer: Any, script: Path) -> TrainOutput:
    """Train on the devices of this machine, and return the result of `train()`.

    Raises UsageError for a second job of this process, and what `oobleck.launch` raises.
    """
    job: TrainerJob = trainer.job()
    job.check()
    if _launched:
        raise UsageError(f"Trainer.train() comes after that of another trainer: {TRAINS_ONCE}")
    _launched.append(job)
    num_nodes, set_keys = _num_nodes(), {}
    if num_nodes == 1:  # there is no pipeline to keep busy
        set_keys["microbatch_size"] = job.batch_size
    wanted = trainer.resume(job)
    if isinstance(wanted, str) and not place_of(wanted, _RESUMES).exists():
        raise ConfigError(f"{_RESUMES}: Can't find a valid checkpoint at {wanted}")
    source = "newest" if wanted is True else wanted or "never"
    os.environ[SCRIPT_WAITS] = SCRIPT_ANSWERS  # the run finds its script waiting here, and does not start it once more
    try:
        run = oobleck.launch(script, arguments=sys.argv[1:], local=num_nodes, resume=source, set=set_keys)
    finally:
        del os.environ[SCRIPT_WAITS]
    follower: RunFollower = trainer.follow(job)
    follower.saves_in(run.checkpoints)
    is_stopping = False
    for event in run:
        follower.take(event.entry)
        if follower.wants_stop:
            if not is_stopping:
                run.stop()
            is_stopping = True
        elif (allowed := follower.take_allowed()) is not None:
            run.allow(step=allowed[0], through=allowed[1])
    try:
        run.wait()
    except ConfigError as error:
        if wanted is True and NOTHING_TO_CONTINUE in str(error):
            place = trainer.args.output_dir
            raise ConfigError(f"{_RESUMES}: No valid checkpoint found in output directory ({place}): {error}") from None
        raise
    return follower.finish(run.checkpoints)


def show_user_errors_alone() -> None:
    """Show a UserError that ends this process by its message alone: a traceback through our code helps no user."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            sys.stderr.write(f"oobleck: {error}\n")
        else:
            before(kind, error, trace)

    sys.excepthook = show


def _num_nodes() -> int:
    wanted = os.environ.get(_NUM_NODES, "")
    if wanted and not wanted.isdecimal():
        raise UsageError(f"{_NUM_NODES}={wanted}: it must be a number of virtual nodes")
    return int(wanted or 0) or torch.cuda.device_count() or 1
