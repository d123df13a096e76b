"""The data in shards: whatever goes wrong, each record is in one committed step an epoch, and in no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import RecordsDealt, ShardQuarantined
from tests.control.model import Shape
from tests.control.schedules import KINDS, Fault, Scenario, play
from tests.examples import examples

_MANY = 1000
"""Steps, far more than the shards are enough for."""
SHAPES = (
    Shape(shards=(9, 0, 4), max_steps=_MANY),
    Shape(shards=(3, 8), max_steps=_MANY, epochs=2),
    Shape(shards=(5, 2, 6, 1), max_steps=_MANY, at_once=3, num_nodes=3),
    Shape(shards=(40,), max_steps=3, layers_per_device=2),
    Shape(shards=(2, 3), follow=True, max_steps=_MANY, num_nodes=4, num_pipelines=2),
    Shape(shards=(0, 0), follow=True, max_steps=_MANY, num_nodes=5, layers_per_device=2),
    Shape(shards=(7, 7), max_steps=_MANY, num_nodes=2, devices=2),
)


def scenarios(kinds: tuple[str, ...], max_faults: int = 4) -> st.SearchStrategy[Scenario]:
    after = st.one_of(st.integers(0, 20), st.integers(0, 250), st.integers(0, 900))
    faults = st.builds(
        Fault, after=after, kind=st.sampled_from(kinds), target=st.integers(0, 19), last_words=st.integers(0, 3)
    )
    return st.builds(
        Scenario,
        shape=st.sampled_from(SHAPES),
        faults=st.lists(faults, max_size=max_faults).map(tuple),
        seed=st.integers(0, 2**32),
        calm=st.sampled_from((0, 50, 300)),
    )


def test_an_undisturbed_run_takes_every_record_once_an_epoch():
    for shape in SHAPES:
        world = play(Scenario(shape, faults=(), seed=0, calm=0))
        assert world.ended is not None
        assert world.ended.exit_code == 0, world.ended.reason
        taken = sum(run.num_records for runs in world.taken.values() for run in runs)
        all_records = sum(shape.shards) * shape.epochs
        assert taken == min(all_records, shape.max_steps * shape.num_microbatches), shape


@examples(80)
@given(scenario=scenarios(("kill", "crash", "blip", "join", "drain")))
def test_records_are_taken_once_whatever_is_killed(scenario: Scenario):
    play(scenario)


@examples(50)
@given(scenario=scenarios((*KINDS, "grow", "grow", "spoil"), max_faults=6))
def test_faults_of_all_kinds_break_no_promise_about_records(scenario: Scenario):
    play(scenario)


@examples(40)
@given(scenario=scenarios(("master", "master", "kill", "grow", "spoil"), max_faults=6))
def test_masters_may_come_and_go_while_records_are_dealt(scenario: Scenario):
    play(scenario)


def test_a_shard_that_cannot_be_read_is_named_and_the_run_does_not_claim_to_be_complete():
    shape = Shape(shards=(6, 6, 6), max_steps=_MANY)
    world = play(Scenario(shape, faults=(Fault(after=0, kind="spoil", target=1 + 3 * 2),), seed=1, calm=0))
    assert world.ended is not None
    assert world.ended.exit_code == 1, "and there is no checkpoint to go on from"
    assert "shard1" in world.ended.reason
    assert [entry.shard for entry in world.journal if isinstance(entry, ShardQuarantined)] == ["shard1"]
    taken = {(run.shard, at) for runs in world.taken.values() for run in runs for at in run.bounds[:-1]}
    assert taken >= {(shard, at) for shard in (0, 2) for at in range(6)}, "the others are read to their ends"
    assert not taken & {(1, at) for at in range(2, 6)}


def test_what_steps_take_does_not_depend_on_what_goes_wrong():
    shape = Shape(shards=(9, 3, 7), max_steps=_MANY, at_once=2)
    calm = play(Scenario(shape, faults=(), seed=0, calm=0))
    faults = (Fault(after=90, kind="kill", target=1), Fault(after=60, kind="master", target=0))
    rough = play(Scenario(shape, faults=faults, seed=7, calm=100))
    assert rough.taken == calm.taken
    assert len({entry.records.assignment_version for entry in rough.journal if isinstance(entry, RecordsDealt)}) == 1
