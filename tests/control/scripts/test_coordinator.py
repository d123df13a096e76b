"""The coordinator of a script's ranks: what agents say becomes orders, entries and the end of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from oobleck import __version__
from oobleck.control.events import (
    AddRequested,
    Command,
    Connect,
    DrainRequested,
    End,
    Event,
    MessageReceived,
    NodeFailed,
    NodesHeard,
    NodeUp,
    Record,
    Remark,
    Send,
    StopRequested,
)
from oobleck.control.journal import (
    ConnectionLost,
    GenerationCause,
    GenerationEnded,
    GenerationFormed,
    GenerationRuns,
    JobEnded,
    NodeLeft,
    NodeLost,
    Notice,
    RankDown,
    RanksHung,
    ScriptStarted,
    StateUnwritten,
    StepRecomputed,
    StepsSaved,
    Unreachable,
    summarize,
)
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    AgentStopped,
    BadLosses,
    CheckpointCommitted,
    ConfigureRanks,
    CopyDoor,
    CopyParts,
    EndRanks,
    Exited,
    Heartbeat,
    HeldParity,
    HeldPart,
    Hello,
    Killed,
    Leaving,
    PartNotCopied,
    PartNotWritten,
    RankError,
    RankFailed,
    RankOutput,
    RanksCold,
    RanksFinished,
    RanksQuiet,
    RanksReady,
    RanksStarted,
    RankStacks,
    ScriptProgress,
    ScriptState,
    StartRanks,
    StatesHeld,
    StatesKept,
    StopAgent,
    TraceRanks,
)
from oobleck.control.scripts import RanksCoordinator
from oobleck.errors import ExitCode
from oobleck.job import ControlSpec, NodeSpec
from oobleck.job.ranks import RanksSpec
from tests.control.journals import books_of

NODES = ("a", "b", "c")
T = TypeVar("T")


class World:
    """Agents that do as they are told, at once, unless a test says otherwise."""

    def __init__(self, *, num_nodes: int = 3, domains: Sequence[str] = ("", "", ""), **options: Any) -> None:
        specs = tuple(
            NodeSpec(name=name, host=name, domain=domain) for name, domain in zip(NODES, domains, strict=True)
        )
        specs = specs[:num_nodes]
        choices = {"min_nodes": 1, "max_nodes": 3, "max_restarts": 1, "control": ControlSpec(), **options}
        self.specs = specs
        required = {"tag": "t", "entry": "script", "command": ("train.py",), "directory": "/"}
        self.run = run = RanksSpec(**{**required, **choices})
        self.coordinator = RanksCoordinator(run, specs, started_at="2026-01-01", python_version="3.11.7")
        self.now_s = 0.0
        self.commands = self.coordinator.start(0.0)

    def succeed(self) -> list[Command]:
        """Have another master take over from the journal."""
        books = books_of(command.entry for command in self.commands if isinstance(command, Record))
        assert books.ranks is not None
        self.now_s += 5
        self.coordinator = RanksCoordinator(
            self.run, self.specs, started_at="2027-02-02", python_version="3.11.7", replayed=books.ranks
        )
        new = self.coordinator.start(self.now_s)
        self.commands += new
        return new

    def give(self, event: Event) -> list[Command]:
        self.now_s += 0.01
        new = self.coordinator.handle(self.now_s, event)
        self.commands += new
        return new

    def say(self, node: str, message: Any) -> list[Command]:
        return self.give(MessageReceived(node=node, message=message))

    def come(self, node: str, *, pid: int = 1, **differs: Any) -> list[Command]:
        fields = {
            "protocol": PROTOCOL_VERSION,
            "oobleck_version": __version__,
            "python_version": "3.11.2",
            "node": node,
            "pid": pid,
            "generation": 0,
            "workers": (),
            "num_cores": 2,
            "memory_bytes": 1 << 30,
            "clock_s": 0.0,
        }
        return self.give(NodeUp(node=node, hello=Hello(**{**fields, **differs}), address=f"{node}.address"))

    def ready(self, node: str, generation: int = 0, *, address: str = "") -> list[Command]:
        door = CopyDoor(node=node, host=f"{node}.address", port=1, ticket=b"")
        port = 1000 + NODES.index(node)
        return self.say(node, RanksReady(generation=generation, num_ranks=2, port=port, address=address, door=door))

    def hold(self, node: str, *ranks: int, step: int = 5) -> list[Command]:
        """Report the parts of one state, which all six ranks have saved."""
        state = ScriptState(number=1, step=step, start="s1-20260101-000001")
        parts = tuple(HeldPart(state=state, rank=rank, world_size=6, is_sharded=True) for rank in ranks)
        return self.say(node, StatesHeld(parts=parts, kept=99))

    def begin(self, *nodes: str) -> None:
        for node in nodes:
            self.come(node)
        for node in nodes:
            self.ready(node)
        for node in nodes:
            self.say(node, RanksStarted(generation=1, pids=(1, 2), is_warm=False))

    def entries(self, kind: type[T]) -> list[T]:
        return [each.entry for each in self.commands if isinstance(each, Record) and isinstance(each.entry, kind)]

    @property
    def end(self) -> End:
        (end,) = [command for command in self.commands if isinstance(command, End)]
        return end


def sent(commands: list[Command], kind: type[T]) -> dict[str, T]:
    return {each.node: each.message for each in commands if isinstance(each, Send) and isinstance(each.message, kind)}


def failed(rank: int = 3, *, generation: int = 1) -> RankFailed:
    error = RankError(message="ValueError: x", detail="Traceback …\nValueError: x", is_exception=True)
    return RankFailed(
        generation=generation, rank=rank, local_rank=rank % 2, pid=7 + rank, end=Exited(exit_code=1), error=error
    )


def test_ranks_start_once_all_nodes_are_ready_with_the_port_that_the_first_one_keeps():
    world = World()
    assert [command.node.name for command in world.commands if isinstance(command, Connect)] == list(NODES)
    for node in ("c", "a", "b"):
        assert sent(world.come(node), ConfigureRanks)[node].generation == 0
    world.ready("c")
    world.ready("b")
    orders = sent(world.ready("a"), StartRanks)
    assert [(orders[node].group_rank, orders[node].first_rank) for node in NODES] == [(0, 0), (1, 2), (2, 4)]
    assert {(order.master_address, order.master_port, order.world_size) for order in orders.values()} == {
        ("a.address", 1000, 6)
    }
    for node in NODES:
        world.say(node, RanksStarted(generation=1, pids=(1, 2), is_warm=node != "b"))
    (runs,) = world.entries(GenerationRuns)
    assert runs.is_warm is False


def test_ranks_meet_at_the_address_of_the_interface_that_a_node_is_reached_by():
    world = World(num_nodes=2)
    for node in ("a", "b"):
        world.come(node)
    world.ready("b", address="10.1.0.6")
    orders = sent(world.ready("a", address="10.1.0.5"), StartRanks)
    assert {order.master_address for order in orders.values()} == {"10.1.0.5"}


def test_a_failed_rank_ends_the_others_and_the_next_generation_is_counted():
    world = World()
    world.begin(*NODES)
    orders = sent(world.say("b", failed()), EndRanks)
    assert {node: (order.generation, order.grace_s) for node, order in orders.items()} == dict.fromkeys(NODES, (1, 0))
    world.say("c", failed(5))
    assert [(down.rank, down.is_first) for down in world.entries(RankDown)] == [(3, True), (5, False)]
    world.ready("b", 1)
    world.ready("c", 1)
    assert {order.generation for order in sent(world.ready("a", 1), StartRanks).values()} == {2}
    assert [formed.num_failures for formed in world.entries(GenerationFormed)] == [0, 1]


def test_another_master_lets_ranks_run_on_and_hears_again_what_the_one_before_knew():
    world = World()
    world.begin(*NODES)
    assert {each.node.name: each.attach for each in world.succeed() if isinstance(each, Connect)} == dict.fromkeys(
        NODES, True
    )
    for node in NODES:
        commands = world.come(node)
        assert sent(commands, ConfigureRanks)
        assert not sent(commands, StartRanks)
        world.say(node, RanksStarted(generation=1, pids=(1, 2), is_warm=False))
    assert len(world.entries(GenerationRuns)) == 1
    for node in NODES:
        world.say(node, RanksFinished(generation=1))
    assert world.end.exit_code == ExitCode.DONE


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_that_a_lost_node_has_caused_costs_no_restart_under_another_master(is_lost: bool):
    world = World(max_restarts=0)
    world.begin(*NODES)
    world.succeed()
    for node in ("a", "c"):
        world.come(node)
    world.say("a", failed())
    world.ready("a", 1)
    assert not world.entries(GenerationEnded)
    if is_lost:
        world.give(NodeFailed(node="b", loss=ConnectionLost()))
    else:
        world.come("b")
    for node in ("a", "c") if is_lost else NODES:
        world.ready(node, 1)
    assert len(world.entries(RankDown)) == 1
    causes = [entry.cause for entry in world.entries(GenerationEnded)]
    assert causes == [GenerationCause.NODE_LOST if is_lost else GenerationCause.RANK_FAILED]
    if is_lost:
        assert [each.node for each in world.entries(GenerationFormed)[-1].nodes] == ["a", "c"]
    else:
        assert world.end.exit_code == ExitCode.FAILED


def test_states_keep_the_runs_name_under_another_master():
    world = World(max_restarts=5)
    world.begin(*NODES)
    world.succeed()
    for node in NODES:
        world.come(node)
    world.say("b", failed())
    orders = {}
    for node in NODES:
        orders |= sent(world.ready(node, 1), StartRanks)
    assert {(order.generation, order.start) for order in orders.values()} == {(2, "20260101-000002")}


def test_a_node_whose_agent_is_gone_when_another_master_comes_is_left_out():
    world = World()
    world.begin(*NODES)
    world.succeed()
    world.come("a")
    world.come("c")
    ends = sent(world.give(NodeFailed(node="b", loss=ConnectionLost())), EndRanks)
    assert set(ends) == {"a", "c"}
    world.ready("a", 1)
    assert set(sent(world.ready("c", 1), StartRanks)) == {"a", "c"}


@pytest.mark.parametrize("is_failure", [False, True])
def test_what_a_master_had_begun_to_start_or_to_end_is_ended_by_the_next_one(is_failure: bool):
    """Orders to start may be lost, and with them the port at which ranks meet."""
    world = World()
    if is_failure:
        world.begin(*NODES)
        world.say("b", failed())
    else:
        for node in NODES:
            world.come(node)
        for node in NODES:
            world.ready(node)
    world.succeed()
    for node in NODES:
        assert sent(world.come(node), EndRanks)[node].generation == 1
    orders = {}
    for node in NODES:
        orders |= sent(world.ready(node, 1), StartRanks)
    assert {order.generation for order in orders.values()} == {2}
    assert world.entries(GenerationFormed)[-1].num_failures == is_failure


def test_failures_count_under_all_masters():
    world = World(max_restarts=0)
    world.begin(*NODES)
    world.say("b", failed())
    world.succeed()
    for node in NODES:
        world.come(node)
        world.ready(node, 1)
    assert world.end.exit_code == ExitCode.FAILED
    assert "no restart is allowed (--max-restarts)" in world.end.reason


def test_a_report_that_is_repeated_is_one_failure():
    world = World()
    world.begin(*NODES)
    world.say("b", failed())
    world.say("b", failed())
    assert len(world.entries(RankDown)) == 1


def test_a_second_failure_ends_the_run_with_the_traceback():
    world = World(max_restarts=0)
    world.begin("a", "b", "c")
    world.say("b", failed())
    for node in NODES:
        commands = world.ready(node, 1)
    assert world.end.exit_code == 1
    assert "rank 3 on b failed: exit code 1: ValueError: x\nTraceback …" in world.end.reason
    assert sent(commands, StopAgent).keys() == set(NODES)
    assert world.coordinator.handle(9.0, Remark(level="info", text="late")) == []
    assert world.coordinator.handle_deadline(9.0) == []


def test_a_lost_node_is_left_out_and_takes_part_again_when_it_is_back():
    world = World()
    world.begin(*NODES)
    orders = sent(world.give(NodeFailed(node="c", loss=ConnectionLost())), EndRanks)
    assert orders.keys() == {"a", "b"}
    world.ready("a", 1)
    assert sent(world.ready("b", 1), StartRanks).keys() == {"a", "b"}
    world.give(AddRequested(spec=NodeSpec(name="c", host="c")))
    assert sent(world.come("c", pid=2), ConfigureRanks)["c"].generation == 2
    ended = sent(world.ready("c", 2), EndRanks)
    assert {node: order.grace_s > 0 for node, order in ended.items()} == {"a": True, "b": True}
    world.ready("a", 2)
    assert sent(world.ready("b", 2), StartRanks).keys() == set(NODES)
    assert [entry.node for entry in world.entries(NodeLost)] == ["c"]


def test_an_agent_that_is_reached_again_hears_again_what_it_may_have_missed():
    world = World()
    world.begin(*NODES)
    again = world.come("b")
    assert sent(again, ConfigureRanks).keys() == sent(again, StartRanks).keys() == {"b"}
    world.say("a", failed(0))
    again = world.come("b")
    assert sent(again, EndRanks)["b"].generation == 1
    assert not sent(again, StartRanks)


def test_a_drained_node_leaves_once_its_ranks_are_gone():
    world = World()
    world.begin(*NODES)
    assert sent(world.give(DrainRequested(node="b")), EndRanks).keys() == set(NODES)
    assert sent(world.ready("b", 1), StopAgent)["b"].is_dismissal
    world.say("b", AgentStopped(reason="drained"))
    assert [entry.node for entry in world.entries(NodeLeft)] == ["b"]
    world.ready("a", 1)
    assert sent(world.ready("c", 1), StartRanks).keys() == {"a", "c"}


def test_a_drained_node_leaves_and_the_others_start_once_its_parts_have_copies():
    world = World()
    world.begin(*NODES)
    for number, node in enumerate(NODES):
        world.hold(node, 2 * number, 2 * number + 1)
    world.give(DrainRequested(node="b"))
    world.ready("a", 1)
    world.ready("c", 1)
    assert not sent(world.ready("b", 1), StopAgent)
    world.hold("a", 0, 1, 2)
    commands = world.hold("c", 3, 4, 5)
    assert sent(commands, StopAgent)["b"].is_dismissal
    orders = sent(commands, StartRanks)
    assert orders.keys() == {"a", "c"}
    assert {order.saved_step for order in orders.values()} == {5}


def test_a_drained_node_whose_parts_no_other_takes_leaves_in_time():
    world = World()
    world.begin(*NODES)
    for number, node in enumerate(NODES):
        world.hold(node, 2 * number, 2 * number + 1)
    world.give(DrainRequested(node="b"))
    for node in ("a", "c", "b"):
        world.ready(node, 1)
    for _ in range(50):
        world.now_s = max(world.now_s, min(world.coordinator.next_deadline(), world.now_s + 1.0))
        for node in ("a", "b", "c"):
            world.say(node, Heartbeat(sequence=None))
        world.commands += world.coordinator.handle_deadline(world.now_s)
    assert [formed.generation for formed in world.entries(GenerationFormed)] == [1, 2]
    assert any("b leaves, and no other node has all" in notice.text for notice in world.entries(Notice))


def test_a_run_whose_saved_states_are_all_lost_ends_although_restarts_are_left():
    world = World(max_restarts=9)
    world.begin(*NODES)
    error = RankError(message="StatesLost: step 5 was saved", is_exception=True, has_lost_states=True)
    end = Exited(exit_code=1)
    world.say("b", RankFailed(generation=1, rank=3, local_rank=1, pid=9, end=end, error=error))
    for node in NODES:
        world.ready(node, 1)
    assert "step 5 was saved" in world.end.reason


def copied(world: World) -> set[tuple[int, str]]:
    """The ranks whose parts nodes are told to copy, and to which node."""
    world.begin(*NODES)
    for number, node in enumerate(NODES):
        world.hold(node, 2 * number, 2 * number + 1)
    return {
        (part.rank, door.node)
        for command in world.commands
        if isinstance(command, Send) and isinstance(command.message, CopyParts)
        for part in command.message.parts
        for door in part.doors
    }


def test_the_parts_of_a_state_are_copied_to_another_node_each():
    copies = copied(World())
    assert sorted(rank for rank, _ in copies) == list(range(6))
    assert all(NODES[rank // 2] != node for rank, node in copies)


@pytest.mark.parametrize("alone", NODES)
def test_parts_are_copied_to_another_rack(alone: str):
    domains = ["2" if node == alone else "1" for node in NODES]
    for rank, node in copied(World(domains=domains)):
        assert (NODES[rank // 2] == alone) != (node == alone)


def mixed(commands: list[Command]) -> set[tuple[tuple[int, ...], int | None, int, str]]:
    """What nodes are told to mix: of which ranks, the missing one, the rank whose part is sent, and where to."""
    return {
        (part.mix.ranks, part.mix.missing, part.rank, door.node)
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, CopyParts)
        for part in command.message.parts
        for door in part.doors
        if part.mix is not None
    }


def with_parities(world: World, *also: int) -> list[Command]:
    """Have b hold its own parts, the parities of what a and c hold, and the parts of these ranks."""
    state = ScriptState(number=1, step=5, start="s1-20260101-000001")
    parts = tuple(HeldPart(state=state, rank=rank, world_size=6, is_sharded=True) for rank in (2, 3, *also))
    parities = tuple(HeldParity(state=state, ranks=ranks, world_size=6) for ranks in ((0, 4), (1, 5)))
    return world.say("b", StatesHeld(parts=parts, parities=parities, kept=99))


def test_the_next_ranks_start_once_lost_parts_are_made_again_from_their_parity():
    world = World(parity_nodes=2)
    copies = copied(world)
    assert mixed(world.commands) == {(ranks, None, rank, "b") for ranks in ((0, 4), (1, 5)) for rank in ranks}
    assert {rank for rank, node in copies if node != "b"} == {2, 3}, "two nodes of three have their parity on the third"
    with_parities(world)
    commands = world.give(NodeFailed(node="c", loss=ConnectionLost()))
    assert mixed(commands) == {((0, 4), 4, 0, "b"), ((1, 5), 5, 1, "b")}
    assert not sent(world.ready("b", 1), StartRanks)
    assert not sent(world.ready("a", 1), StartRanks)
    assert "lost parts of the newest saved state are made again" in world.entries(Notice)[-1].text
    for _ in range(100):  # longer than ranks may take to end
        world.now_s += 1.0
        for node in ("a", "b"):
            world.say(node, Heartbeat(sequence=None))
        world.commands += world.coordinator.handle_deadline(world.now_s)
    assert len(world.entries(NodeLost)) == 1, "no node is given up meanwhile"
    assert not sent(with_parities(world, 4), StartRanks)
    orders = sent(with_parities(world, 4, 5), StartRanks)
    assert {node: order.saved_step for node, order in orders.items()} == {"a": 5, "b": 5}


@pytest.mark.parametrize("fails", ["the parity is damaged", "its node is lost", "nothing comes"])
def test_ranks_wait_no_longer_for_parts_that_cannot_be_made_again(fails: str):
    world = World(parity_nodes=2)
    copied(world)
    with_parities(world)
    world.give(NodeFailed(node="c", loss=ConnectionLost()))
    world.ready("a", 1)
    if fails == "its node is lost":
        assert sent(world.give(NodeFailed(node="b", loss=ConnectionLost())), StartRanks).keys() == {"a"}
        return
    world.ready("b", 1)
    if fails == "the parity is damaged":
        assert sent(world.hold("b", 2, 3), StartRanks).keys() == {"a", "b"}
        return
    state = ScriptState(number=1, step=5, start="s1-20260101-000001")
    failure = PartNotCopied(state=state, rank=0, target="b", reason="timed out", is_gone=False)
    assert mixed(world.say("a", failure)) == mixed(world.say("a", failure)) == {((0, 4), 4, 0, "b")}, "tried again"
    assert sent(world.say("a", failure), StartRanks).keys() == {"a", "b"}


def test_another_master_waits_for_what_nodes_hold_before_it_starts_ranks():
    world = World(parity_nodes=2)
    copied(world)
    with_parities(world)
    world.give(NodeFailed(node="c", loss=ConnectionLost()))
    world.succeed()
    for node in ("a", "b"):
        world.come(node)
        assert not sent(world.ready(node, 1), StartRanks)
        world.say(node, StatesKept(door=CopyDoor(node=node, host="", port=1, ticket=b""), order=None))
    assert not sent(world.hold("a", 0, 1), StartRanks)
    assert mixed(with_parities(world)) == {((0, 4), 4, 0, "b"), ((1, 5), 5, 1, "b")}
    assert sent(with_parities(world, 4, 5), StartRanks).keys() == {"a", "b"}


def test_why_a_part_is_not_copied_is_said_once():
    world = World()
    copied(world)
    state = ScriptState(number=1, step=5, start="s1-20260101-000001")
    for step in (5, 6):
        for rank in (0, 1):
            failed = PartNotCopied(
                state=replace(state, step=step), rank=rank, target="b", reason="No space left on device", is_gone=False
            )
            world.say("a", failed)
    (notice,) = (entry for entry in world.entries(Notice) if "is not copied" in entry.text)
    assert "a: rank 0's part of step 5 is not copied to b: No space left on device" in notice.text


@pytest.mark.parametrize("nodes", [("a",), NODES], ids=["one-disk", "all-disks"])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_newest", [False, True])
def test_a_state_that_no_disk_takes_is_said_once_and_the_last_one_fails_the_run(nodes, is_sharded, is_newest):
    world = World()
    world.begin(*NODES)
    state = ScriptState(number=1, step=5, start="s1-20260101-000001")
    full = PartNotWritten(state=state, rank=0, is_sharded=is_sharded, reason="/ck: No space left on device")
    for node in nodes:
        for step in (5, 6):
            world.say(node, replace(full, state=replace(state, step=step)))
    newest = replace(state, step=6 if is_newest else 7)
    parts = tuple(HeldPart(state=newest, rank=rank, world_size=6, is_sharded=is_sharded) for rank in range(6))
    world.say("a", StatesHeld(parts=parts))
    assert [(each.node, each.step) for each in world.entries(StateUnwritten)] == [(node, 5) for node in nodes]
    for node in NODES:
        world.say(node, RanksFinished(generation=1))
    if is_newest and (is_sharded or nodes == NODES):
        assert world.end.exit_code == ExitCode.NOT_SAVED
        assert "but step 6 is NOT SAVED: a: /ck: No space left on device" in world.end.reason
    else:
        assert world.end.exit_code == ExitCode.DONE


def test_a_node_that_has_notice_is_drained():
    world = World()
    world.begin(*NODES)
    assert sent(world.say("c", Leaving(reason="spot")), EndRanks).keys() == set(NODES)
    assert [entry.nodes for entry in world.entries(GenerationEnded)] == [("c",)]


def test_a_run_whose_nodes_all_have_notice_ends_and_can_be_continued():
    world = World()
    world.begin(*NODES)
    for node in NODES:
        world.say(node, Leaving(reason="time limit"))
    for node in NODES:
        world.ready(node, 1)
    assert world.end.exit_code == ExitCode.RESUMABLE
    assert world.end.reason == "all nodes are to be taken away; the same command continues from here"


def test_all_ranks_that_end_well_end_the_run_well():
    world = World(num_nodes=2)
    world.begin("a", "b")
    assert not sent(world.say("a", RanksFinished(generation=1)), StopAgent)
    world.say("b", RanksFinished(generation=1))
    assert (world.end.exit_code, world.end.reason) == (0, "all ranks have finished")
    assert [entry.exit_code for entry in world.entries(JobEnded)] == [0]


def test_nodes_that_cannot_be_reached_are_named_when_none_is_left():
    world = World(num_nodes=2)
    for node in ("a", "b"):
        world.give(NodeFailed(node=node, loss=Unreachable(problem=f"no route to {node}")))
    assert "a: no route to a\nb: no route to b" in world.end.reason


def test_another_version_does_not_take_part():
    world = World(num_nodes=2)
    world.come("a", oobleck_version="0.0.1")
    world.come("b")
    assert sent(world.ready("b"), StartRanks).keys() == {"b"}


def test_an_agent_that_talks_of_training_is_given_up():
    world = World()
    world.begin(*NODES)
    world.say("b", CheckpointCommitted(name="step-1"))
    assert [entry.node for entry in world.entries(NodeLost)] == ["b"]


def test_output_and_heartbeats_decide_nothing_and_those_that_ask_are_answered():
    world = World()
    world.begin(*NODES)
    assert world.say("a", RankOutput(rank=0, is_error=False, text="hello\n")) == []
    assert sent(world.say("a", Heartbeat(sequence=4)), Heartbeat) == {"a": Heartbeat(sequence=4)}
    assert world.give(NodesHeard(heard=(("a", world.now_s),))) == []


def test_a_node_that_falls_silent_is_lost_after_its_lease():
    world = World()
    world.begin(*NODES)
    for _ in range(400):
        world.now_s += 0.02
        for node in ("a", "b"):
            world.say(node, Heartbeat(sequence=None))
        world.commands += world.coordinator.handle_deadline(world.now_s)
    assert [entry.node for entry in world.entries(NodeLost)] == ["c"]
    assert [entry.cause.value for entry in world.entries(GenerationEnded)] == ["node_lost"]


def test_a_stop_asks_the_ranks_to_end_and_a_second_one_does_not_wait():
    world = World()
    world.begin(*NODES)
    stop = StopRequested(now=False, exit_code=130, reason="ended by Ctrl-C")
    assert all(order.grace_s for order in sent(world.give(stop), EndRanks).values())
    world.give(StopRequested(now=True, exit_code=130, reason="ended by Ctrl-C"))
    assert (world.end.exit_code, world.end.reason) == (130, "ended by Ctrl-C")


def test_a_rank_killed_by_a_signal_without_a_word_is_told_as_that():
    world = World(max_restarts=0)
    world.begin(*NODES)
    world.say("a", RankFailed(generation=1, rank=0, local_rank=0, pid=9, end=Killed(signal=9), error=None))
    for node in NODES:
        world.ready(node, 1)
    assert world.end.reason.startswith("rank 0 on a failed: killed by signal 9\nno restart is allowed")


def quiet(*idle: int, is_quiet: bool = True) -> RanksQuiet:
    return RanksQuiet(generation=1, is_quiet=is_quiet, has_shown=True, idle=idle)


WAITING = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 1 in barrier\n'
SLEEPING = 'Current thread 0x1 (most recent call first):\n  File "/x/train.py", line 7 in load\n'


def test_ranks_that_hang_are_asked_where_they_are_and_start_again() -> None:
    world = World(num_nodes=2)
    world.begin("a", "b")
    assert not sent(world.say("a", quiet(0, 1)), TraceRanks), "b may be busy"
    asked = world.say("b", quiet(2, 3))
    assert sent(asked, TraceRanks) == {node: TraceRanks(generation=1) for node in ("a", "b")}
    world.say("a", RankStacks(generation=1, stacks=((0, WAITING), (1, WAITING))))
    ended = world.say("b", RankStacks(generation=1, stacks=((2, WAITING), (3, SLEEPING))))
    assert sent(ended, EndRanks).keys() == {"a", "b"}
    (hung,) = world.entries(RanksHung)
    assert [(each.node, each.rank, each.place) for each in hung.culprits] == [("b", 3, "/x/train.py:7 in load")]
    assert hung.num_waiting == 3
    assert world.entries(GenerationEnded)[-1].cause.value == "hang"
    for node in ("a", "b"):
        world.ready(node, 1)
    assert world.entries(GenerationFormed)[-1].num_failures == 1


def test_a_sign_of_life_while_ranks_are_asked_lets_them_be() -> None:
    world = World(num_nodes=1)
    world.begin("a")
    world.say("a", quiet(0))
    world.say("a", quiet(is_quiet=False))
    assert not sent(world.say("a", RankStacks(generation=1, stacks=((0, SLEEPING),))), EndRanks)
    assert not world.entries(RanksHung)


def test_ranks_that_do_not_say_where_they_are_start_again_too() -> None:
    world = World(num_nodes=1, control=ControlSpec(lease_s=60.0))
    world.begin("a")
    asked = world.say("a", quiet(0))
    assert sent(asked, TraceRanks)
    due_s = world.coordinator.next_deadline()
    assert due_s == world.now_s + 5.0
    assert not world.coordinator.handle_deadline(due_s - 0.1)
    assert sent(world.coordinator.handle_deadline(due_s), EndRanks)


def test_a_generation_that_a_stop_ends_is_not_said_to_have_finished() -> None:
    world = World(num_nodes=1)
    world.begin("a")
    world.give(StopRequested(exit_code=ExitCode.DONE, reason="stopped", now=False))
    world.ready("a", 1)
    assert world.end.exit_code == 0
    assert [entry.cause.value for entry in world.entries(GenerationEnded)] == ["stopped"]


def test_the_journal_has_names_and_digests_of_arguments_and_variables_and_no_values():
    world = World(command=("train.py", "--token=hidden1", "hidden2", "-v"), environment={"API_KEY": "hidden3"})
    (entry,) = [command.entry for command in world.commands if isinstance(command, Record)][:1]
    assert isinstance(entry, ScriptStarted)
    assert "hidden" not in str(entry)
    assert entry.run.command[:3] == ("train.py", "--token", "-v")
    assert [*entry.run.environment] == ["API_KEY"]
    other = World(command=("train.py", "--token=other", "hidden2", "-v"), environment={"API_KEY": "other"})
    (differing,) = [command.entry for command in other.commands if isinstance(command, Record)][:1]
    assert isinstance(differing, ScriptStarted)
    assert differing.run.command[3] != entry.run.command[3], "two runs can be told from each other"
    assert differing.run.environment != entry.run.environment


def test_ranks_that_start_cold_after_a_loss_of_what_was_imported_are_told_of():
    world = World()
    world.begin("a", "b", "c")
    new = world.say("b", RanksCold(problem="importing slowly has not ended within 60 s"))
    (entry,) = [command.entry for command in new if isinstance(command, Record)]
    assert entry.sentence == "b: ranks that start now start cold: importing slowly has not ended within 60 s"


def test_ranks_that_are_asked_and_say_nothing_start_again_once_their_time_is_over() -> None:
    world = World(num_nodes=2)
    world.begin("a", "b")
    world.say("a", quiet(0, 1))
    world.say("b", quiet(2, 3))
    due_s = world.coordinator.due_s
    assert due_s == world.now_s + 5.0
    world.now_s = due_s - 0.02
    for node in ("a", "b"):
        world.say(node, Heartbeat(sequence=None))
    world.commands += world.coordinator.handle_deadline(due_s)
    assert world.entries(RanksHung)[0].culprits == ()
    assert world.entries(GenerationEnded)[-1].cause.value == "hang"


def test_a_failure_while_ranks_are_asked_leaves_no_deadline_behind() -> None:
    """It did once: the master called `handle_deadline` without end until all ranks were gone."""
    world = World(num_nodes=1)
    world.begin("a")
    world.say("a", quiet(0))
    down = RankFailed(generation=1, rank=0, local_rank=0, pid=9, end=Killed(signal=9), error=None)
    world.say("a", down)
    assert world.coordinator.due_s > world.now_s + 5.0


def test_the_steps_that_ranks_save_are_recorded_once_a_second_at_most_and_at_the_end():
    world = World(num_nodes=1)
    world.come("a")
    world.ready("a")
    world.say("a", RanksStarted(generation=1, pids=(1, 2), is_warm=False))

    def save(step: int, worked_s: float, loss: str, *, rank: int = 0) -> HeldPart:
        state = ScriptState(number=1, step=step, start="s1-20260101-000001")
        progress = ScriptProgress(from_step=0, worked_s=worked_s, loss=loss)
        return HeldPart(state=state, rank=rank, world_size=2, is_sharded=False, progress=progress)

    def told() -> list[tuple[int, int, float, float | None]]:
        return [(each.first_step, each.step, each.worked_s, each.loss) for each in world.entries(StepsSaved)]

    world.say("a", StatesHeld(parts=(save(1, 0.5, "2.5"),)))
    assert told() == [], "rank 1 has not saved it"
    world.say("a", StatesHeld(parts=(save(1, 0.5, "2.5"), save(1, 0.7, "9.0", rank=1))))
    assert told() == [(1, 1, 0.5, 2.5)]
    for step in (2, 3):
        world.say("a", StatesHeld(parts=(save(step, 0.5 * step, ""), save(step, 0.0, "", rank=1))))
    assert len(told()) == 1
    due_s = world.coordinator.next_deadline()
    assert due_s <= world.now_s + 1
    world.commands += world.coordinator.handle_deadline(due_s)
    assert told()[1:] == [(2, 3, 1.0, None)]
    world.say("a", StatesHeld(parts=(save(4, 2.0, "nan"), save(4, 2.0, "nan", rank=1))))
    world.say("a", RanksFinished(generation=1))
    ((first, last, worked_s, loss),) = told()[2:]
    assert (first, last, worked_s) == (4, 4, 0.5)
    assert loss is not None
    assert math.isnan(loss)


def save(
    world: World, node: str, step: int, *, generation: int, from_step: int, num_ranks: int = 6, world_size: int = 6
) -> None:
    """Report a state of which a node has the first parts. Generation 3 has not seen what 2 has saved."""
    number = min(generation, 2)
    state = ScriptState(number=number, step=step, start=f"s{number}-20260101-{generation:06d}")
    progress = ScriptProgress(from_step=from_step, worked_s=float(step - from_step), loss="")
    parts = [
        HeldPart(state=state, rank=rank, world_size=world_size, is_sharded=False, progress=progress)
        for rank in range(num_ranks)
    ]
    world.say(node, StatesHeld(parts=tuple(parts)))


def run_again(world: World, generation: int, *nodes: str) -> None:
    """Have the next generation start on these nodes."""
    all_ready(world, generation - 1, *nodes)
    for node in nodes:
        world.say(node, RanksStarted(generation=generation, pids=(1, 2), is_warm=True))


def lose(world: World, *nodes: str) -> None:
    for node in nodes:
        world.give(NodeFailed(node=node, loss=ConnectionLost()))


def warned_of_lost_steps(world: World) -> list[str]:
    return [each.text for each in world.entries(Notice) if "computed again: generation" in each.text]


def saved_to_18() -> World:
    """A run whose generation 2 has saved step 18 on node a, where c has step 7 of the one before."""
    world = World(max_restarts=9)
    world.begin(*NODES)
    save(world, "c", 7, generation=1, from_step=0)
    world.say("b", failed())
    run_again(world, 2, *NODES)
    save(world, "a", 18, generation=2, from_step=7)
    world.now_s += 2
    save(world, "a", 18, generation=2, from_step=7)
    return world


def test_steps_that_were_saved_and_are_computed_again_are_said_once_and_counted():
    """The start that goes back cannot see the one whose states are lost, and has the same number."""
    world = saved_to_18()
    lose(world, "a", "b")
    run_again(world, 3, "c")
    assert warned_of_lost_steps(world) == []
    save(world, "c", 8, generation=3, from_step=7, num_ranks=1, world_size=2)
    said = (
        "steps 8 to 18, which were saved, are computed again: generation 3 continues after step 7, because "
        "the state of step 18 was on lost nodes alone"
    )
    assert warned_of_lost_steps(world) == [said]
    for step in (8, 9):
        world.now_s += 2
        save(world, "c", step, generation=3, from_step=7, num_ranks=2, world_size=2)
    assert warned_of_lost_steps(world) == [said]
    assert [each.level for each in world.entries(Notice) if each.text == said] == ["warning"]
    assert [(each.generation, each.step) for each in world.entries(StepsSaved)] == [(1, 7), (2, 18), (3, 8), (3, 9)]
    recorded = [command.entry for command in world.commands if isinstance(command, Record)]
    assert summarize(recorded).steps_lost == 11
    world.say("c", failed(1, generation=3))
    run_again(world, 4, "c")
    save(world, "c", 10, generation=4, from_step=9, num_ranks=2, world_size=2)
    assert warned_of_lost_steps(world) == [said], "generation 4 has lost nothing"


def test_one_step_that_is_lost_with_a_part_of_its_state_is_named():
    world = World(max_restarts=9)
    world.begin(*NODES)
    for node, ranks in (("a", (0, 1)), ("b", (2, 3)), ("c", (4, 5))):
        world.hold(node, *ranks, step=1)
    lose(world, "c")
    run_again(world, 2, "a", "b")
    save(world, "a", 1, generation=2, from_step=0, num_ranks=1, world_size=4)
    said = (
        "step 1, which was saved, is computed again: generation 2 begins with step 1, because parts of the "
        "state of step 1 were on lost nodes alone"
    )
    assert warned_of_lost_steps(world) == [said]


@pytest.mark.parametrize("case", ["nothing-lost", "not-saved-by-all", "bad-step", "another-master"])
def test_no_step_is_called_lost_where_ranks_continue_from_the_newest_state_of_all(case: str):
    world = saved_to_18()
    if case == "not-saved-by-all":
        save(world, "b", 19, generation=2, from_step=7, num_ranks=5)
    if case == "another-master":
        world.succeed()
        for node in NODES:
            world.come(node)
            world.say(node, StatesKept(door=CopyDoor(node=node, host="", port=1, ticket=b""), order=None))
        save(world, "a", 18, generation=2, from_step=7)
        save(world, "a", 19, generation=2, from_step=7)
    else:
        world.say("b", bad(3, generation=2, step=19) if case == "bad-step" else failed(generation=2))
        run_again(world, 3, *all_ready(world, 2, *NODES))
        save(world, "a", 19, generation=3, from_step=18)
    assert warned_of_lost_steps(world) == []


def test_another_master_knows_from_the_journal_what_its_first_generation_has_lost():
    world = saved_to_18()
    lose(world, "a", "b")
    world.succeed()
    world.come("c")
    save(world, "c", 7, generation=1, from_step=0)
    run_again(world, 3, "c")
    save(world, "c", 8, generation=3, from_step=7, num_ranks=2, world_size=2)
    assert warned_of_lost_steps(world) == [
        "steps 8 to 18, which were saved, are computed again: generation 3 continues after step 7"
    ]


def bad(rank: int, *, generation: int, step: int = 12, ranks: tuple[int, ...] = (), redoes: bool = True) -> RankFailed:
    losses = tuple((each, "nan") for each in ranks or (rank,))
    told = BadLosses(step=step, start="s1-x", is_redone=redoes, losses=losses)
    error = replace(failed().error or RankError(message=""), bad=told)
    return replace(failed(rank, generation=generation), error=error)


def all_ready(world: World, generation: int, *nodes: str) -> list[str]:
    """Have nodes report that no rank is left; returns the nodes of the next generation, in their order."""
    for node in nodes:
        world.ready(node, generation)
    return [each.node for each in world.entries(GenerationFormed)[-1].nodes]


def test_a_step_with_a_bad_loss_is_computed_with_each_rank_on_another_node_and_a_good_one_names_the_first():
    world = World(max_restarts=9)
    world.begin(*NODES)
    world.say("b", bad(3, generation=1))
    assert all_ready(world, 1, *NODES) == ["b", "c", "a"]
    state = ScriptState(number=2, step=11, start="s2-20260101-000002")
    for step in (11, 12):
        assert world.entries(StepRecomputed) == []
        parts = tuple(
            HeldPart(state=replace(state, step=step), rank=rank, world_size=6, is_sharded=False) for rank in range(6)
        )
        world.say("a", StatesHeld(parts=parts))
    (named,) = world.entries(StepRecomputed)
    assert (named.step, named.nodes, named.is_sure) == (12, ("b",), True)


@pytest.mark.parametrize(
    ("again", "left_out"),
    [(2, False), (0, True)],
    ids=["the-same-rank-on-another-node", "another-rank-on-the-same-node"],
)
def test_a_step_that_is_bad_again_is_the_data_s_fault_or_a_node_s_which_is_left_out(again, left_out):
    """Node b has ranks 2 and 3 at first, then 0 and 1."""
    world = World(max_restarts=9)
    world.begin(*NODES)
    world.say("b", bad(2, generation=1))
    assert all_ready(world, 1, *NODES) == ["b", "c", "a"]
    world.say("c" if again == 2 else "b", bad(again, generation=2))
    assert [lost.node for lost in world.entries(NodeLost)] == (["b"] if left_out else [])
    assert [named.nodes for named in world.entries(StepRecomputed)] == ([("b",)] if left_out else [])
    if left_out:
        assert set(all_ready(world, 2, "a", "c")) == {"a", "c"}
    else:
        all_ready(world, 2, *NODES)
        assert "its data is at fault" in world.end.reason
        assert world.end.exit_code == ExitCode.FAILED


def test_a_bad_loss_that_all_have_names_nobody_and_one_that_is_to_stop_the_run_does():
    world = World(max_restarts=9)
    world.begin(*NODES)
    world.say("b", bad(3, generation=1, ranks=tuple(range(6))))
    all_ready(world, 1, *NODES)
    world.say("b", bad(3, generation=2, ranks=tuple(range(6))))
    all_ready(world, 2, *NODES)
    assert "its data is at fault" in world.end.reason
    assert world.entries(StepRecomputed) == []
    world = World(max_restarts=9)
    world.begin(*NODES)
    world.say("b", bad(3, generation=1, redoes=False))
    all_ready(world, 1, *NODES)
    assert "on_bad_step is 'stop'" in world.end.reason
