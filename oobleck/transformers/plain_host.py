"""Trains a Trainer's script by transformers alone: `python -m oobleck.transformers.plain_host`.

The script runs as `__main__` up to its `train()`, as it does in workers, with transformers' own Trainer, which records
its first steps, in the place of `oobleck.transformers.Trainer`.
"""

from __future__ import annotations

import sys
import types

import transformers

import oobleck
from oobleck.control.verification import PlainAccount, PlainJob
from oobleck.host.handover import TrainReached
from oobleck.host.script import never_trained, run_as_main
from oobleck.training.plain import Recorder, serve
from oobleck.training.randomness import seed_scripts

from .plain_trainer import Observation, plain_trainer

_OURS = "oobleck.transformers"


def _train(asked: PlainJob) -> tuple[PlainAccount, Recorder]:
    assert asked.job.script is not None
    observation = Observation(asked)
    stand_in = types.ModuleType(_OURS)
    stand_in.__dict__["Trainer"] = plain_trainer(observation)
    stand_in.__dict__["Seq2SeqTrainer"] = plain_trainer(observation, transformers.Seq2SeqTrainer)
    # `import oobleck.transformers` looks into the first, `from oobleck import transformers` into the second.
    sys.modules[_OURS] = stand_in
    vars(oobleck)["transformers"] = stand_in
    seed_scripts()
    try:
        run_as_main(asked.job.script)
    except TrainReached:
        return observation.account(), observation.recorder
    raise never_trained(asked.job.script)


if __name__ == "__main__":
    sys.exit(serve(_train))
