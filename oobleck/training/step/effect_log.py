"""What the engine does, as lines of its log: one for each effect that says something of a run.

What changes with a plan is logged as information, what every step does as debugging; so is what is only looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import assert_never

from oobleck.control import steps
from oobleck.control.protocol import PlanUpdate, StepCommitted
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

_INFO, _DEBUG, _NEVER = logging.INFO, logging.DEBUG, logging.NOTSET


@contextmanager
def logged(log: WorkerLog, effect: steps.WorkerEffect, worker_id: WorkerId) -> Iterator[None]:
    """Log the effect that the block carries out: once it is done, or with the error that ended it."""
    level = _level_of(effect)
    if level == _NEVER:
        yield
        return
    began_s = time.monotonic()
    try:
        yield
    except steps.FAILURES as error:
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


def _level_of(effect: steps.WorkerEffect) -> int:
    """The level of an effect's line; below all levels for what is only looked at, or logged elsewhere."""
    match effect:
        case (
            steps.FormGroups()
            | steps.AwaitGroups()
            | steps.ReadCheckpoint()
            | steps.Exchange()
            | steps.Adopt()
            | steps.GiveBack()
            | steps.ReportResumed()
            | steps.ReportFinished()
            | steps.Evaluate()
            | steps.Save()
            | steps.SaveEnd()
        ):
            return _INFO
        case steps.Reduce(committee=committee) | steps.Agree(committee=committee) if committee.lost:
            return _INFO  # a step is finished without those that began it
        case steps.Say(message=message):
            return _DEBUG if isinstance(message, StepCommitted) else _INFO
        case (
            steps.BeginStep()
            | steps.ForgetStep()
            | steps.AwaitRecords()
            | steps.Compute()
            | steps.Reduce()
            | steps.Agree()
            | steps.Apply()
            | steps.CompareReplicas()
            | steps.KeepGroups()
            | steps.EndTransfers()
            | steps.ShareLossScale()
            | steps.PostSection()
            | steps.Fold()
        ):
            return _DEBUG
        case (
            steps.AwaitPlanUpdate()
            | steps.PrepareToSave()
            | steps.TakeSums()
            | steps.PostTotals()
            | steps.TakeTotals()
            | steps.AwaitSection()
        ):
            return _NEVER
        case _:
            assert_never(effect)


def _text_of(effect: steps.WorkerEffect, worker_id: WorkerId) -> str:
    match effect:
        case steps.FormGroups(keys=keys, committee=committee):
            now = [f"forms {len(keys)} groups: {', '.join(sorted({key.purpose for key in keys}))}"] if keys else []
            beside = [] if committee is None else ["begins to form the groups in which it sums"]
            return " and ".join(now + beside) or "forms no groups"
        case steps.AwaitGroups():
            return "has formed the groups in which it sums"
        case steps.KeepGroups(keys=keys, generation=generation):
            return f"keeps {len(keys)} groups for generation {generation}"
        case steps.EndTransfers(keys=keys):
            return f"ends {len(keys)} groups in which layers moved"
        case steps.ReadCheckpoint(update=update, layers=layers):
            name = "" if update.restore is None else update.restore.name
            return f"reads {_layers(layers)} from {name}"
        case steps.Exchange(update=update):
            sent = [item.layer for item in update.transfers if item.source == worker_id]
            received = [item.layer for item in update.transfers if item.target == worker_id]
            return f"sends {_layers(sent)}, receives {_layers(received)}"
        case steps.ShareLossScale():
            return "shares the loss scale"
        case steps.Adopt(update=update, seat=seat, layers=layers):
            what = "rests as a spare" if seat is None else f"holds {_layers(layers)}"
            return f"adopts the plan of generation {update.generation} from step {update.boundary} on: {what}"
        case steps.ForgetStep():
            return "forgets what it has of the step in flight"
        case steps.GiveBack(number=number):
            return f"gives section {number} back"
        case steps.Evaluate(step=step):
            return f"evaluates the model of step {step}"
        case steps.Say(message=message):
            return f"reports {type(message).__name__}"
        case steps.ReportResumed(generation=generation):
            return f"computes under the plan of generation {generation}"
        case steps.ReportFinished():
            return "trains no further"
        case steps.BeginStep(step=step):
            return f"begins step {step}"
        case steps.AwaitRecords(step=step):
            return f"has the records of step {step}"
        case steps.Compute(step=step, microbatches=microbatches):
            return f"computes {len(microbatches)} microbatches of step {step}"
        case steps.Reduce(step=step, committee=committee):
            return f"reduces step {step} in generation {committee.generation}"
        case steps.Agree(step=step, committee=committee):
            return f"agrees on step {step} with {len(committee.members)} workers"
        case steps.Apply(record=record):
            return f"commits and applies step {record.step}: loss {record.loss:.4f}"
        case steps.CompareReplicas(record=record):
            return f"takes digests of its layers after step {record.step}"
        case steps.Save(step=step):
            return f"begins to save its share of step {step}"
        case steps.SaveEnd(over=over):
            return f"saves its share of step {over.step}, the last of the data"
        case steps.PostSection(step=step, number=number):
            return f"sets section {number} of step {step} aside"
        case steps.Fold(record=record):
            return f"commits section {record.number} of step {record.step}"
        case (
            steps.AwaitPlanUpdate()
            | steps.PrepareToSave()
            | steps.TakeSums()
            | steps.PostTotals()
            | steps.TakeTotals()
            | steps.AwaitSection()
        ):
            return type(effect).__name__
        case _:
            assert_never(effect)


def _layers(layers: Iterable[int]) -> str:
    numbers = sorted(set(layers))
    return f"layers {', '.join(map(str, numbers))}" if numbers else "no layers"
