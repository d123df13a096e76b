"""Everything that a job trains with, made from its settings and its script: data, model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oobleck.errors import ConfigError, DataError
from oobleck.job import JobSpec
from oobleck.script import run_script
from oobleck.training.data import Dataset, ScriptSamples, open_source
from oobleck.training.model import ModelStructure, Task
from oobleck.training.optim import Optimizer

__all__ = ["Assembly", "assemble", "check_optimizer", "structure_of_job"]

_Made = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A job and what it trains with, before there is a plan."""

    job: JobSpec
    train: Dataset
    validation: Dataset | None
    structure: ModelStructure
    optimizer: Optimizer


def assemble(job: JobSpec, *, cache_dir: Path) -> Assembly:
    """Make all parts of a job. Blocks for as long as its data takes.

    Raises ConfigError for whatever the user must change.
    """
    made = _made_by_script(job)
    with _blaming_the_data():
        train, validation = _datasets(job, made, cache_dir)
    structure = _structure(job, made, vocab_size=train.vocab_size)
    if structure.task == "masked_lm" and job.data.shards:
        raise ConfigError("data.shards: masked language models take no shards; name files by data.paths")
    if structure.task == "masked_lm":
        train = train.with_masking(probability=job.data.mlm_probability, seed=job.seed)
        if validation is not None:
            validation = validation.with_masking(probability=job.data.mlm_probability, seed=job.seed)
        if train.vocab_size != train.source.vocab_size:  # the mask is a token more
            structure = _structure(job, made, vocab_size=train.vocab_size)
    if job.eval_steps and validation is None:
        raise ConfigError("eval_steps: nothing is kept for evaluation; set data.validation_split as well, to 0.05 say")
    return Assembly(job=job, train=train, validation=validation, structure=structure, optimizer=_optimizer(job, made))


@contextmanager
def _blaming_the_data() -> Iterator[None]:
    """Whatever the user must change while the data is opened is to be changed in the data, or in its settings."""
    try:
        yield
    except ConfigError as error:
        raise DataError(str(error)) from error


def structure_of_job(job: JobSpec) -> ModelStructure:
    """Find the layers of a job's model alone; the vocabulary counts as the job asks for it."""
    return _structure(job, _made_by_script(job), vocab_size=job.data.vocab_size)


def check_optimizer(job: JobSpec) -> None:
    """Make a job's optimizer, and its first step's rate, as a trial. Raises ConfigError for one that cannot be."""
    optimizer = _optimizer(job, _made_by_script(job))
    optimizer.layout()
    optimizer.learning_rate(1)


def _optimizer(job: JobSpec, made: _Made) -> Optimizer:
    factory, schedule = made.get("optimizer"), made.get("lr_lambda")
    return Optimizer(job.optimizer, max_steps=job.max_steps, factory=factory, schedule=schedule)


def _made_by_script(job: JobSpec) -> _Made:
    return {} if job.script is None else run_script(job.script).made


def _datasets(job: JobSpec, made: _Made, cache_dir: Path) -> tuple[Dataset, Dataset | None]:
    if "data" not in made:
        return Dataset(open_source(job.text, cache_dir=cache_dir)).split(job.data.validation_split)
    if job.data.shards:
        raise ConfigError("data.shards: the script makes the data itself; leave one of the two out")
    sizes = {"sequence_length": job.data.sequence_length, "vocab_size": job.data.vocab_size}
    train, validation = Dataset(ScriptSamples(made["data"], **sizes)).split(job.data.validation_split)
    if "eval_data" in made:
        validation = Dataset(ScriptSamples(made["eval_data"], **sizes))
    return train, validation


def _structure(job: JobSpec, made: _Made, *, vocab_size: int) -> ModelStructure:
    length = job.data.sequence_length
    if "model" not in made:
        return ModelStructure.from_spec(job.model, vocab_size=vocab_size, sequence_length=length)
    task: Task = job.model.task or "causal_lm"
    return ModelStructure.from_factory(
        made["model"], loss=made.get("loss"), task=task, vocab_size=vocab_size, sequence_length=length
    )
