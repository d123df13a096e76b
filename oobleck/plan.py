"""The vocabulary of plans: templates, which are independent of nodes, and their pipelines on named nodes.

The wire carries these values too. The planner chooses plans, and the schedule orders the work of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat, starmap
from typing import NamedTuple

from oobleck.errors import ConfigError
from oobleck.json_table import JsonTable


class WorkerId(NamedTuple):
    """One device of one node: where one worker runs."""

    # It is a tuple, because a recovery of thousands of workers hashes and compares it hundreds of thousands of times.
    node: str
    device: int

    def __str__(self) -> str:
        return f"{self.node}:{self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTemplate:
    """Layers [first_layer, stop_layer) on devices [first_device, first_device + num_devices) of one node.

    This is a stage of a single chunk, or one chunk of a stage that has several.
    """

    first_layer: int
    stop_layer: int
    node_index: int
    first_device: int = 0
    num_devices: int = 1
    num_selective: int = 0
    num_recomputed: int = 0
    """The last blocks of the stage recompute all that they do not have to keep, and those before them some of it."""

    def __post_init__(self) -> None:
        if self.stop_layer <= self.first_layer:
            raise ConfigError(f"stage has {self.stop_layer - self.first_layer} layers; a stage needs at least 1")

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.stop_layer)

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.num_devices)

    def levels(self, blocks: Sequence[int]) -> dict[int, str]:
        """Return what each of the stage's blocks recomputes, given in order: none, selective or all."""
        num_whole = len(blocks) - self.num_selective - self.num_recomputed
        counts = {"none": num_whole, "selective": self.num_selective, "all": self.num_recomputed}
        each = chain.from_iterable(repeat(level, count) for level, count in counts.items())
        return dict(zip(blocks, each, strict=True))

    @property
    def place(self) -> tuple[int, int, int]:
        """Its node, first device and number of devices."""
        return self.node_index, self.first_device, self.num_devices


# Classes with cached properties need a `__dict__`, so they have no slots.
@dataclass(frozen=True, kw_only=True)
class PipelineTemplate:
    """The stages of a pipeline on a number of nodes, from the first layer to the last.

    For an interleaved schedule each stage has several chunks of consecutive layers, spread over the model: the chain of
    layers passes through the devices of all stages in turn, once for each chunk.
    """

    stages: tuple[StageTemplate, ...]
    """Chunk c of stage s is entry `c * num_stages + s`; with one chunk a stage, the stages themselves."""

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].first_layer != 0:
            raise ConfigError("a pipeline template needs stages that start at layer 0")
        for before, after in pairwise(self.stages):
            if before.stop_layer != after.first_layer:
                raise ConfigError(f"layer {before.stop_layer} follows no stage: stages must be contiguous")
        size = self.num_stages
        in_turn = all(chunk.place == stage.place for chunk, stage in zip(self.stages[size:], self.stages, strict=False))
        if len(self.stages) % size or not in_turn or size == 1 < len(self.stages):
            raise ConfigError(
                f"{len(self.stages)} stages on {size} groups of devices: each group has one stage, or two groups and "
                "more have as many chunks each, in turn"
            )

    # Thousands of pipelines are looked up by their template, and each hash of its stages visits all of them.
    @cached_property
    def _hash(self) -> int:
        return hash(self.stages)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def num_stages(self) -> int:
        """The number of groups of devices; each has one stage, of `num_chunks` chunks."""
        return len({stage.place for stage in self.stages})

    @property
    def num_chunks(self) -> int:
        """The number of chunks of each stage: 1 for all schedules but the interleaved one."""
        return len(self.stages) // self.num_stages

    @property
    def round_size(self) -> int:
        """How many microbatches pass through all chunks before the next do; 1 if stages have one chunk."""
        return self.num_stages if self.num_chunks > 1 else 1

    def chunks_of(self, stage: int) -> tuple[StageTemplate, ...]:
        """Return the chunks of a stage, in the order of their layers."""
        return self.stages[stage :: self.num_stages]

    @cached_property
    def num_nodes(self) -> int:
        return max(stage.node_index for stage in self.stages) + 1

    @cached_property
    def layers_of_stages(self) -> tuple[tuple[range, ...], ...]:
        """The layers of each stage, chunk by chunk."""
        return tuple(tuple(chunk.layers for chunk in self.chunks_of(stage)) for stage in range(self.num_stages))

    @cached_property
    def layer_sets(self) -> tuple[frozenset[int], ...]:
        """The layers of each stage, over all its chunks."""
        return tuple(frozenset(chain.from_iterable(chunks)) for chunks in self.layers_of_stages)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].stop_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage on named devices, which all belong to one node."""

    chunks: tuple[range, ...]
    """The layers of each chunk, in order, with gaps between them."""
    worker_ids: tuple[WorkerId, ...]
    templates: tuple[StageTemplate, ...]
    """Each chunk as its template has it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of all chunks, in order."""
        return tuple(chain.from_iterable(self.chunks))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A template instantiated on named nodes, with its share of every step's microbatches."""

    template: PipelineTemplate
    nodes: tuple[str, ...]
    num_microbatches: int

    def __post_init__(self) -> None:
        if len(self.nodes) != self.template.num_nodes:
            raise ConfigError(f"template of {self.template.num_nodes} nodes instantiated on {len(self.nodes)}")

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        nodes, all_chunks = self.nodes, self.template.layers_of_stages
        return tuple(
            Stage(
                chunks=chunks,
                worker_ids=tuple([WorkerId(nodes[stage.node_index], device) for device in stage.devices]),
                templates=self.template.chunks_of(index),
            )
            for index, (stage, chunks) in enumerate(zip(self.template.stages, all_chunks, strict=False))
        )

    @cached_property
    def layers_at(self) -> Mapping[WorkerId, frozenset[int]]:
        """The layers of every worker; those of one template share their sets."""
        sets = self.template.layer_sets
        return {
            worker_id: layers for stage, layers in zip(self.stages, sets, strict=True) for worker_id in stage.worker_ids
        }

    @cached_property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """All workers of the pipeline, in stage order."""
        return tuple(chain.from_iterable([stage.worker_ids for stage in self.stages]))


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """The pipelines of one generation and the nodes that wait as spares.

    The microbatches of a step are numbered 0 .. num_microbatches - 1; pipeline i takes the next
    `num_microbatches` of them after pipeline i - 1 (`microbatches_of`).
    """

    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].template.num_layers

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step, over all pipelines."""
        return sum(pipeline.num_microbatches for pipeline in self.pipelines)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Every node that trains, sorted; spares are not among them."""
        return tuple(sorted(chain.from_iterable(pipeline.nodes for pipeline in self.pipelines)))

    @cached_property
    def pipeline_of(self) -> Mapping[str, int]:
        """The index of the pipeline that each node trains in, in the order of the pipelines."""
        return {node: index for index, pipeline in enumerate(self.pipelines) for node in pipeline.nodes}

    @cached_property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Every worker that trains, sorted; a worker's index here is its rank."""
        of_nodes: dict[str, list[WorkerId]] = {node: [] for node in self.nodes}
        for worker_id in chain.from_iterable([each.worker_ids for each in self.pipelines]):
            of_nodes[worker_id.node].append(worker_id)
        # Names are sorted already, which is quicker than to compare thousands of pairs.
        return tuple(chain.from_iterable([ids if len(ids) == 1 else sorted(ids) for ids in of_nodes.values()]))

    @cached_property
    def _located(self) -> Mapping[WorkerId, tuple[int, int]]:
        return {
            worker_id: (pipeline_index, stage_index)
            for pipeline_index, pipeline in enumerate(self.pipelines)
            for stage_index, stage in enumerate(pipeline.stages)
            for worker_id in stage.worker_ids
        }

    @cached_property
    def layers_at(self) -> Mapping[WorkerId, frozenset[int]]:
        """The layers of every worker that trains; workers of like stages share their sets."""
        found: dict[WorkerId, frozenset[int]] = {}
        for pipeline in self.pipelines:
            found.update(pipeline.layers_at)
        return found

    def with_templates(self, change: Callable[[PipelineTemplate], PipelineTemplate]) -> ExecutionPlan:
        """Return the plan with each of its templates changed; pipelines that share a template still do."""
        known: dict[int, PipelineTemplate] = {}
        for template in [pipeline.template for pipeline in self.pipelines]:
            if id(template) not in known:
                known[id(template)] = change(template)
        return replace(
            self, pipelines=tuple(replace(each, template=known[id(each.template)]) for each in self.pipelines)
        )

    def microbatches_of(self, pipeline_index: int) -> range:
        """Return the numbers of the microbatches that a pipeline takes in each step."""
        return self.shares[pipeline_index]

    @cached_property
    def shares(self) -> tuple[range, ...]:
        """`microbatches_of` each pipeline."""
        bounds = accumulate((pipeline.num_microbatches for pipeline in self.pipelines), initial=0)
        return tuple(starmap(range, pairwise(bounds)))

    def owners_of(self, layer: int) -> tuple[WorkerId, ...]:
        """Return the workers that hold `layer`, sorted: its owner set."""
        stages = (stage for pipeline in self.pipelines for stage in pipeline.stages if layer in stage.layers)
        return tuple(sorted(chain.from_iterable(stage.worker_ids for stage in stages)))

    def locate(self, worker_id: WorkerId) -> tuple[int, int] | None:
        """Return (pipeline index, stage index) of a worker, or None for a spare."""
        return self._located.get(worker_id)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain values, for JSON."""
        return {
            "pipelines": [
                {
                    "nodes": list(pipeline.nodes),
                    "num_microbatches": pipeline.num_microbatches,
                    "stages": [
                        {name: getattr(stage, name) for name in _STAGE_FIELDS} for stage in pipeline.template.stages
                    ],
                }
                for pipeline in self.pipelines
            ],
            "spares": list(self.spares),
        }

    @classmethod
    def from_dict(cls, values: object) -> ExecutionPlan:
        """Read what `to_dict` wrote. Raises ConfigError that names the place."""
        table = JsonTable(values, "the plan")
        table.check_keys(("pipelines", "spares"))
        # Equal templates are one object, as the planner makes them.
        templates: dict[tuple[StageTemplate, ...], PipelineTemplate] = {}
        pipelines = []
        for index, raw in enumerate(table.list("pipelines")):
            own = JsonTable(raw, f"pipeline {index}")
            own.check_keys(("nodes", "num_microbatches", "stages"))
            stages = tuple(
                _stage_from(JsonTable(stage, f"pipeline {index}, stage {number}"))
                for number, stage in enumerate(own.list("stages"))
            )
            if stages not in templates:
                templates[stages] = PipelineTemplate(stages=stages)
            pipelines.append(
                Pipeline(
                    template=templates[stages],
                    nodes=own.texts("nodes"),
                    num_microbatches=own.integer("num_microbatches"),
                )
            )
        return cls(pipelines=tuple(pipelines), spares=table.texts("spares"))


_STAGE_FIELDS = tuple(part.name for part in fields(StageTemplate))


def _stage_from(table: JsonTable) -> StageTemplate:
    table.check_keys(_STAGE_FIELDS)
    return StageTemplate(**{name: table.integer(name) for name in _STAGE_FIELDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTransfer:
    """Part `part` of `num_parts` of a layer's flat state goes from `source` to `target`."""

    layer: int
    source: WorkerId
    target: WorkerId
    part: int = 0
    num_parts: int = 1


class ScheduleKind(StrEnum):
    """The order in which the stages work."""

    GPIPE = "gpipe"
    """All forward passes, then all backward passes (Huang et al., 2019)."""
    ONE_F_ONE_B = "1f1b"
    """As few activations as possible: one backward pass for each forward pass (PipeDream-Flush, 2020)."""
    INTERLEAVED = "interleaved"
    """1F1B over several chunks a stage: a smaller bubble for more messages (Megatron-LM, 2021)."""
    ZERO_BUBBLE = "zero-bubble"
    """The backward pass in two parts, the second of which fills bubbles (ZB-H1, Qi et al., 2023)."""
