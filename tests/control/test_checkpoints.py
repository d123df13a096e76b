"""What the coordinator decides about checkpoints: when to save, what is complete, what to go back to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from oobleck.control.events import ProfileFound, Send, StopRequested
from oobleck.control.journal import (
    Action,
    CheckpointSaved,
    JournalGap,
    Notice,
    PlanAdopted,
    RecoveryDone,
    ReplicasDiffer,
    SaveFailed,
    diagnose,
)
from oobleck.control.journal.summary import summarize
from oobleck.control.protocol import (
    CheckpointCommitted,
    CheckpointsFound,
    CommitCheckpoint,
    FindCheckpoints,
    Finished,
    FoundState,
    Killed,
    LayersPersisted,
    PersistState,
    RemoveOld,
    RemoveUnfinished,
    ReplicaDigests,
    RestoreFailed,
    SavedState,
    SaveState,
    Shard,
    StateNotSaved,
    StateSaved,
    WorkerExited,
    checkpoint_name,
    run_digest,
)
from oobleck.control.recovery import Phase
from oobleck.errors import ExitCode
from oobleck.job import CheckpointSpec
from oobleck.planner import WorkerId, profile_to_json
from tests.control.bench import PID, Bench, ready, sends
from tests.control.journals import replay_run
from tests.control.model import Shape
from tests.control.steps.test_judgement import record

SHAPE = Shape(num_nodes=2, num_pipelines=2, max_steps=100)
"""Two nodes, each a pipeline: both hold all four layers."""
LAYERS = (0, 1, 2, 3)
RUN = run_digest("model", "2026-01-01T00:00:00Z")
OLD = "0000000b"
OTHER = "0000000c"


def started(spec: CheckpointSpec | None = None, *, resume: str = "auto", shape: Shape = SHAPE) -> Bench:
    """A run whose workers can save and have been asked what they see."""
    bench = Bench(shape, job=replace(shape.job, checkpoint=spec or CheckpointSpec(save_steps=5)), resume=resume)
    for spec_ in bench.nodes:
        bench.up(spec_.name)
        bench.say(spec_.name, ready(saves=True))
    bench.feed(ProfileFound(profile_json=profile_to_json(shape.profile), kind=shape.nodes[0].kind))
    return bench


def state(
    step: int, *, run: str = RUN, layers: tuple[int, ...] = LAYERS, at: int | None = None, **fields
) -> FoundState:
    defaults = {"in_memory": False, "directory": None}
    return FoundState(
        name=checkpoint_name(run, step=step, generation=1),
        run=run,
        step=step,
        saved_at=f"2026-01-{at or step:02d}",
        layers=layers,
        **(defaults | fields),
    )


def tell(bench: Bench, *found: FoundState, nodes: tuple[str, ...] = ("n0", "n1"), **fields) -> None:
    """Everybody sees the same."""
    request = max(message.request for message in bench.messages(bench.commands) if isinstance(message, FindCheckpoints))
    defaults = {"problems": (), "unfinished": ()}
    for node in nodes:
        bench.say(node, CheckpointsFound(device=0, request=request, found=found, **(defaults | fields)))


def training(
    spec: CheckpointSpec | None = None, *found: FoundState, resume: str = "auto", shape: Shape = SHAPE
) -> Bench:
    bench = started(spec, resume=resume, shape=shape)
    tell(bench, *found)
    return bench


def wanted(commands, bench: Bench) -> list[int]:
    return [message.step for message in bench.messages(commands, "n0") if isinstance(message, SaveState)]


def save(bench: Bench, step: int, *, until: str = "committed", generation: int = 1) -> str:
    """The workers save after a step, each its half, up to a point."""
    name = checkpoint_name(RUN, step=step, generation=generation)
    halves = {"n0": (0, 1), "n1": (2, 3)}
    saved = SavedState(name=name, step=step, generation=generation, saved_at=f"2026-02-01T00:00:{step:02d}")
    for node, layers in halves.items():
        bench.say(node, StateSaved(device=0, state=saved, layers=layers, size_bytes=10, pause_s=0.25))
    if until == "in memory":
        return name
    for node, layers in halves.items():
        shards = tuple(Shard(layer=layer, file=f"layer-{layer}", size_bytes=7, sha256="") for layer in layers)
        bench.say(node, LayersPersisted(device=0, name=name, shards=shards, duration_s=1.0))
    if until == "committed":
        bench.say("n0", CheckpointCommitted(name=name))
        bench.say("n1", CheckpointCommitted(name=name))
    return name


def texts(bench: Bench) -> str:
    return "\n".join(entry.sentence for entry in (*bench.journal(Notice), *bench.journal(SaveFailed)))


def commits(bench: Bench, node: str = "n0") -> list[CommitCheckpoint]:
    return [message for message in bench.messages(bench.commands, node) if isinstance(message, CommitCheckpoint)]


def test_a_run_begins_when_all_have_told_what_they_see() -> None:
    bench = started()
    assert bench.coordinator.phase is Phase.PREPARING
    tell(bench, nodes=("n0",))
    assert bench.updates == []
    tell(bench, nodes=("n1",))
    assert {update.initial for update in bench.updates} == {True}


def test_workers_that_cannot_save_are_not_asked() -> None:
    bench = Bench(SHAPE)
    bench.prepare()
    assert not [message for message in bench.messages(bench.commands) if isinstance(message, FindCheckpoints)]
    assert len(bench.updates) == 2


def test_a_run_goes_on_from_the_newest_state() -> None:
    bench = training(None, state(10, run=OLD), state(20, run=OLD), state(30, run=OLD, layers=(0, 1)))
    for update in bench.updates:
        assert update.restore is not None
        assert (update.restore.name, update.boundary, update.initial, update.transfers) == (
            checkpoint_name(OLD, step=20, generation=1),
            20,
            False,
            (),
        )
    (plan,) = bench.journal(PlanAdopted)
    assert (plan.action, plan.restored_step) == (Action.START, 20)
    assert [entry.record.step for entry in Bench.entries(bench.commit("n0", 21))] == [21]


def test_what_one_node_alone_sees_is_sent_to_the_other() -> None:
    bench = started()
    request = bench.messages(bench.commands, "n0")[-1].request
    for node, found in (("n0", (state(10, run=OLD),)), ("n1", ())):
        bench.say(node, CheckpointsFound(device=0, request=request, found=found, problems=(), unfinished=()))
    sent = bench.updates[0].transfers
    assert {item.layer for item in sent} == set(LAYERS)
    assert {(item.source.node, item.target.node) for item in sent} == {("n0", "n1")}


def test_without_anything_to_go_on_from_a_run_begins_with_the_seed() -> None:
    assert all(update.initial for update in training().updates)


def test_a_finished_run_is_said_to_be_and_nothing_is_done() -> None:
    bench = training(None, state(100, run=OLD))
    assert bench.updates == []
    assert bench.ended is not None
    assert (bench.ended.exit_code, bench.ended.reason[:17]) == (0, "already finished:")
    assert not [message for message in bench.messages(bench.commands) if isinstance(message, RemoveUnfinished)]


def test_more_steps_go_on_from_a_finished_run_and_keep_its_checkpoint() -> None:
    bench = started(CheckpointSpec(save_steps=5, save_total_limit=1))
    tell(bench, state(40, run=OLD), state(50, run=OLD, at=50, is_final=True))
    assert {update.boundary for update in bench.updates} == {50}
    save(bench, 55, until="written")
    (commit,) = commits(bench)
    assert commit.remove == (state(40, run=OLD).name,)
    assert (commit.manifest.origin, commit.manifest.is_final) == (state(50, run=OLD).name, False)


def test_what_other_runs_have_made_is_never_removed() -> None:
    """Neither by a run that begins with the seed, nor by one that goes on from somewhere else."""
    for resume in ("never", "auto"):
        bench = started(CheckpointSpec(save_steps=5, save_total_limit=1), resume=resume)
        tell(bench, state(9, run=OTHER, at=1), state(3, run=OLD, at=2), state(4, run=OLD, at=3))
        save(bench, 5, until="written")
        (commit,) = commits(bench)
        own = () if resume == "never" else (state(3, run=OLD).name, state(4, run=OLD).name)
        assert commit.remove == own
        assert "checkpoints of other runs" in texts(bench)


def test_the_past_of_a_run_goes_back_through_all_that_it_was_resumed_from() -> None:
    bench = started(CheckpointSpec(save_steps=5, save_total_limit=1))
    tell(bench, state(3, run=OTHER), state(4, run=OLD, origin=state(3, run=OTHER).name))
    save(bench, 5, until="written")
    (commit,) = commits(bench)
    assert commit.remove == (state(3, run=OTHER).name, state(4, run=OLD).name)


def test_the_checkpoint_after_the_last_step_is_final() -> None:
    bench = training(CheckpointSpec(save_steps=50))
    save(bench, 50)
    save(bench, 100, until="written")
    assert [commit.manifest.is_final for commit in commits(bench)] == [False, True]


def test_another_model_under_the_same_tag_is_refused() -> None:
    bench = started()
    tell(bench, misfits=("/c/step-1: of another model",))
    assert bench.ended is not None
    assert bench.ended.exit_code == 78
    for word in ("/c/step-1: of another model", "--tag", "--resume never"):
        assert word in bench.ended.reason
    bench = started(resume="never")
    tell(bench, misfits=("/c/step-1: of another model",))
    assert all(update.initial for update in bench.updates)


def test_a_run_that_must_continue_begins_nothing_of_its_own() -> None:
    bench = training(None, resume="newest")
    assert bench.ended is not None
    assert bench.ended.exit_code == 78
    assert "no node has a checkpoint of this run" in bench.ended.reason
    bench = training(None, state(40, run=OLD), resume="newest")
    assert bench.ended is None
    assert {update.boundary for update in bench.updates} == {40}
    bench = training(None, state(100, run=OLD, is_final=True), resume="newest")
    assert bench.ended is not None
    assert "already finished" in bench.ended.reason


def test_a_finished_model_of_another_directory_is_saved_in_the_runs_own() -> None:
    """Otherwise the run would end with all steps done, and leave no model."""
    bench = training(None, state(100, run=OLD, directory="/else"), resume="/else")
    assert {(update.boundary, update.saves) for update in bench.updates} == {(100, True)}
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=100))
    assert bench.ended is None
    save(bench, 100)
    assert bench.ended is not None
    assert bench.ended.exit_code == 0
    (commit,) = commits(bench)
    assert (commit.manifest.origin, commit.manifest.is_final) == (state(100, run=OLD).name, True)
    bench = training(None, state(50, run=OLD, directory="/else"), resume="/else")
    assert {(update.boundary, update.saves) for update in bench.updates} == {(50, False)}


def test_a_finished_model_that_only_memory_has_is_written() -> None:
    """The last save of the run before has failed: this one trains nothing, and writes what was kept."""
    name = state(100, run=OLD).name
    bench = training(None, state(100, run=OLD, in_memory=True))
    assert bench.ended is None
    wanted_ = [message for message in bench.messages(bench.commands) if isinstance(message, PersistState)]
    assert [message.name for message in wanted_] == [name, name]
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=100))
    assert bench.ended is None
    shards = tuple(Shard(layer=layer, file=f"layer-{layer}", size_bytes=7, sha256="") for layer in LAYERS)
    bench.say("n0", LayersPersisted(device=0, name=name, shards=shards, duration_s=1.0))
    (commit,) = commits(bench)
    assert (commit.manifest.run, commit.manifest.step, commit.manifest.is_final) == (OLD, 100, True)
    for node in ("n0", "n1"):
        bench.say(node, CheckpointCommitted(name=name))
    assert bench.ended is not None
    assert bench.ended.exit_code == 0


def ended_with(*said: StateNotSaved, save_first: bool = True) -> Bench:
    """A run that stops after its first step; what nodes say of its save."""
    bench = training()
    bench.feed(StopRequested(now=False, exit_code=143, reason="ended by SIGTERM"))
    if save_first:
        save(bench, 1, until="in memory")
    bench.commit("n0", 1)
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=1))
    for message in said:
        bench.say("n1", message)
    return bench


NO_ROOM = StateNotSaved(
    device=0, name=checkpoint_name(RUN, step=1, generation=1), step=1, reason="/c: No space left on device"
)


def test_an_end_whose_save_fails_is_no_success() -> None:
    bench = ended_with(NO_ROOM)
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.NOT_SAVED
    for words in ("ended by SIGTERM", "step 1 is NOT SAVED: n1: /c: No space left", "stays in the shared memory"):
        assert words in bench.ended.reason
    (failed,) = bench.journal(SaveFailed)
    assert (failed.step, failed.newest_step) == (1, None)


def test_an_end_whose_state_was_never_in_memory_says_that_it_is_gone() -> None:
    bench = ended_with(replace(NO_ROOM, reason="no shared memory in /dev/shm"), save_first=False)
    assert bench.ended is None, "others may still tell of their shares"
    bench.beat_until(bench.now_s + 3.0, "n0", "n1")
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.NOT_SAVED
    assert "/dev/shm" in bench.ended.reason


def test_shares_that_are_told_of_after_the_save_has_failed_count_as_kept() -> None:
    bench = ended_with(NO_ROOM, save_first=False)
    save(bench, 1, until="in memory")
    assert bench.ended is not None
    assert "stays in the shared memory" in bench.ended.reason


def test_an_end_without_a_place_to_save_in_is_no_success() -> None:
    """Workers that cannot save say so once, when they start; nobody asks them later."""
    bench = Bench(SHAPE)
    bench.up("n0")
    bench.up("n1")
    bench.say("n1", StateNotSaved(device=0, name="", step=0, reason="/c: Not a directory"))
    for node in ("n0", "n1"):
        bench.say(node, ready())
    bench.feed(ProfileFound(profile_json=profile_to_json(SHAPE.profile)))
    bench.feed(StopRequested(now=False, exit_code=0, reason="stopped on request"))
    bench.commit("n0", 1)
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=1))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.NOT_SAVED
    assert "/c: Not a directory" in bench.ended.reason


def test_what_is_on_disk_of_a_save_that_failed_is_removed() -> None:
    bench = training()
    name = save(bench, 5, until="in memory")
    bench.say("n1", StateNotSaved(device=0, name=name, step=5, reason="/c: No space left on device"))
    late = LayersPersisted(device=0, name=name, shards=(), duration_s=1.0)
    for commands in (bench.commands, bench.say("n0", late)):
        removed = [message for message in bench.messages(commands, "n0") if isinstance(message, RemoveUnfinished)]
        assert {message.names for message in removed} == {(name,)}


def test_who_wants_to_start_anew_does() -> None:
    assert all(update.initial for update in training(None, state(20), resume="never").updates)


def test_a_place_without_a_checkpoint_ends_the_run() -> None:
    bench = training(None, state(20), resume="/there")
    assert bench.ended is not None
    assert bench.ended.exit_code == 78


def test_a_save_is_wanted_at_multiples_and_complete_with_its_manifest() -> None:
    bench = training()
    assert wanted(bench.commands, bench) == [5]
    name = save(bench, 5, until="written")
    commits = [message for message in bench.messages(bench.commands, "n1") if isinstance(message, CommitCheckpoint)]
    assert [(commit.manifest.name, [shard.layer for shard in commit.manifest.shards]) for commit in commits] == [
        (name, [0, 1, 2, 3])
    ]
    bench.say("n1", CheckpointCommitted(name=name))
    assert bench.journal(CheckpointSaved) == [], "n0 may have a disk of its own, and no manifest there"
    commands = bench.say("n0", CheckpointCommitted(name=name))
    (saved,) = bench.journal(CheckpointSaved)
    assert (saved.step, saved.size_bytes, saved.pause_s) == (5, 28, 0.25)
    assert wanted(commands, bench) == [5], "no step is known to be committed since, so the next multiple is this one"


def test_old_ones_are_removed_with_the_next_and_unfinished_ones_at_once() -> None:
    bench = started(CheckpointSpec(save_steps=5, save_total_limit=2))
    old = [state(step, run=OLD, at=step) for step in (1, 2)]
    tell(bench, *old, unfinished=("step-00000003.x.1",))
    save(bench, 5, until="written")
    (commit,) = commits(bench)
    assert commit.remove == (old[0].name,)
    assert [message for message in bench.messages(bench.commands, "n0") if isinstance(message, RemoveUnfinished)] == [
        RemoveUnfinished(names=("step-00000003.x.1",))
    ]


def test_who_wrote_no_layers_gets_no_manifest_and_hears_afterwards_what_is_too_old() -> None:
    """Not before: where all share a directory, the older checkpoint is the only one until the newer is complete."""
    bench = started(CheckpointSpec(save_steps=5, save_total_limit=1), shape=replace(SHAPE, num_nodes=3))
    tell(bench, nodes=("n0", "n1", "n2"))
    first, second = save(bench, 5), save(bench, 10, until="written")
    assert [commit.manifest.name for commit in commits(bench)] == [first, second]
    assert commits(bench, "n2") == []
    bench.say("n0", CheckpointCommitted(name=second))
    assert [message for message in bench.messages(bench.commands) if isinstance(message, RemoveOld)] == []
    commands = bench.say("n1", CheckpointCommitted(name=second))
    removals = [send for command in commands for send in sends(command) if isinstance(send.message, RemoveOld)]
    assert removals == [Send(node="n2", message=RemoveOld(names=(first,)))]


def test_no_more_are_kept_than_asked_for_where_two_saves_end_together() -> None:
    bench = started(CheckpointSpec(save_steps=5, save_total_limit=2))
    tell(bench)
    first = save(bench, 5)
    names = [save(bench, step, until="written") for step in (10, 15)]
    assert [commit.remove for commit in commits(bench)][-1] == (), "by then, nobody knew of the third"
    removals = []
    for name in names:
        for node in ("n0", "n1"):
            removals += [send for command in bench.say(node, CheckpointCommitted(name=name)) for send in sends(command)]
    removals = [send for send in removals if isinstance(send.message, RemoveOld)]
    assert removals == [Send(node=node, message=RemoveOld(names=(first,))) for node in ("n0", "n1")]


def test_time_can_be_what_saves_are_counted_in() -> None:
    bench = training(CheckpointSpec(save_interval_s=20.0))
    assert wanted(bench.commands, bench) == []
    for step in range(1, 21):
        assert wanted(bench.commands, bench) == []
        bench.commit("n0", step)
        bench.beat_until(float(step), "n0", "n1")
    assert wanted(bench.commands, bench) == [21]


def test_a_node_that_is_lost_with_its_layers_written_is_not_waited_for() -> None:
    bench = training()
    name = save(bench, 5, until="written")
    bench.say("n0", CheckpointCommitted(name=name))
    assert bench.journal(CheckpointSaved) == []
    bench.fail("n1")
    assert [saved.step for saved in bench.journal(CheckpointSaved)] == [5]


def test_a_node_whose_worker_is_started_again_writes_its_manifest_all_the_same() -> None:
    bench = training()
    name = save(bench, 5, until="in memory")
    bench.say("n0", WorkerExited(device=0, pid=PID, end=Killed(signal=9)))
    for node, layers in {"n0": (0, 1), "n1": (2, 3)}.items():
        shards = tuple(Shard(layer=layer, file=f"layer-{layer}", size_bytes=7, sha256="") for layer in layers)
        bench.say(node, LayersPersisted(device=0, name=name, shards=shards, duration_s=1.0))
    assert [commit.manifest.name for commit in commits(bench, "n0")] == [name]
    bench.say("n1", CheckpointCommitted(name=name))
    assert bench.journal(CheckpointSaved) == []
    bench.say("n0", CheckpointCommitted(name=name))
    assert [saved.step for saved in bench.journal(CheckpointSaved)] == [5]


def test_a_save_is_given_up_whose_first_share_is_heard_of_after_a_loss() -> None:
    bench = training()
    bench.commit("n0", 5)
    bench.say("n1", WorkerExited(device=0, pid=PID, end=Killed(signal=9)))
    first = SavedState(name=checkpoint_name(RUN, step=5, generation=1), step=5, generation=1, saved_at="2026-02-01")
    commands = bench.say("n0", StateSaved(device=0, state=first, layers=(0, 1), size_bytes=10, pause_s=0.25))
    assert RemoveUnfinished(names=(first.name,)) in bench.messages(commands, "n0")
    assert [failed.step for failed in bench.journal(SaveFailed)] == [5]


def test_a_share_that_is_heard_of_once_another_plan_is_adopted_leaves_no_save_unasked_for() -> None:
    bench = training()
    bench.commit("n0", 5)
    bench.fail("n1")
    bench.answer("n0", applied=5, adopted=1, layers=LAYERS, last_record=record(5))
    bench.wait(0.02)
    late = SavedState(name=checkpoint_name(RUN, step=5, generation=1), step=5, generation=1, saved_at="2026-02-01")
    commands = bench.say("n0", StateSaved(device=0, state=late, layers=(0, 1), size_bytes=10, pause_s=0.25))
    assert [failed.step for failed in bench.journal(SaveFailed)] == [5]
    assert wanted(commands, bench), "it is made again"


def test_the_last_step_is_saved_again_where_a_worker_was_lost_before_it_had_saved() -> None:
    bench = training(CheckpointSpec(save_steps=5), shape=replace(SHAPE, max_steps=1))
    bench.commit("n0", 1)
    first = SavedState(name=checkpoint_name(RUN, step=1, generation=1), step=1, generation=1, saved_at="2026-02-01")
    bench.say("n0", StateSaved(device=0, state=first, layers=(0, 1), size_bytes=10, pause_s=0.25))
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=1))
    bench.fail("n1")
    assert bench.ended is None
    bench.answer("n0", applied=1, adopted=1, layers=LAYERS, last_record=record(1))
    bench.wait(0.02)
    assert bench.updates[-1].saves
    assert bench.ended is None
    again = replace(first, name=checkpoint_name(RUN, step=1, generation=2), generation=2)
    bench.say("n0", Finished(device=0, applied=1))
    bench.say("n0", StateSaved(device=0, state=again, layers=LAYERS, size_bytes=10, pause_s=0.25))
    shards = tuple(Shard(layer=layer, file=f"layer-{layer}", size_bytes=7, sha256="") for layer in LAYERS)
    bench.say("n0", LayersPersisted(device=0, name=again.name, shards=shards, duration_s=1.0))
    assert bench.ended is None
    bench.say("n0", CheckpointCommitted(name=again.name))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.DONE


def test_a_full_disk_is_told_loudly_and_tried_again_later() -> None:
    bench = training()
    name = save(bench, 5, until="in memory")
    bench.commit("n0", 5)
    bench.say("n1", StateNotSaved(device=0, name=name, step=5, reason="/c: No space left on device"))
    (failed,) = bench.journal(SaveFailed)
    assert failed.level == "error"
    assert "n1: /c: No space left on device" in failed.sentence
    assert bench.coordinator.phase is Phase.TRAINING
    before = len(wanted(bench.commands, bench))
    for step in range(6, 90):
        bench.commit("n0", step)
        bench.beat_until(bench.now_s + 1.0, "n0", "n1")
    assert len(wanted(bench.commands, bench)) > before


def test_a_save_that_takes_too_long_is_given_up_and_another_one_made_later() -> None:
    """Half of its shares are never whole in memory."""
    bench = training(CheckpointSpec(save_interval_s=20.0))
    name = checkpoint_name(RUN, step=1, generation=1)
    saved = SavedState(name=name, step=1, generation=1, saved_at="2026-02-01T00:00:01")
    for step in range(1, 30):
        bench.commit("n0", step)
        if step == 1:
            bench.say("n0", StateSaved(device=0, state=saved, layers=(0, 1), size_bytes=10, pause_s=0.25))
        bench.beat_until(5.0 * step, "n0", "n1")
        if step == 20:
            assert (wanted(bench.commands, bench), bench.journal(SaveFailed)) == ([], []), "one is under way"
    assert "was not complete within 120 s" in texts(bench)
    before = len(wanted(bench.commands, bench))
    for step in range(30, 45):
        bench.commit("n0", step)
        bench.beat_until(5.0 * step, "n0", "n1")
    assert len(wanted(bench.commands, bench)) == before + 1


def test_a_save_that_lost_a_node_is_given_up_and_made_again() -> None:
    bench = training()
    save(bench, 5, until="in memory")
    bench.fail("n1")
    assert "n1 was lost" in texts(bench)
    bench.answer("n0", applied=5, adopted=1, layers=LAYERS)
    commands = bench.wait(0.02)
    assert wanted(commands, bench), "there is one copy of every layer left: it is saved at once"


def test_a_run_that_is_stopped_ends_when_its_last_save_has() -> None:
    bench = training()
    bench.feed(StopRequested(now=False, exit_code=143, reason="ended by SIGTERM"))
    bench.commit("n0", 1)
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=1))
    assert bench.ended is None
    save(bench, 1)
    assert bench.ended is not None
    assert bench.ended.exit_code == 143


def test_a_last_save_that_never_comes_is_not_waited_for_for_ever() -> None:
    bench = training()
    bench.feed(StopRequested(now=False, exit_code=143, reason="ended by SIGTERM"))
    bench.commit("n0", 1)
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=1))
    bench.beat_until(bench.now_s + 301.0, "n0", "n1")
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.NOT_SAVED


# --- state is lost -----------------------------------------------------------------------------------------------

PAIRS = Shape(layers_per_device=2, max_steps=100)
"""Four nodes in two pipelines of two: no node holds more than half of the layers."""


def lost_state(*found: FoundState) -> Bench:
    """Both holders of some layers are gone after step 7; the others have told what they see."""
    bench = started(shape=PAIRS)
    tell(bench, nodes=("n0", "n1", "n2", "n3"))
    for step in range(1, 8):
        bench.commit("n0", step)
    plan = bench.updates[0].plan
    for worker_id in plan.owners_of(0):
        bench.fail(worker_id.node)
    for node in survivors(bench):
        bench.answer(node, applied=7, adopted=1, layers=(2, 3))
    bench.wait(0.02)
    return bench


def survivors(bench: Bench) -> tuple[str, ...]:
    return tuple(sorted(worker_id.node for worker_id in bench.updates[0].plan.owners_of(3)))


def test_a_layer_without_a_copy_goes_back_to_the_newest_checkpoint_of_this_run() -> None:
    bench = lost_state()
    tell(bench, state(5, at=3), state(9, run=OLD, at=9), nodes=survivors(bench))
    update = bench.updates[-1]
    assert update.restore is not None
    assert (update.restore.name, update.boundary) == (state(5).name, 5)
    assert bench.journal(PlanAdopted)[-1].action is Action.CHECKPOINT
    left = tuple(sorted(worker_id.node for worker_id in update.plan.worker_ids))
    assert not bench.commit(left[0], 8, generation=1), "what was begun before counts for nothing"
    assert bench.commit(left[0], 6, generation=update.generation)
    bench.resume(*left)
    assert bench.journal(RecoveryDone)[-1].steps_lost == 2


def test_without_a_checkpoint_lost_state_ends_the_run() -> None:
    bench = lost_state()
    tell(bench, nodes=survivors(bench))
    assert bench.ended is not None
    assert bench.ended.exit_code == 1
    assert "no checkpoint" in bench.ended.reason


def test_a_broken_checkpoint_gives_way_to_the_one_before() -> None:
    bench = training(None, state(10, run=OLD), state(20, run=OLD))
    bench.say("n1", RestoreFailed(device=0, generation=1, name=state(20, run=OLD).name, problem="x: changed"))
    assert "n1 cannot restore" in texts(bench)
    for node in ("n0", "n1"):
        bench.answer(node)
    bench.wait(0.02)
    tell(bench, state(10, run=OLD), state(20, run=OLD))
    update = bench.updates[-1]
    assert update.restore is not None
    assert (update.generation, update.boundary) == (2, 10)


def test_a_copy_that_differs_is_replaced_by_the_others() -> None:
    shape = Shape(num_nodes=3, num_pipelines=3, max_steps=100)
    bench = Bench(shape)
    bench.prepare()
    bench.commit("n0", 1)
    for node, digest in (("n0", 5), ("n1", 6), ("n2", 5)):
        digests = (1, 1, digest, 1)
        bench.say(node, ReplicaDigests(device=0, step=1, generation=1, layers=LAYERS, digests=digests))
    (differ,) = bench.journal(ReplicasDiffer)
    assert (differ.layer, differ.is_sure) == (2, True)
    assert [worker_id.node for worker_id in differ.odd] == ["n1"]
    for node in ("n0", "n1", "n2"):
        bench.answer(node, applied=1, adopted=1, layers=LAYERS)
    bench.wait(0.02)
    update = bench.updates[-1]
    assert update.generation == 2
    assert {(item.layer, item.target) for item in update.transfers} == {(2, WorkerId(node="n1", device=0))}
    assert {item.source.node for item in update.transfers} == {"n0", "n2"}


def test_a_state_in_parts_is_complete_when_all_parts_of_all_layers_are() -> None:
    """Two devices share the stages of each node: a layer's parts are saved by both."""
    shape = replace(SHAPE, devices=2, num_nodes=2)
    job = replace(shape.job, tensor_parallel=2, checkpoint=CheckpointSpec(save_steps=5))
    bench = Bench(shape, job=job)
    for spec in bench.nodes:
        bench.up(spec.name)
        for device in range(2):
            bench.say(spec.name, ready(device, saves=True))
    bench.feed(ProfileFound(profile_json=profile_to_json(shape.profile), kind=shape.nodes[0].kind))
    request = max(message.request for message in bench.messages(bench.commands) if isinstance(message, FindCheckpoints))
    for node, device in product(("n0", "n1"), range(2)):
        nothing = CheckpointsFound(device=device, request=request, found=(), problems=(), unfinished=())
        bench.say(node, nothing)
    name = checkpoint_name(RUN, step=5, generation=1)
    saved = SavedState(name=name, step=5, generation=1, saved_at="2026-02-01T00:00:05")
    halves = {"n0": (0, 1), "n1": (2, 3)}
    for (node, layers), device in product(halves.items(), range(2)):
        bench.say(node, StateSaved(device=device, state=saved, layers=layers, size_bytes=10, pause_s=0.25))

    def written(node: str, device: int) -> list[CommitCheckpoint]:
        shards = tuple(
            Shard(layer=layer, part=device, file=f"layer-{layer}.{device}", size_bytes=7, sha256="")
            for layer in halves[node]
        )
        told = bench.say(node, LayersPersisted(device=device, name=name, shards=shards, duration_s=1.0))
        return [message for message in bench.messages(told, "n0") if isinstance(message, CommitCheckpoint)]

    assert [written("n0", 0), written("n0", 1), written("n1", 1)] == [[], [], []], "all layers, and not all parts"
    (commit,) = written("n1", 0)
    assert commit.manifest.num_parts == 2
    assert [(shard.layer, shard.part) for shard in commit.manifest.shards] == list(product(range(4), range(2)))


def test_a_recovery_that_never_came_to_an_end_is_not_told_as_done() -> None:
    bench = training()
    bench.commit("n0", 1)
    bench.fail("n0")
    bench.answer("n1", applied=1, adopted=1, layers=LAYERS)
    bench.wait(0.02)
    bench.fail("n1")
    assert bench.ended is not None
    for done in bench.journal(RecoveryDone):
        assert done.unfinished
        assert done.unfinished in done.sentence
        assert "copied" not in done.sentence
        assert done.level == "warning"


def test_a_run_left_to_itself_saves_after_its_first_step() -> None:
    """So that it has something to go back to, and hears of a disk that is too small while that costs nothing."""
    bench = training(CheckpointSpec())
    assert wanted(bench.commands, bench) == [1]
    commands = save_and_collect(bench, 1)
    assert wanted(commands, bench) == [], "from then on as often as it pays"


def save_and_collect(bench: Bench, step: int) -> list:
    before = len(bench.commands)
    save(bench, step)
    return bench.commands[before:]


def test_a_journal_knows_whether_all_that_happened_is_in_it() -> None:
    bench = training()
    bench.commit("n0", 1)
    entries = bench.entries(bench.commands)
    begun = JournalGap(t_s=2.0, since_s=2.0, until_s=None, problem="No space left on device")
    over = replace(begun, t_s=3.0, until_s=3.0, num_late=5)
    for gaps, expected in (
        ((), None),
        ((begun,), begun),
        ((begun, over), None),
        ((begun, replace(over, num_lost=2)), replace(over, num_lost=2)),
    ):
        replayed = replay_run([*entries, *gaps])
        assert replayed is not None
        assert replayed.gap == expected
        said = summarize([*entries, *gaps]).journal_lacks
        assert said == ("" if expected is None else expected.sentence)
        assert bool(diagnose([*entries, *gaps])) == bool(gaps)
