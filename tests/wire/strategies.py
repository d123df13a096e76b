"""Values of any annotation that the wire knows, for property tests.

Derived from the annotations, so a message that gains a field is tested with it at once. Only classes that refuse
some combinations of fields are helped, to choose possible ones.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from oobleck.control.protocol import Shard
from oobleck.errors import ConfigError
from oobleck.job import (
    CheckpointSpec,
    ControlSpec,
    DataSpec,
    JobSpec,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    ScalingSpec,
    check_model_numbers,
)
from oobleck.job.bounds import Bounds, bounds_of
from oobleck.job.ranks import RanksSpec
from oobleck.planner import Pipeline, PipelineTemplate, StageTemplate, WorkerId

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
"""With lone surrogates, as in a traceback that shows a file name of broken encoding."""

WHOLE = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
"""What a job may hold."""
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | WHOLE

_PLAIN: dict[object, st.SearchStrategy[Any]] = {
    None: st.none(),
    types.NoneType: st.none(),
    bool: st.booleans(),
    int: INTEGERS,
    float: st.floats(allow_nan=False),
    str: TEXT,
    bytes: st.binary(max_size=40),
}


@cache
def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; NaN, which equals nothing, is not among them.

    Kept, for Hypothesis takes longer to look at a new strategy than to draw from one that it knows.
    """
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if annotation is WorkerId:
        return st.builds(WorkerId, node=TEXT, device=INTEGERS)
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
    others = {field.name: _values_of_field(cls, field.name) for field in fields(cls) if field.name not in chosen}
    return st.builds(cls, **(others | chosen))


@cache
def _values_of_field(cls: type, name: str) -> st.SearchStrategy[Any]:
    annotation, bounds = get_type_hints(cls)[name], bounds_of(cls).get(name)
    return values_of(annotation) if bounds is None else within(annotation, bounds)


def within(annotation: Any, bounds: Bounds) -> st.SearchStrategy[Any]:
    """Values of a bounded field: numbers within, and what else its annotation allows."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    numbers: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(math.ceil(bounds.least), math.floor(bounds.most)),
        float: st.floats(bounds.least, bounds.most),
    }
    if bounds.excluded:
        numbers = {kind: drawn.filter(bounds.hold) for kind, drawn in numbers.items()}
    return st.one_of(*(numbers[kind] if kind in numbers else values_of(kind) for kind in kinds))


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
                node_index=index,
                first_device=draw(INTEGERS),
                num_devices=draw(INTEGERS),
            )
            for index, (first, stop) in enumerate(pairwise(cuts))
        )
    )


@st.composite
def _pipelines(draw: st.DrawFn) -> Pipeline:
    template = draw(_pipeline_templates())
    nodes = st.tuples(*[TEXT] * template.num_nodes)
    return draw(built(Pipeline, template=st.just(template), nodes=nodes))


def _data_specs() -> st.SearchStrategy[DataSpec]:
    any_of = {"text_column": WHOLE, "tokenizer": st.none() | WHOLE}
    text = {"format": st.just("text"), "packing": st.just(False)}
    rows = {"format": st.sampled_from(["prompts", "messages"])}
    names = st.lists(WHOLE.filter(bool), max_size=3).map(tuple)
    whole = {"epochs": st.just(1), "follow": st.just(False), "shards_at_once": st.none(), "shards": st.just(())}
    files = {**whole, **dict.fromkeys(("dataset_path", "dataset_name"), st.none()), "dataset_split": st.just("train")}
    dataset = {**whole, "dataset_path": WHOLE, "dataset_name": st.none() | WHOLE, "dataset_split": WHOLE}
    dataset["paths"] = st.just(())
    sharded = {**files, "paths": st.just(()), "shards": names.filter(bool), "validation_split": st.just(0.0)}
    sharded |= {"epochs": st.integers(1, 9), "follow": st.booleans(), "shards_at_once": st.none() | st.integers(1, 64)}
    return st.one_of(
        built(DataSpec, **any_of, **text, **files, paths=names),
        built(DataSpec, **any_of, **rows, **files, paths=names.filter(bool)),
        built(DataSpec, **any_of, **text, **dataset),
        built(DataSpec, **any_of, **text, **sharded),
    )


def _optimizer_specs() -> st.SearchStrategy[OptimizerSpec]:
    return built(
        OptimizerSpec,
        optim=WHOLE,
        optim_args=st.dictionaries(WHOLE, SCALARS, max_size=3),
        lr_scheduler_kwargs=st.dictionaries(WHOLE, SCALARS, max_size=3),
    )


def _lora_specs() -> st.SearchStrategy[LoraSpec]:
    names = st.lists(WHOLE, max_size=3).map(tuple)
    of_a_rank = built(LoraSpec, r=st.integers(1, 65_536), target_modules=names, modules_to_save=names)
    return st.just(LoraSpec()) | of_a_rank


def _model_specs() -> st.SearchStrategy[ModelSpec]:
    return built(
        ModelSpec,
        type=WHOLE,
        path=st.none() | WHOLE,
        lora=_lora_specs(),
        config=st.dictionaries(WHOLE, st.integers(-(2**40), 2**40) | WHOLE | st.floats(-1e9, 1e9), max_size=3).filter(
            _can_be_a_model
        ),
    )


def _can_be_a_model(config: Mapping[str, object]) -> bool:
    """Hypothesis tries the strings that it finds in the code as well, and so the names of numbers with bounds."""
    try:
        check_model_numbers(config)
    except ConfigError:
        return False
    return True


_NOTICE_HEADERS = st.dictionaries(
    st.from_regex(r"[A-Za-z-]{1,9}", fullmatch=True), st.text("abc :;", max_size=9), max_size=3
)


_URLS = st.sampled_from(["http://169.254.169.254/notice", "https://example.org/"])


@st.composite
def _control_specs(draw: st.DrawFn) -> ControlSpec:
    interval_s, url = draw(st.floats(1e-3, 1e3)), draw(st.none() | _URLS)
    patterns = st.none() if url is None else st.none() | st.sampled_from(["TRUE", "a|b", "[0-9]+"])
    return draw(
        built(
            ControlSpec,
            heartbeat_interval_s=st.just(interval_s),
            lease_s=st.floats(2 * interval_s, 1e9),
            notice_command=st.none() | WHOLE.filter(str.strip),
            notice_headers=st.just({}) if url is None else _NOTICE_HEADERS,
            notice_url=st.just(url),
            waits_for_script=st.booleans(),
            webhook_url=st.none() | _URLS,
            notice_pattern=patterns,
        )
    )


def _checkpoint_specs() -> st.SearchStrategy[CheckpointSpec]:
    directory = st.none() | WHOLE
    return st.one_of(
        built(CheckpointSpec, save_steps=st.none(), waits_for_disk=st.just(False), directory=directory),
        built(CheckpointSpec, save_steps=st.integers(1, 100), save_interval_s=st.none(), directory=directory),
    )


def _scaling_specs() -> st.SearchStrategy[ScalingSpec]:
    return st.one_of(
        built(ScalingSpec, policy=st.sampled_from(["all", "efficient"]), deadline_s=st.none()),
        built(ScalingSpec, policy=st.just("deadline"), deadline_s=st.floats(1e-6, 1e9)),
    )


def _shards() -> st.SearchStrategy[Shard]:
    return built(Shard, file=st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True))


_TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}", fullmatch=True)
_LOSS_SCALES = st.integers(-24, 100).map(lambda exponent: 2.0**exponent)


@st.composite
def job_specs(draw: st.DrawFn) -> JobSpec:
    microbatch_size, num_microbatches = draw(st.integers(1, 99)), draw(st.integers(1, 99))
    degree, lanes = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (8, 1), (1, 3)]))
    schedule = draw(
        st.sampled_from(["1f1b", "gpipe", "interleaved", "auto", *(["zero-bubble"] if degree == lanes else [])])
    )
    compiles = draw(st.booleans()) and degree == lanes and schedule != "zero-bubble"
    eval_steps, data = draw(st.none() | st.integers(1, 99)), draw(_data_specs())
    levels = ["none", "all"]
    if degree == 1 and not compiles:
        levels += ["selective", *(["auto"] if schedule == "1f1b" else [])]
    return draw(
        built(
            JobSpec,
            tag=_TAGS,
            env=st.dictionaries(WHOLE, WHOLE, max_size=3),
            attn_implementation=st.sampled_from([None, "sdpa", *(["eager"] if lanes == 1 else [])]),
            microbatch_size=st.just(microbatch_size),
            global_batch_size=st.just(microbatch_size * num_microbatches * lanes),
            context_parallel=st.sampled_from([each for each in range(1, lanes + 1) if lanes % each == 0]),
            schedule=st.just(schedule),
            compile=st.just(compiles),
            compile_mode=st.sampled_from(["default", *(["max-autotune-no-cudagraphs"] if compiles else [])]),
            num_chunks=st.integers(2, 8) if schedule in ("interleaved", "auto") else st.just(2),
            eval_steps=st.just(eval_steps),
            max_eval_samples=st.none() if eval_steps is None else st.none() | st.integers(1, 99),
            data=st.just(data),
            checkpoint=_checkpoint_specs().filter(lambda spec: not (data.shards and spec.waits_for_disk)),
            recompute=st.sampled_from(levels),
            tensor_parallel=st.just(degree),
            sharding=st.just("none") if lanes == 1 else st.sampled_from(("optimizer", "gradients", "all")),
            sharding_devices=st.just(lanes),
            expert_parallel=st.just(False) if lanes == 1 else st.booleans(),
            initial_loss_scale=_LOSS_SCALES,
            num_pipelines=st.none() | st.integers(1, num_microbatches),
        )
    )


def _ranks_specs() -> st.SearchStrategy[RanksSpec]:
    return built(
        RanksSpec,
        **dict.fromkeys(("directory", "run_id", "role"), WHOLE),
        tag=st.from_regex("[a-z][a-z0-9._-]{0,9}", fullmatch=True),
        command=st.lists(WHOLE.filter(bool), min_size=1, max_size=3).map(tuple),
        environment=st.dictionaries(WHOLE, WHOLE, max_size=3),
        log_dir=st.none() | WHOLE,
        ranks_per_node=st.sampled_from(["auto", "cpu", "gpu", "slots", "1", "1024"]),
        min_nodes=st.integers(1, 4),
        max_nodes=st.integers(4, 8),
        node_unit=st.sampled_from([1, 2, 4]),  # of each, 4 is a multiple
        copies=st.just(1),
        parity_nodes=st.sampled_from([0, 2, 32]),
    )


_HELPED: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    StageTemplate: _stage_templates,
    PipelineTemplate: _pipeline_templates,
    Pipeline: _pipelines,
    DataSpec: _data_specs,
    LoraSpec: _lora_specs,
    ModelSpec: _model_specs,
    OptimizerSpec: _optimizer_specs,
    ControlSpec: _control_specs,
    CheckpointSpec: _checkpoint_specs,
    ScalingSpec: _scaling_specs,
    Shard: _shards,
    JobSpec: job_specs,
    RanksSpec: _ranks_specs,
}
