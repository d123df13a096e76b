"""Who reduces what with whom, and in which order; and reductions among real groups in one process."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from oobleck.control.steps.groups import Committee, GroupKey
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate, WorkerId
from oobleck.training.comm import GroupTable
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import share_of
from oobleck.training.step.reduction import Bucket, GradientReducer, Reducers, make_buckets
from oobleck.training.step.stage_state import StageState
from tests.examples import examples
from tests.training.zoo import structure_of

STRUCTURE = structure_of("gpt2")
SHARE = share_of(STRUCTURE, rank=0, degree=1)


@st.composite
def plans(draw: st.DrawFn, structure: ModelStructure = STRUCTURE) -> ExecutionPlan:
    """One to three pipelines with cuts of their own, some with two chunks a stage."""
    names = (f"n{index}" for index in itertools.count())
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, structure.num_layers - 1), max_size=3)))
        edges = list(itertools.pairwise([0, *cuts, structure.num_layers]))
        num_stages = draw(st.sampled_from((2, 4))) if len(edges) == 4 else len(edges)
        stages = tuple(
            StageTemplate(first_layer=first, stop_layer=stop, node_index=index % num_stages)
            for index, (first, stop) in enumerate(edges)
        )
        nodes = tuple(itertools.islice(names, num_stages))
        pipelines.append(Pipeline(template=PipelineTemplate(stages=stages), nodes=nodes, num_microbatches=2))
    return ExecutionPlan(pipelines=tuple(pipelines))


def buckets_of(plan: ExecutionPlan, worker_id: WorkerId, max_elements: int) -> tuple[Bucket, ...]:
    return make_buckets(plan, worker_id, SHARE, key_of=Committee(plan, 1).key_of, max_elements=max_elements)


@given(plan=plans(), max_elements=st.sampled_from([1, 5000, 1 << 30]))
@examples(60)
def test_any_two_workers_agree_on_the_buckets_that_they_share_and_on_their_order(
    plan: ExecutionPlan, max_elements: int
) -> None:
    buckets = {worker_id: buckets_of(plan, worker_id, max_elements) for worker_id in plan.worker_ids}
    for one, other in itertools.combinations(plan.worker_ids, 2):
        shared = [bucket for bucket in buckets[one] if other in bucket.key.members]
        assert shared == [bucket for bucket in buckets[other] if one in bucket.key.members]


@given(plan=plans(), max_elements=st.sampled_from([1, 5000, 1 << 30]))
@examples(60)
def test_every_parameter_is_in_one_bucket_with_all_of_its_owners(plan: ExecutionPlan, max_elements: int) -> None:
    for worker_id in plan.worker_ids:
        buckets = buckets_of(plan, worker_id, max_elements)
        located = plan.locate(worker_id)
        assert located is not None
        layers = plan.pipelines[located[0]].stages[located[1]].layers
        names = [name for bucket in buckets for name in bucket.parameters]
        assert sorted(names) == sorted({name for layer in layers for name in STRUCTURE.layer_parameters(layer)})
        for bucket in buckets:
            for name in bucket.parameters:
                owners = {owner for layer in STRUCTURE.layers_with(name) for owner in plan.owners_of(layer)}
                assert bucket.key.members == tuple(sorted(owners))
            size = sum(torch.Size(STRUCTURE.shapes[name]).numel() for name in bucket.parameters)
            assert len(bucket.parameters) == 1 or size <= max_elements


def test_the_last_layers_come_first() -> None:
    """As a backward pass completes them; the tied embedding, which the first layer completes, comes last."""
    stage = StageTemplate(first_layer=0, stop_layer=STRUCTURE.num_layers, node_index=0)
    pipelines = tuple(
        Pipeline(template=PipelineTemplate(stages=(stage,)), nodes=(node,), num_microbatches=1) for node in ("a", "b")
    )
    buckets = buckets_of(ExecutionPlan(pipelines=pipelines), WorkerId(node="a", device=0), 1)
    first_layers = [STRUCTURE.layers_with(bucket.parameters[0])[0] for bucket in buckets]
    assert first_layers == sorted(first_layers, reverse=True)
    assert buckets[-1].parameters[0].startswith("transformer.wte") or first_layers[-1] == 0


def test_nothing_is_summed_among_all_workers_but_what_all_of_them_own() -> None:
    """The commit goes over links: a group of all, of which NCCL would make a communicator, is formed by nobody."""
    structure = structure_of("llama")
    share = share_of(structure, rank=0, degree=1)
    half = structure.num_layers // 2
    edges = ((0, half), (half, structure.num_layers))
    stages = tuple(StageTemplate(first_layer=a, stop_layer=b, node_index=i) for i, (a, b) in enumerate(edges))
    plan = ExecutionPlan(
        pipelines=tuple(
            Pipeline(template=PipelineTemplate(stages=stages), nodes=nodes, num_microbatches=1)
            for nodes in (("a", "b"), ("c", "d"))
        )
    )
    committee = Committee(plan, 1)
    for worker_id in plan.worker_ids:
        make_buckets(plan, worker_id, share, key_of=committee.key_of)
    assert {tuple(each.node for each in members) for members in committee.keys} == {("a", "c"), ("b", "d")}


def test_the_largest_bucket_of_a_group_is_what_its_communicator_connects_by() -> None:
    share = share_of(STRUCTURE, rank=0, degree=1)
    stage = StageTemplate(first_layer=0, stop_layer=STRUCTURE.num_layers, node_index=0)
    pipelines = tuple(
        Pipeline(template=PipelineTemplate(stages=(stage,)), nodes=(node,), num_microbatches=1) for node in ("a", "b")
    )
    committee = Committee(ExecutionPlan(pipelines=pipelines), 1)
    reducers = Reducers(WorkerId("a", 0), share, cast("StageState", None), cast("GroupTable", None))
    (key,) = set(reducers.keys_of(committee))
    sizes = [
        sum(STRUCTURE.shapes[name].numel() for name in bucket.parameters) for bucket in reducers.buckets_of(committee)
    ]
    assert reducers.largest_of(committee) == {key: max(sizes)}
    assert reducers.largest_of(None) == {}


class _Groups(dict[GroupKey, "_Groups"]):
    """Stands for groups whose sums are never waited for."""

    def __init__(self) -> None:
        self.posted: list[GroupKey] = []

    def __getitem__(self, key: GroupKey) -> _Groups:
        self.posted.append(key)
        return self

    def all_reduce(self, _flat: torch.Tensor, *, stage: object = None) -> object:
        return object()


@pytest.mark.usefixtures("backward_on")
def test_of_several_chunks_those_whose_backward_passes_are_over_are_summed_while_the_last_one_runs() -> None:
    """The last to run is the first layers' chunk; what it does not touch is final before."""
    names = ("late", "both", "early")
    parameters = {name: nn.Parameter(torch.ones(1)) for name in names}
    keys = {name: GroupKey("reduce", 1, (WorkerId("a", 0), WorkerId(name, 0))) for name in names}
    groups = _Groups()
    buckets = [Bucket(key=keys[name], parameters=(name,)) for name in names]
    reducer = GradientReducer(buckets, parameters, cast("GroupTable", groups))
    with reducer.overlapping({"both", "early"}):
        assert groups.posted == [keys["late"]]
        parameters["early"].sum().backward()
        assert groups.posted == [keys["late"]], "in their order"
        parameters["both"].sum().backward()
        assert groups.posted == [keys[name] for name in names]
