"""The process that trains without Oobleck, for `oobleck verify`.

    receives    a PlainJob
    sends       a PlainAccount; after one with a problem, the process ends
    receives    TensorsAsked, once a run has trained the same steps
    sends       TensorsCompared

The script's own output goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from oobleck.control.verification import PlainAccount, PlainJob, TensorsAsked, TensorsCompared
from oobleck.errors import ConfigError, CorruptCheckpoint, UserError
from oobleck.host.script import blamed
from oobleck.host.streams import shield_scripts
from oobleck.storage import CheckpointDirectory
from oobleck.training.checkpoint import read_weights
from oobleck.wire import decode_json, encode_json

from .recorder import Recorder

Train = Callable[[PlainJob], tuple[PlainAccount, Recorder]]


def serve(train: Train) -> int:
    """Train the job on stdin by `train`, and compare it with a run's checkpoints; returns the exit status."""
    # The script may print, so nothing but answers goes to the original stdout.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    shield_scripts()
    asked = decode_json((PlainJob,), sys.stdin.buffer.readline())
    try:
        account, recorder = train(asked)
    except UserError as error:
        account, recorder = PlainAccount(problem=str(error), is_refused=isinstance(error, ConfigError)), None
    # The user's script may fail in any way; without one, the fault is ours.
    except Exception as error:
        if asked.job.script is None:
            raise
        account, recorder = PlainAccount(problem=blamed(error, asked.job.script)), None
    answers.write(encode_json(account))
    answers.flush()
    line = sys.stdin.buffer.readline()
    if recorder is not None and line:
        # The memory is needed for the run's weights.
        recorder.forget_model()
        asked_tensors = decode_json((TensorsAsked,), line)
        answers.write(encode_json(_compared(recorder, Path(asked_tensors.checkpoints))))
        answers.flush()
    return 0


def _compared(recorder: Recorder, directory: Path) -> TensorsCompared:
    try:
        saved = {
            each.manifest.step: directory / each.name
            for each in CheckpointDirectory(directory).find()
            if each.manifest is not None
        }

        def weights_after(step: int) -> Mapping[str, torch.Tensor] | None:
            return read_weights(saved[step])[1] if step in saved else None

        tensors = tuple(recorder.compare(weights_after))
    except CorruptCheckpoint as error:
        return TensorsCompared(problem=str(error))
    return TensorsCompared(tensors=tensors, steps=tuple(sorted({each.step for each in tensors})))
