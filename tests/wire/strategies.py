"""Values of any annotation that the wire knows, for property tests.

Derived from the annotations, so a message that gains a field is tested with it at once. Only classes that refuse
some combinations of fields are helped, to choose possible ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from oobleck.control.manifest import Shard
from oobleck.job import CheckpointSpec, ControlSpec, DataSpec, JobSpec, OptimizerSpec, ScalingSpec
from oobleck.planner import Pipeline, PipelineTemplate, Place, StageTemplate

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
"""With lone surrogates, as in a traceback that shows a file name of broken encoding."""

_PLAIN: dict[object, st.SearchStrategy[Any]] = {
    None: st.none(),
    types.NoneType: st.none(),
    bool: st.booleans(),
    int: INTEGERS,
    float: st.floats(allow_nan=False),
    str: TEXT,
    bytes: st.binary(max_size=40),
}


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; NaN, which equals nothing, is not among them."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if annotation is Place:
        return st.builds(Place, node=TEXT, device=INTEGERS)
    if is_dataclass(annotation):
        return _HELPED[annotation]() if annotation in _HELPED else built(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is Mapping:
        return st.dictionaries(TEXT, values_of(arguments[1]), max_size=3)
    assert issubclass(annotation, Enum), annotation
    return st.sampled_from(annotation)


def built(cls: type, **chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass, each field of its annotation but for the chosen ones."""
    hints = get_type_hints(cls)
    return st.builds(
        cls,
        **({field.name: values_of(hints[field.name]) for field in fields(cls) if field.name not in chosen} | chosen),
    )


def _stage_templates() -> st.SearchStrategy[StageTemplate]:
    return st.tuples(INTEGERS, INTEGERS).flatmap(
        lambda ends: built(StageTemplate, first_layer=st.just(min(ends)), stop_layer=st.just(max(ends) + 1))
    )


@st.composite
def _pipeline_templates(draw: st.DrawFn) -> PipelineTemplate:
    cuts = [0, *sorted(draw(st.sets(st.integers(1, 100), min_size=1, max_size=4)))]
    return PipelineTemplate(
        stages=tuple(
            StageTemplate(
                first_layer=first,
                stop_layer=stop,
                node_index=draw(st.integers(0, 3)),
                first_device=draw(INTEGERS),
                num_devices=draw(INTEGERS),
            )
            for first, stop in pairwise(cuts)
        )
    )


@st.composite
def _pipelines(draw: st.DrawFn) -> Pipeline:
    template = draw(_pipeline_templates())
    nodes = st.tuples(*[TEXT] * template.num_nodes)
    return draw(built(Pipeline, template=st.just(template), nodes=nodes))


def _data_specs() -> st.SearchStrategy[DataSpec]:
    return built(
        DataSpec,
        sequence_length=st.integers(2, 2**40),
        vocab_size=st.integers(257, 2**40),
        max_bytes=st.integers(1, 2**40),
        dataset_path=st.none(),
        shards=st.just(()),
        epochs=st.integers(1, 2**40),
        shards_at_once=st.one_of(st.none(), st.integers(1, 64)),
        validation_split=st.floats(0, 1, exclude_max=True),
        mlm_probability=st.floats(0, 1, exclude_min=True, exclude_max=True),
    )


def _optimizer_specs() -> st.SearchStrategy[OptimizerSpec]:
    return built(
        OptimizerSpec,
        learning_rate=st.floats(min_value=0, exclude_min=True),
        max_grad_norm=st.floats(min_value=0),
        warmup_steps=st.integers(0, 2**40),
    )


def _control_specs() -> st.SearchStrategy[ControlSpec]:
    return st.floats(1e-3, 1e3).flatmap(
        lambda interval_s: built(
            ControlSpec,
            heartbeat_interval_s=st.just(interval_s),
            lease_s=st.floats(min_value=2 * interval_s),
            rejoin_after_s=st.floats(0, 1e6),
            notice_url=st.none() | st.sampled_from(["http://169.254.169.254/notice", "https://example.org/"]),
            notice_pattern=st.none() | st.sampled_from(["TRUE", "a|b", "[0-9]+"]),
            notice_interval_s=st.floats(1e-3, 1e6),
        )
    )


def _checkpoint_specs() -> st.SearchStrategy[CheckpointSpec]:
    some = {"save_total_limit": st.integers(1, 99), "compare_steps": st.integers(0, 2**40)}
    steps, seconds = st.integers(1, 2**40), st.floats(min_value=0, exclude_min=True)
    return st.one_of(
        built(CheckpointSpec, save_steps=st.none(), save_interval_s=st.none() | seconds, **some),
        built(CheckpointSpec, save_steps=steps, save_interval_s=st.none(), **some),
    )


def _scaling_specs() -> st.SearchStrategy[ScalingSpec]:
    seconds = st.floats(min_value=0)
    return st.one_of(
        built(
            ScalingSpec,
            policy=st.sampled_from(["all", "efficient"]),
            deadline_s=st.none(),
            hysteresis_s=seconds,
        ),
        built(
            ScalingSpec,
            policy=st.just("deadline"),
            deadline_s=st.floats(min_value=0, exclude_min=True),
            hysteresis_s=seconds,
        ),
    )


def _shards() -> st.SearchStrategy[Shard]:
    return built(Shard, file=TEXT.filter(lambda name: "/" not in name and name not in ("", ".", "..")))


@st.composite
def job_specs(draw: st.DrawFn) -> JobSpec:
    microbatch_size, num_microbatches = draw(st.integers(1, 99)), draw(st.integers(1, 99))
    degree = draw(st.sampled_from([1, 1, 2, 8]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "auto", *(["zero-bubble"] if degree == 1 else [])]))
    return draw(
        built(
            JobSpec,
            tag=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}", fullmatch=True),
            max_steps=st.integers(1, 2**40),
            microbatch_size=st.just(microbatch_size),
            global_batch_size=st.just(microbatch_size * num_microbatches),
            fault_threshold=st.integers(0, 99),
            reductions_per_step=st.just("auto") | st.integers(1, 99),
            schedule=st.just(schedule),
            compile=st.booleans() if degree == 1 and schedule != "zero-bubble" else st.just(False),
            tensor_parallel=st.just(degree),
            eval_steps=st.none() | st.integers(1, 2**40),
            max_eval_samples=st.none() | st.integers(1, 2**40),
            initial_loss_scale=st.integers(-40, 40).map(lambda exponent: 2.0**exponent),
            num_pipelines=st.none() | st.integers(1, num_microbatches),
        )
    )


_HELPED: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    StageTemplate: _stage_templates,
    PipelineTemplate: _pipeline_templates,
    Pipeline: _pipelines,
    DataSpec: _data_specs,
    OptimizerSpec: _optimizer_specs,
    ControlSpec: _control_specs,
    CheckpointSpec: _checkpoint_specs,
    ScalingSpec: _scaling_specs,
    Shard: _shards,
    JobSpec: job_specs,
}
