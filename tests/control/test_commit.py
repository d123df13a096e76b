"""The commit protocol under every interleaving that chance and priorities find: the promises of the model hold."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.control.model import Shape
from tests.control.schedules import KINDS, Fault, Scenario, play, replay
from tests.examples import examples

SHAPES = (
    Shape(),
    Shape(num_nodes=3),
    Shape(layers_per_device=2),
    Shape(num_nodes=5, layers_per_device=2),
    Shape(num_nodes=5, layers_per_device=2, layer_s=0.6),  # steps that are run again rather than finished
    Shape(num_nodes=6, layers_per_device=2),
    Shape(num_nodes=4, fault_threshold=2),
    Shape(num_nodes=2, devices=2),
    Shape(num_nodes=6, layers_per_device=3, num_layers=6, num_microbatches=6),
    Shape(num_nodes=4, num_pipelines=2),
    Shape(num_nodes=3, num_pipelines=3),
    Shape(reductions=2),
    Shape(num_nodes=5, layers_per_device=2, schedule="zero-bubble"),
    Shape(num_nodes=5, layers_per_device=2, schedule="gpipe"),
    Shape(num_nodes=5, num_layers=6, layers_per_device=4, schedule="interleaved"),
    Shape(num_nodes=4, num_pipelines=2, eval_steps=2),
    Shape(num_nodes=5, layers_per_device=2, scales_loss=True),  # newcomers are told the loss scale
)
SHARDED = (
    Shape(num_nodes=2, devices=2, sharding_devices=2, layers_per_device=8),
    Shape(num_nodes=3, devices=4, sharding_devices=2, layers_per_device=2, num_microbatches=6, reductions=3),
    Shape(num_nodes=5, devices=2, sharding_devices=2, layers_per_device=2, eval_steps=2),
    Shape(num_nodes=5, devices=2, sharding_devices=2, layers_per_device=2, layer_s=0.6, num_microbatches=6),
    Shape(num_nodes=3, devices=4, sharding_devices=2, layers_per_device=8, num_microbatches=6, sharding="gradients"),
    Shape(num_nodes=5, devices=2, sharding_devices=2, layers_per_device=8, num_microbatches=6, sharding="all"),
    Shape(num_nodes=4, devices=2, sharding_devices=2, layers_per_device=8, sharding="auto"),
    Shape(num_nodes=4, devices=2, sharding_devices=2, layers_per_device=3, sharding="auto", eval_steps=2),
    Shape(num_nodes=4, devices=2, sharding_devices=2, layers_per_device=8, sharding="all", eval_steps=2, reductions=2),
    Shape(num_nodes=4, devices=2, sharding_devices=2, context_parallel=2, layers_per_device=8, num_microbatches=6),
    Shape(num_nodes=3, devices=6, sharding_devices=3, layers_per_device=2, num_microbatches=6, sharding="gradients"),
    Shape(
        num_nodes=3,
        devices=4,
        sharding_devices=4,
        context_parallel=2,
        layers_per_device=8,
        num_microbatches=6,
        sharding="gradients",
        reductions=3,
    ),
)
IN_SECTIONS = (
    Shape(reductions=2),
    Shape(num_nodes=5, layers_per_device=2, num_microbatches=6, reductions=3),
    Shape(num_nodes=5, layers_per_device=2, num_microbatches=12, layer_s=0.6, reductions=4),
    Shape(num_nodes=6, layers_per_device=3, num_layers=6, num_microbatches=9, layer_s=0.6, reductions=3),
    Shape(num_nodes=4, num_microbatches=12, layer_s=0.6, reductions=4, eval_steps=1),
)


SAVING = (
    Shape(save_steps=1, max_steps=6),
    Shape(num_nodes=5, layers_per_device=2, save_steps=2, max_steps=6),
    Shape(num_nodes=2, devices=2, save_steps=1),
    Shape(num_nodes=3, num_pipelines=3, save_steps=2),
)
ASKING = (
    Shape(asks_every=1, max_steps=4),
    Shape(asks_every=1, max_steps=5, stops_at=2, save_steps=2),
    Shape(num_nodes=5, layers_per_device=2, asks_every=2, max_steps=5, eval_steps=2, stops_at=4),
    Shape(num_nodes=4, num_pipelines=2, asks_every=3, max_steps=6, stops_at=3, save_steps=2),
    Shape(num_nodes=4, num_pipelines=2, num_microbatches=8, reductions=2, asks_every=1, stops_at=2, eval_steps=1),
)
WAITING = (
    Shape(save_steps=1, max_steps=5, waits_for_disk=True),
    Shape(num_nodes=5, layers_per_device=2, save_steps=2, max_steps=6, waits_for_disk=True),
    Shape(num_nodes=4, num_pipelines=2, save_steps=2, max_steps=6, waits_for_disk=True, asks_every=3),
    Shape(num_nodes=3, num_pipelines=3, save_steps=3, max_steps=6, waits_for_disk=True, eval_steps=2),
)
ALL_KINDS = ("kill", "cut", "crash", "freeze", "hang", "stick", "blip", "join", "drain", "stop", "master")


def scenarios(
    kinds: tuple[str, ...], max_faults: int = 3, is_timely: bool = False, shapes: tuple[Shape, ...] = SHAPES
) -> st.SearchStrategy[Scenario]:
    after = st.one_of(st.integers(0, 20), st.integers(0, 250), st.integers(0, 900))
    faults = st.builds(
        Fault, after=after, kind=st.sampled_from(kinds), target=st.integers(0, 9), last_words=st.integers(0, 3)
    )
    return st.builds(
        Scenario,
        shape=st.sampled_from(shapes),
        faults=st.lists(faults, max_size=max_faults).map(tuple),
        seed=st.integers(0, 2**32),
        calm=st.sampled_from((0, 50, 300)),
        is_timely=st.just(True) if is_timely else st.booleans(),
    )


def scenarios_in_commits() -> st.SearchStrategy[Scenario]:
    """Faults between a worker's part and the total's arrival at the last; messages that arrive a generation late."""
    during = st.builds(
        Fault,
        after=st.integers(0, 40),
        kind=st.sampled_from(("hold", "hold", "kill", "crash", "cut", "blip")),
        target=st.integers(0, 9),
        in_commit=st.just(True),
    )
    later = st.builds(
        Fault, after=st.integers(0, 80), kind=st.sampled_from(("release", "kill", "crash")), target=st.integers(0, 9)
    )
    return st.builds(
        Scenario,
        shape=st.sampled_from((*SHAPES, *IN_SECTIONS)),
        faults=st.lists(st.one_of(during, later), min_size=1, max_size=5).map(tuple),
        seed=st.integers(0, 2**32),
        calm=st.sampled_from((50, 300)),
    )


def test_an_undisturbed_run_commits_every_step_in_turn():
    for shape in (*SHAPES, *SHARDED, *IN_SECTIONS, *ASKING, *WAITING):
        world = play(Scenario(shape, faults=(), seed=0, calm=0))
        assert world.ended is not None
        assert world.ended.exit_code == 0
        assert world.stopped_at == shape.stops_at


@examples(50)
@given(scenario=scenarios(("kill",)))
def test_killed_nodes_break_no_promise(scenario: Scenario):
    play(scenario)


@examples(50)
@given(scenario=scenarios_in_commits())
def test_workers_that_die_in_the_middle_of_a_commit_break_no_promise(scenario: Scenario):
    play(scenario)


@examples(60)
@given(scenario=scenarios(("crash", "blip")))
def test_workers_that_end_and_come_back_break_no_promise(scenario: Scenario):
    play(scenario)


@examples(120)
@given(scenario=scenarios(KINDS))
def test_faults_of_all_kinds_break_no_promise(scenario: Scenario):
    play(scenario)


BEGUN_BEFORE_THE_FENCE_AND_AFTER = Scenario(
    shape=Shape(
        num_nodes=3, devices=4, sharding_devices=2, num_layers=4, layers_per_device=2, num_microbatches=6, reductions=3
    ),
    faults=(Fault(after=2, kind="cut", target=0), Fault(after=648, kind="kill", target=0)),
    seed=7,
)
"""When a node is lost, one device of another's stage computes the step's sections, and its fellow begins only then."""

FOLDED_BETWEEN_PASSES = Scenario(
    Shape(num_nodes=4, devices=2, sharding_devices=2, sharding="all", layers_per_device=8, reductions=2, eval_steps=2),
    (Fault(75, "crash", 5, 1), Fault(14, "kill", 5), Fault(14, "kill", 5)),
    seed=0,
    calm=0,
)
"""Between a device's pass and the same one of its fellow, which puts the same weights together, a section is folded."""


@examples(60)
@example(scenario=BEGUN_BEFORE_THE_FENCE_AND_AFTER)
@example(scenario=FOLDED_BETWEEN_PASSES)
@given(scenario=scenarios(KINDS, shapes=SHARDED))
def test_devices_that_share_out_a_stage_break_no_promise(scenario: Scenario):
    """Whether and in which group a collective is posted follows from programs alone, wherever devices are stopped."""
    play(scenario)


@examples(70)
@given(scenario=scenarios(KINDS, max_faults=4, shapes=IN_SECTIONS))
def test_sections_of_a_step_break_no_promise(scenario: Scenario):
    play(scenario)


MISSED = Scenario(Shape(max_steps=6, save_steps=1), (Fault(after=116, kind="blip", target=0),), seed=0, calm=0)
"""A worker misses the commit after which all save, and catches up."""
LEFT = Scenario(
    Shape(num_nodes=2, devices=2, save_steps=1),
    (Fault(140, "drain", 5, 2), Fault(707, "stick", 6), Fault(13, "kill", 8, 2)),
    seed=148480111,
    calm=50,
    is_timely=True,
)
"""A node is drained before it has saved the step that it helped to finish."""
FENCED = Scenario(
    Shape(max_steps=6, save_steps=1),
    (Fault(90, "cut", 7), Fault(152, "stop", 0, 3), Fault(121, "drain", 3, 1), Fault(560, "stick", 4)),
    seed=684917699,
    calm=50,
)
"""Another plan comes before all have saved the state that the one before was to begin with."""
TAKEN_OVER = Scenario(
    Shape(num_nodes=3, num_pipelines=3, save_steps=2),
    (Fault(20, "blip", 2, 1), Fault(2, "freeze", 9, 1), Fault(88, "cut", 6, 1), Fault(15, "master", 1)),
    seed=1262814027,
    calm=50,
    is_timely=True,
)
"""A master knows nothing of a loss that the one before was about to plan for."""


@example(scenario=MISSED)
@example(scenario=LEFT)
@example(scenario=FENCED)
@example(scenario=TAKEN_OVER)
@examples(50)
@given(scenario=scenarios(KINDS, max_faults=4, shapes=SAVING))
def test_no_run_waits_for_a_save_that_nobody_makes(scenario: Scenario):
    play(scenario)


BEGINS_LATE = Scenario(ASKING[0], (Fault(69, "kill", 0), Fault(0, "master", 0)), seed=0, calm=0)
"""The first plan that a script hears of, after a takeover, finishes a step of the one before."""


@example(scenario=BEGINS_LATE)
@examples(60)
@given(scenario=scenarios(KINDS, max_faults=4, shapes=ASKING))
def test_a_script_stops_at_the_step_where_it_says_so(scenario: Scenario):
    play(scenario)


@examples(60)
@given(scenario=scenarios(KINDS, max_faults=4, shapes=WAITING))
def test_a_step_to_save_waits_for_the_save_before_it_and_no_run_for_nothing(scenario: Scenario):
    play(scenario)


@examples(50)
@given(scenario=scenarios(("join", "master", "master"), max_faults=6))
def test_nodes_may_join_while_masters_come_and_go(scenario: Scenario):
    play(scenario)


@examples(60)
@given(scenario=scenarios(("kill", "crash", "blip", "join", "drain", "master"), max_faults=5))
def test_masters_may_come_and_go(scenario: Scenario):
    play(scenario)


@examples(70)
@given(scenario=scenarios(("kill", "cut", "crash", "hang", "stick"), max_faults=1, is_timely=True))
def test_losing_f_nodes_never_ends_a_run(scenario: Scenario):
    world = play(scenario)
    assert world.ended is not None
    assert world.ended.exit_code == 0, world.ended.reason


UNFENCED_SUM = """
    down n0, work n0:0, work n0:0, work n0:0, work n0:0, work n0:0, up n0, work n0:0, down n3, work n3:0, work n3:0,
    work n3:0, work n3:0, down n2, work n2:0, cut n1, work n2:0, work n2:0, work n2:0, work n2:0, work n2:0, up n1,
    down n0, up n0, up n2, work n0:0, down n3, down n2, work n2:0, up n2, time, work n3:0, work n3:0, work n3:0,
    up n3, down n0, down n2, work n2:0, work n2:0, work n0:0, work n0:0, work n0:0, work n0:0, down n3, work n3:0,
    work n3:0, work n0:0, work n0:0, work n3:0, work n3:0, work n2:0, work n0:0, work n3:0, work n3:0, work n3:0,
    work n2:0, work n2:0, work n2:0, work n2:0, carry n2:0>n3:0, work n0:0, work n0:0, carry n0:0>n3:0, work n3:0,
    work n3:0, work n3:0, carry n3:0>n2:0, work n2:0, work n2:0, work n2:0, work n3:0, work n3:0, work n3:0,
    work n3:0, work n3:0, work n2:0, work n2:0, work n2:0, work n2:0, work n2:0, work n2:0, work n3:0,
    carry n3:0>n0:0, work n0:0, work n0:0, work n0:0, work n3:0, work n3:0, work n0:0, work n0:0, work n0:0,
    work n0:0, work n0:0, work n0:0, drain n3
"""
"""n1 is cut off before training begins. n3 is drained in step 2, once n0 has posted the sums of a section and n3 has
not: had n3 posted the step's sums after the fence, they would have met those of that section."""


def test_no_sum_is_posted_after_a_fence_that_left_out_a_section():
    world = replay(Shape(reductions=2), [move.strip() for move in UNFENCED_SUM.split(",")])
    assert world.ended is not None
    assert world.ended.exit_code == 0
