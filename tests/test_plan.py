from __future__ import annotations

import pytest

from oobleck.errors import ConfigError
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate, WorkerId


def template(*stages: tuple[int, int, int]) -> PipelineTemplate:
    return PipelineTemplate(
        stages=tuple(StageTemplate(first_layer=a, stop_layer=b, node_index=node) for a, b, node in stages)
    )


TWO = template((0, 2, 0), (2, 3, 1))


def plan() -> ExecutionPlan:
    return ExecutionPlan(
        pipelines=(
            Pipeline(template=TWO, nodes=("c", "a"), num_microbatches=3),
            Pipeline(template=template((0, 3, 0)), nodes=("b",), num_microbatches=2),
        ),
        spares=("d",),
    )


def test_microbatches_are_numbered_through_the_pipelines() -> None:
    assert plan().num_microbatches == 5
    assert [plan().microbatches_of(index) for index in (0, 1)] == [range(3), range(3, 5)]


def test_workers_are_ranked_by_place_and_located() -> None:
    worker_ids = plan().worker_ids
    assert [str(worker_id) for worker_id in worker_ids] == ["a:0", "b:0", "c:0"]
    assert [plan().locate(worker_id) for worker_id in worker_ids] == [(0, 1), (1, 0), (0, 0)]
    assert plan().locate(WorkerId(node="d", device=0)) is None
    assert plan().nodes == ("a", "b", "c")


def test_every_worker_has_the_layers_of_its_stage() -> None:
    assert set(plan().layers_at) == set(plan().worker_ids)
    for worker_id, layers in plan().layers_at.items():
        assert layers == {layer for layer in range(plan().num_layers) if worker_id in plan().owners_of(layer)}


def test_owners_of_a_layer_are_one_worker_of_each_pipeline() -> None:
    assert [tuple(map(str, plan().owners_of(layer))) for layer in range(plan().num_layers)] == [
        ("b:0", "c:0"),
        ("b:0", "c:0"),
        ("a:0", "b:0"),
    ]


def test_a_stage_of_several_chunks_is_one_worker_with_the_layers_of_all_of_them() -> None:
    chunked = template((0, 1, 0), (1, 3, 1), (3, 5, 0), (5, 6, 1))
    assert (chunked.num_stages, chunked.num_chunks, chunked.num_nodes, chunked.round_size) == (2, 2, 2, 2)
    pipeline = Pipeline(template=chunked, nodes=("c", "a"), num_microbatches=3)
    assert [(str(stage.worker_ids[0]), stage.layers) for stage in pipeline.stages] == [
        ("c:0", (0, 3, 4)),
        ("a:0", (1, 2, 5)),
    ]
    assert [stage.chunks for stage in pipeline.stages] == [(range(1), range(3, 5)), (range(1, 3), range(5, 6))]
    assert pipeline.layers_at == {stage.worker_ids[0]: frozenset(stage.layers) for stage in pipeline.stages}
    found = ExecutionPlan(pipelines=(pipeline,))
    assert [found.locate(worker_id) for worker_id in pipeline.worker_ids] == [(0, 0), (0, 1)]
    assert found.owners_of(4) == pipeline.stages[0].worker_ids


@pytest.mark.parametrize(
    "stages",
    [
        ((0, 1, 0), (1, 2, 0)),
        ((0, 1, 0), (1, 2, 1), (2, 3, 0)),
        ((0, 1, 0), (1, 2, 1), (2, 3, 1), (3, 4, 0)),
    ],
    ids=["two on the same devices", "more on one than on another", "not in turn"],
)
def test_chunks_that_are_not_in_turn_are_refused(stages: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="as many chunks each, in turn"):
        template(*stages)


def test_stages_of_several_devices_have_several_places() -> None:
    wide = PipelineTemplate(
        stages=(StageTemplate(first_layer=0, stop_layer=1, node_index=0, first_device=2, num_devices=2),)
    )
    pipeline = Pipeline(template=wide, nodes=("a",), num_microbatches=1)
    assert [str(worker_id) for worker_id in pipeline.worker_ids] == ["a:2", "a:3"]
    assert list(pipeline.stages[0].layers) == [0]


def test_what_is_no_pipeline_is_named() -> None:
    with pytest.raises(ConfigError, match="0 layers"):
        template((0, 0, 0))
    with pytest.raises(ConfigError, match="layer 0"):
        template((1, 2, 0))
    with pytest.raises(ConfigError, match="layer 1"):
        template((0, 1, 0), (2, 3, 1))
    with pytest.raises(ConfigError, match=r"2 nodes .*on 1\b"):
        Pipeline(template=TWO, nodes=("a",), num_microbatches=1)
