"""Logs the engine's effects, one line each: effects of a plan as information, those of every step as debugging."""

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

_INFO, _DEBUG = logging.INFO, logging.DEBUG


@contextmanager
def logged(log: WorkerLog, effect: steps.WorkerEffect, worker_id: WorkerId) -> Iterator[None]:
    """Log the effect that the block carries out, once it is done, or with the error that ended it."""
    line = _line_of(effect, worker_id)
    if line is None:
        yield
        return
    (level, text), began_s = line, time.monotonic()
    try:
        yield
    except steps.FAILURES as error:
        words = (type(error).__name__, str(error) or "a fence came first")
        log.info("%s: ended after %.3f s by %s: %s", text, time.monotonic() - began_s, *words)
        raise
    log.log(level, "%s (%.3f s)", text, time.monotonic() - began_s)


def update_text(update: PlanUpdate) -> str:
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


def _line_of(effect: steps.WorkerEffect, worker_id: WorkerId) -> tuple[int, str] | None:
    """Return the level and the text of an effect's line; None for effects that poll, or are logged elsewhere."""
    match effect:
        case steps.FormGroups(keys=keys, committee=committee):
            now = [f"forms {len(keys)} groups: {', '.join(sorted({key.purpose for key in keys}))}"] if keys else []
            overlapped = [] if committee is None else ["begins to form the groups in which it sums"]
            return _INFO, " and ".join(now + overlapped) or "forms no groups"
        case steps.AwaitGroups():
            return _INFO, "has formed the groups in which it sums"
        case steps.KeepGroups(keys=keys, generation=generation):
            return _DEBUG, f"keeps {len(keys)} groups for generation {generation}"
        case steps.EndTransfers(keys=keys):
            return _DEBUG, f"ends {len(keys)} groups in which layers moved"
        case steps.ReadCheckpoint(update=update, layers=layers):
            return _INFO, f"reads {_layers(layers)} from {'' if update.restore is None else update.restore.name}"
        case steps.Exchange(update=update):
            sent = [item.layer for item in update.transfers if item.source == worker_id]
            received = [item.layer for item in update.transfers if item.target == worker_id]
            return _INFO, f"sends {_layers(sent)}, receives {_layers(received)}"
        case steps.ShareLossScale():
            return _DEBUG, "shares the loss scale"
        case steps.Adopt(update=update, seat=seat, layers=layers):
            what = "rests as a spare" if seat is None else f"holds {_layers(layers)}"
            return _INFO, f"adopts the plan of generation {update.generation} from step {update.boundary} on: {what}"
        case steps.ForgetStep():
            return _DEBUG, "drops its results of the step in flight"
        case steps.GiveBack(number=number):
            return _INFO, f"gives section {number} back"
        case steps.Evaluate(step=step):
            return _INFO, f"evaluates the model of step {step}"
        case steps.Say(message=message):
            level = _DEBUG if isinstance(message, StepCommitted) else _INFO
            return level, f"reports {type(message).__name__}"
        case steps.ReportResumed(generation=generation):
            return _INFO, f"computes under the plan of generation {generation}"
        case steps.ReportFinished():
            return _INFO, "has finished training"
        case steps.BeginStep(step=step):
            return _DEBUG, f"begins step {step}"
        case steps.AwaitStep(step=step):
            return _DEBUG, f"knows whether step {step} follows"
        case steps.Compute(step=step, microbatches=microbatches):
            return _DEBUG, f"computes {len(microbatches)} microbatches of step {step}"
        case steps.Reduce(step=step, committee=committee):
            return _of_committee(committee), f"reduces step {step} in generation {committee.generation}"
        case steps.Agree(step=step, committee=committee):
            return _of_committee(committee), f"agrees on step {step} with {len(committee.members)} workers"
        case steps.Apply(record=record):
            return _DEBUG, f"commits and applies step {record.step}: loss {record.loss:.4f}"
        case steps.CompareReplicas(record=record):
            return _DEBUG, f"takes digests of its layers after step {record.step}"
        case steps.Save(step=step):
            return _INFO, f"begins to save its share of step {step}"
        case steps.SaveEnd(over=over):
            return _INFO, f"saves its share of step {over.step}, the last of the data"
        case steps.PostSection(step=step, number=number):
            return _DEBUG, f"sets section {number} of step {step} aside"
        case steps.Fold(record=record):
            return _DEBUG, f"commits section {record.number} of step {record.step}"
        case (
            steps.AwaitPlanUpdate()
            | steps.PrepareToSave()
            | steps.TakeSums()
            | steps.PostTotals()
            | steps.TakeTotals()
            | steps.AwaitSection()
        ):
            return None
        case _:
            assert_never(effect)


def _of_committee(committee: steps.Committee) -> int:
    return _INFO if committee.lost else _DEBUG  # a committee finishes the step without some nodes


def _layers(layers: Iterable[int]) -> str:
    numbers = sorted(set(layers))
    return f"layers {', '.join(map(str, numbers))}" if numbers else "no layers"
