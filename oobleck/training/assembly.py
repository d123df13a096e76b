"""Makes a job's data, model and optimizer from its settings and its script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from oobleck.errors import ConfigError, DataError
from oobleck.host.script import GATHERS, SCRIPT_STREAM, run_script
from oobleck.job import JobSpec
from oobleck.training import model
from oobleck.training.data import CollatedSamples, Dataset, ModelInputs, ScriptSamples, ScriptStream, open_source
from oobleck.training.optim import Optimizer
from oobleck.training.randomness import seed_scripts

# Records of a stream are assigned about 32 steps ahead, and a step may run again, so older samples stay in memory.
_LEAST_KEPT, _STEPS_KEPT = 4096, 96
_SAMPLES_TRIED = 32

_Made = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A job with its parts, before there is a plan."""

    job: JobSpec
    train: Dataset
    validation: Dataset | None
    structure: model.ModelStructure
    optimizer: Optimizer


def assemble(job: JobSpec, *, cache_dir: Path) -> Assembly:
    """Make all parts of a job. Blocks for as long as reading its data takes.

    Raises ConfigError for a job that the user must change.
    """
    made = made_by_script(job)
    if "live_model" in made:
        return _assemble_live(job, made, cache_dir)
    if job.model.whole_loss is not None:
        raise ConfigError("model.whole_loss: it is for the models of Trainers' scripts, which set it; leave it out")
    with _blaming_the_data():
        train, validation = _datasets(job, made, cache_dir)
    structure = _structure(job, made, vocab_size=train.vocab_size, cache_dir=cache_dir)
    # What one process has tried need not be tried by every worker.
    if job.script is not None and not job.script.is_tried:
        check_optimizer(job, made)
        if "model" in made:
            model.try_layers(structure, _sizes(job))
    if structure.task != "causal_lm" and job.data.shards and not _streams(job):
        raise ConfigError(f"data.shards: {structure.task} takes no shards; name files by data.paths")
    if structure.task == "masked_lm" and _streams(job):
        raise ConfigError("streaming: tokens are masked by the numbers of samples; give data that has a length")
    if structure.task == "masked_lm":
        train = train.with_masking(probability=job.data.mlm_probability, seed=job.seed)
        if validation is not None:
            validation = validation.with_masking(probability=job.data.mlm_probability, seed=job.seed)
        if train.vocab_size != train.source.vocab_size and "model" not in made:  # masking adds a token
            structure = _structure(job, made, vocab_size=train.vocab_size)
    inputs = _inputs(structure)
    with _blaming_the_data():
        train = train.with_inputs(inputs)
        validation = None if validation is None else validation.with_inputs(inputs)
    if job.eval_steps and validation is None:
        raise ConfigError(
            "eval_steps: no samples are kept for evaluation; set data.validation_split as well, to 0.05 for instance"
        )
    _require_shared_samples(job, train)
    return Assembly(
        job=job, train=train, validation=validation, structure=structure, optimizer=_optimizer(job, made, structure)
    )


def _assemble_live(job: JobSpec, made: _Made, cache_dir: Path) -> Assembly:
    """Make the parts for a script that trains by a transformers `Trainer`."""
    decayed = made["decayed"]()
    structure = _live_structure(job, made, cache_dir)
    inputs = _inputs(structure)
    if job.model.whole_loss is not None:
        inputs = ModelInputs(whole=made["whole"]().inputs(job.model.whole_loss))
    provides = () if job.script is None else job.script.provides
    # The script's own process may have found that it has to evaluate, with the weights that workers gather.
    evaluates = "eval_data" in made and (GATHERS not in provides or "eval_data" in provides)
    with _blaming_the_data():
        train = replace(_collated(job, made["data"]), order=made["order"]()).with_inputs(inputs)
        validation = None
        if evaluates:
            validation = replace(_collated(job, made["eval_data"]), evaluated=made["eval_batches"]()).with_inputs(
                inputs
            )
    _require_shared_samples(job, train)
    optimizer = _optimizer(job, made, structure, decayed=decayed)
    return Assembly(job=job, train=train, validation=validation, structure=structure, optimizer=optimizer)


def _collated(job: JobSpec, make: Callable[[], Any]) -> Dataset:
    samples, collate, place = make()
    length, vocab_size = job.data.sequence_length, job.data.vocab_size
    source = CollatedSamples(
        samples, collate, sequence_length=length, vocab_size=vocab_size, seed=job.seed, place=place
    )
    return Dataset(source)


def _live_structure(job: JobSpec, made: _Made, cache_dir: Path | None) -> model.ModelStructure:
    brought, length = made["live_model"](), job.data.sequence_length
    is_whole = job.model.whole_loss is not None
    # Before the model loses its memory. The script's own process has found that it can be cut, or else wants one stage.
    flow = made["whole"]().flow() if is_whole and job.num_stages != 1 else None
    live = (
        model.LiveModel.skeleton_of(brought, is_whole=is_whole)
        if cache_dir is None
        else model.LiveModel.taken_apart(brought, cache_dir, is_whole=is_whole)
    )
    if is_whole:
        whole = model.ModelStructure.with_its_loss(live, made["whole"](), sequence_length=length, flow=flow)
        return replace(whole, drops=job.dropout)
    structure = model.ModelStructure.from_live(live, compute_loss=made.get("compute_loss"), sequence_length=length)
    return replace(model.with_tried_loss(structure), drops=job.dropout)


@contextmanager
def _blaming_the_data() -> Iterator[None]:
    """Turn a ConfigError raised while the data is opened into a DataError."""
    try:
        yield
    except ConfigError as error:
        raise DataError(str(error)) from error


def try_out(job: JobSpec, made: _Made | None = None) -> model.ModelStructure:
    """Run all trials of a job that need neither data nor devices; returns the structure of its model.

    `made` is what its script makes, if that has run already. The vocabulary has the size that the job asks for. The
    cost is that of building the model, without memory unless the script sets its values. Raises ConfigError for a job
    that cannot be trained, UnbuiltModel where the script's model cannot be built here.
    """
    made = made_by_script(job) if made is None else made
    check_optimizer(job, made)
    structure = structure_of_job(job, made)
    model.share_for(job, structure, rank=0)
    if "model" in made:
        model.try_layers(structure, _sizes(job))
    return structure


def try_sharing(job: JobSpec, made: _Made) -> None:
    """Raise ConfigError where devices cannot share what the script of a Trainer brings as its job asks for."""
    structure = _live_structure(job, made, None)
    model.share_for(job, structure, rank=0)
    if job.context_parallel > 1:
        _require_shared_samples(job, _collated(job, made["data"]).with_inputs(_inputs(structure)))


def _require_shared_samples(job: JobSpec, samples: Dataset) -> None:
    """Raise ConfigError where the first samples tell that devices cannot share them; others are tried as they come."""
    if job.context_parallel == 1 or job.data.shards:
        return
    for first in range(0, min(_SAMPLES_TRIED, samples.num_samples - job.microbatch_size + 1), job.microbatch_size):
        samples.batch(range(first, first + job.microbatch_size)).part(0, job.context_parallel)


def structure_of_job(job: JobSpec, made: _Made | None = None) -> model.ModelStructure:
    """Return the structure of a job's model; the vocabulary has the size that the job asks for."""
    made = made_by_script(job) if made is None else made
    if "live_model" in made:
        return _live_structure(job, made, None)  # the script's own process has tried its layers
    return _structure(job, made, vocab_size=job.data.vocab_size)


def check_optimizer(job: JobSpec, made: _Made | None = None) -> None:
    """Try a job's optimizer, and the rates of its first steps. Raises ConfigError for an invalid one."""
    optimizer = _optimizer(job, made_by_script(job) if made is None else made, None)
    optimizer.layout()
    optimizer.require_pure_schedule(max_steps=job.max_steps)


def _optimizer(
    job: JobSpec, made: _Made, structure: model.ModelStructure | None, *, decayed: Collection[str] | None = None
) -> Optimizer:
    return Optimizer(
        job.optimizer,
        max_steps=job.max_steps,
        factory=made.get("optimizer"),
        schedule=made.get("lr_lambda"),
        frozen=frozenset() if structure is None else structure.frozen,
        decayed=decayed,
        is_sharded=job.sharding != "none",
        is_tried=job.script is not None and job.script.is_tried,
    )


def made_by_script(job: JobSpec) -> _Made:
    """Run a job's script, if there is one; returns the functions that make its parts."""
    if job.script is None:
        return {}
    seed_scripts()  # so that a script initializes its model alike wherever it runs
    return run_script(job.script).made


def _datasets(job: JobSpec, made: _Made, cache_dir: Path) -> tuple[Dataset, Dataset | None]:
    if "data" not in made:
        return Dataset(open_source(job.text, cache_dir=cache_dir)).split(job.data.validation_split)
    made_here = partial(
        ScriptSamples, sequence_length=job.data.sequence_length, vocab_size=job.data.vocab_size, seed=job.seed
    )
    if _streams(job):
        kept = Dataset(made_here(made["eval_data"])) if "eval_data" in made else None
        stream = ScriptStream(
            made["data"],
            sequence_length=job.data.sequence_length,
            vocab_size=job.data.vocab_size,
            num_kept=max(_LEAST_KEPT, _STEPS_KEPT * job.global_batch_size),
        )
        return Dataset(stream), kept
    if job.data.shards:
        raise ConfigError("data.shards: the script makes the data itself; leave one of the two out")
    if job.data.format != "text":
        raise ConfigError("data.format: the script makes the data itself; leave one of the two out")
    train, validation = Dataset(made_here(made["data"])).split(job.data.validation_split)
    if "eval_data" in made:
        validation = Dataset(made_here(made["eval_data"]))
    return train, validation


def _streams(job: JobSpec) -> bool:
    return job.data.shards == (SCRIPT_STREAM,)


def _structure(job: JobSpec, made: _Made, *, vocab_size: int, cache_dir: Path | None = None) -> model.ModelStructure:
    length = job.data.sequence_length
    if "model" not in made:
        structure = model.ModelStructure.from_spec(job.model, vocab_size=vocab_size, sequence_length=length)
    elif job.model.lora.r is not None:
        raise ConfigError(
            "model.lora: the script makes the model itself; leave it out, and call peft.get_peft_model there"
        )
    else:
        structure = model.ModelStructure.from_factory(
            made["model"],
            loss=made.get("loss"),
            task=job.model.task,
            vocab_size=vocab_size,
            sequence_length=length,
            dtype=model.Precision.of(job.dtype).parameters,
            seed=job.seed,
            cache_dir=cache_dir,
        )
    is_tried = job.script is not None and job.script.is_tried
    return replace(model.with_tried_loss(structure, None if is_tried else _sizes(job)), drops=job.dropout)


def _sizes(job: JobSpec) -> model.BatchSizes:
    return model.BatchSizes(
        batch=job.global_batch_size, microbatch=job.microbatch_size, length=job.data.sequence_length
    )


def _inputs(structure: model.ModelStructure) -> ModelInputs:
    config, task = structure.config, structure.task
    pad_id = getattr(config, "pad_token_id", None)
    has_padding = isinstance(pad_id, int) and pad_id >= 0
    return ModelInputs(
        task=task,
        names=structure.takes,
        counts_first=structure.loss_rule.counts_first,
        pad_id=pad_id if has_padding else None if task == "sequence_classification" else 0,
        num_labels=config.num_labels if task in ("sequence_classification", "token_classification") else None,
        # This costs as much as building the model, so it is asked once, and only where samples have positions.
        separates_documents=cache(partial(model.separates_documents, structure)),
    )
