"""Who saves which layer."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.checkpoints.saves import saving_shares
from oobleck.plan import StageTemplate
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate
from oobleck.planner.tensor_parallel import expand_plan


@st.composite
def plans(draw: st.DrawFn) -> ExecutionPlan:
    """Pipelines of one model, each cut in its own way."""
    num_layers = draw(st.integers(1, 8))
    pipelines, node = [], 0
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=3))) if num_layers > 1 else []
        bounds = [0, *cuts, num_layers]
        stages = tuple(
            StageTemplate(first_layer=first, stop_layer=stop, node_index=index)
            for index, (first, stop) in enumerate(pairwise(bounds))
        )
        nodes = tuple(f"n{node + index}" for index in range(len(stages)))
        node += len(stages)
        pipelines.append(Pipeline(template=PipelineTemplate(stages=stages), nodes=nodes, num_microbatches=1))
    return ExecutionPlan(pipelines=tuple(pipelines))


@given(plan=plans(), data=st.data())
def test_every_layer_that_lives_is_saved_once_by_a_living_holder(plan: ExecutionPlan, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=plan.num_layers, max_size=plan.num_layers))
    lost = data.draw(st.sets(st.sampled_from(plan.nodes)))
    shares = saving_shares(plan, sizes, lost=lost)
    dealt = [layer for layers in shares.values() for layer in layers]
    assert len(dealt) == len(set(dealt))
    for layer in range(plan.num_layers):
        holders = [worker_id for worker_id in plan.owners_of(layer) if worker_id.node not in lost]
        savers = [worker_id for worker_id, layers in shares.items() if layer in layers]
        assert len(savers) == bool(holders)
        assert set(savers) <= set(holders)


@given(plan=plans(), data=st.data())
def test_all_parts_of_a_layer_are_saved_on_one_node(plan: ExecutionPlan, data: st.DataObject) -> None:
    """Where two devices share each stage."""
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=plan.num_layers, max_size=plan.num_layers))
    lost = data.draw(st.sets(st.sampled_from(plan.nodes)))
    shared = expand_plan(plan, 2)
    first, second = (saving_shares(shared, sizes, lost=lost, rank=rank, degree=2) for rank in range(2))
    assert {worker_id.device % 2 for worker_id in first} <= {0}
    assert {worker_id._replace(device=worker_id.device + 1): layers for worker_id, layers in first.items()} == second
    assert first == saving_shares(plan, sizes, lost=lost), "they are dealt as among devices with stages of their own"


@given(plan=plans())
def test_where_all_hold_everything_nobody_saves_much_more_than_another(plan: ExecutionPlan) -> None:
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        return
    shares = saving_shares(plan, [1] * plan.num_layers)
    counts = [len(shares.get(worker_id, ())) for worker_id in plan.worker_ids]
    assert max(counts) - min(counts) <= 1
