"""What the engine does, as lines of its log: one for each effect that says something of a run.

What changes with a plan is logged as information, what every step does as debugging; so is what is only looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import assert_never

from oobleck.control import commit
from oobleck.control.protocol import PlanUpdate, StepCommitted
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

_INFO, _DEBUG, _NEVER = logging.INFO, logging.DEBUG, logging.NOTSET


@contextmanager
def logged(log: WorkerLog, effect: commit.WorkerEffect, worker_id: WorkerId) -> Iterator[None]:
    """Log the effect that the block carries out: once it is done, or with the error that ended it."""
    level = _level_of(effect)
    if level == _NEVER:
        yield
        return
    began_s = time.monotonic()
    try:
        yield
    except commit.FAILURES as error:
        words = (type(error).__name__, str(error) or "a fence came first")
        log.info("%s: ended after %.3f s by %s: %s", _text_of(effect, worker_id), time.monotonic() - began_s, *words)
        raise
    if log.isEnabledFor(level):
        log.log(level, "%s (%.3f s)", _text_of(effect, worker_id), time.monotonic() - began_s)


def update_text(update: PlanUpdate) -> str:
    """What an order asks for, in a line."""
    parts = [f"plan of {len(update.plan.pipelines)} pipelines from step {update.boundary} on"]
    if update.catch_up is not None:
        parts.append(f"catch up with step {update.catch_up.step}")
    if update.catch_up_section is not None:
        parts.append(f"catch up with section {update.catch_up_section.number} of step {update.catch_up_section.step}")
    if update.finish is not None:
        parts.append(f"finish step {update.finish} with {len(update.segments)} extra segments")
    if update.restore is not None:
        parts.append(f"restore {update.restore.name}")
    if update.initial:
        parts.append("begin with the initial values")
    if update.transfers:
        parts.append(f"{len(update.transfers)} transfers of layers")
    if update.lost:
        parts.append(f"without {', '.join(update.lost)}")
    return ", ".join(parts)


def _level_of(effect: commit.WorkerEffect) -> int:
    """The level of an effect's line; below all levels for what is only looked at, or logged elsewhere."""
    match effect:
        case (
            commit.FormGroups()
            | commit.AwaitGroups()
            | commit.ReadCheckpoint()
            | commit.Exchange()
            | commit.Adopt()
            | commit.GiveBack()
            | commit.ReportResumed()
            | commit.ReportFinished()
            | commit.Evaluate()
            | commit.Save()
            | commit.SaveEnd()
        ):
            return _INFO
        case commit.Reduce(committee=committee) | commit.Agree(committee=committee) if committee.lost:
            return _INFO  # a step is finished without those that began it
        case commit.Say(message=message):
            return _DEBUG if isinstance(message, StepCommitted) else _INFO
        case (
            commit.BeginStep()
            | commit.ForgetStep()
            | commit.AwaitRecords()
            | commit.Compute()
            | commit.Reduce()
            | commit.Agree()
            | commit.Apply()
            | commit.CompareReplicas()
            | commit.KeepGroups()
            | commit.EndTransfers()
            | commit.ShareLossScale()
            | commit.PostSection()
            | commit.Fold()
        ):
            return _DEBUG
        case (
            commit.AwaitPlanUpdate()
            | commit.PrepareToSave()
            | commit.TakeSums()
            | commit.PostTotals()
            | commit.TakeTotals()
            | commit.AwaitSection()
        ):
            return _NEVER
        case _:
            assert_never(effect)


def _text_of(effect: commit.WorkerEffect, worker_id: WorkerId) -> str:
    match effect:
        case commit.FormGroups(keys=keys, committee=committee):
            now = [f"forms {len(keys)} groups: {', '.join(sorted({key.purpose for key in keys}))}"] if keys else []
            beside = [] if committee is None else ["begins to form the groups in which it sums"]
            return " and ".join(now + beside) or "forms no groups"
        case commit.AwaitGroups():
            return "has formed the groups in which it sums"
        case commit.KeepGroups(keys=keys, generation=generation):
            return f"keeps {len(keys)} groups for generation {generation}"
        case commit.EndTransfers(keys=keys):
            return f"ends {len(keys)} groups in which layers moved"
        case commit.ReadCheckpoint(update=update, layers=layers):
            name = "" if update.restore is None else update.restore.name
            return f"reads {_layers(layers)} from {name}"
        case commit.Exchange(update=update):
            sent = [item.layer for item in update.transfers if item.source == worker_id]
            received = [item.layer for item in update.transfers if item.target == worker_id]
            return f"sends {_layers(sent)}, receives {_layers(received)}"
        case commit.ShareLossScale():
            return "shares the loss scale"
        case commit.Adopt(update=update, seat=seat, layers=layers):
            what = "rests as a spare" if seat is None else f"holds {_layers(layers)}"
            return f"adopts the plan of generation {update.generation} from step {update.boundary} on: {what}"
        case commit.ForgetStep():
            return "forgets what it has of the step in flight"
        case commit.GiveBack(number=number):
            return f"gives section {number} back"
        case commit.Evaluate(step=step):
            return f"evaluates the model of step {step}"
        case commit.Say(message=message):
            return f"reports {type(message).__name__}"
        case commit.ReportResumed(generation=generation):
            return f"computes under the plan of generation {generation}"
        case commit.ReportFinished():
            return "trains no further"
        case commit.BeginStep(step=step):
            return f"begins step {step}"
        case commit.AwaitRecords(step=step):
            return f"has the records of step {step}"
        case commit.Compute(step=step, microbatches=microbatches):
            return f"computes {len(microbatches)} microbatches of step {step}"
        case commit.Reduce(step=step, committee=committee):
            return f"reduces step {step} in generation {committee.generation}"
        case commit.Agree(step=step, committee=committee):
            return f"agrees on step {step} with {len(committee.members)} workers"
        case commit.Apply(record=record):
            return f"commits and applies step {record.step}: loss {record.loss:.4f}"
        case commit.CompareReplicas(record=record):
            return f"takes digests of its layers after step {record.step}"
        case commit.Save(step=step):
            return f"begins to save its share of step {step}"
        case commit.SaveEnd(over=over):
            return f"saves its share of step {over.step}, the last of the data"
        case commit.PostSection(step=step, number=number):
            return f"sets section {number} of step {step} aside"
        case commit.Fold(record=record):
            return f"commits section {record.number} of step {record.step}"
        case (
            commit.AwaitPlanUpdate()
            | commit.PrepareToSave()
            | commit.TakeSums()
            | commit.PostTotals()
            | commit.TakeTotals()
            | commit.AwaitSection()
        ):
            return type(effect).__name__
        case _:
            assert_never(effect)


def _layers(layers: Iterable[int]) -> str:
    numbers = sorted(set(layers))
    return f"layers {', '.join(map(str, numbers))}" if numbers else "no layers"
