"""Journals to test with: runs written out by hand, as the master would have kept them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oobleck.control.journal import (
    Action,
    ConnectionLost,
    GenerationCause,
    GenerationEnded,
    GenerationFormed,
    GenerationRuns,
    History,
    HistoryAccount,
    JobEnded,
    JobStarted,
    JournalEntry,
    LossCause,
    NodeConnected,
    NodeLost,
    NodeRanks,
    PlanAdopted,
    PlanCause,
    RecoveryDone,
    RecoveryStarted,
    ScriptStarted,
    StatesProtected,
    StepDone,
    WorkerUp,
)
from oobleck.control.protocol import CommitRecord
from oobleck.control.replay import RunBooks
from oobleck.control.training import ReplayedRun
from oobleck.job import JobSpec, NodeSpec
from oobleck.job.ranks import RanksSpec
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate


def template(num_nodes: int, num_layers: int = 8, devices: int = 1) -> PipelineTemplate:
    """Layers cut as evenly as they go, one stage a node."""
    cuts = [index * num_layers // num_nodes for index in range(num_nodes + 1)]
    return PipelineTemplate(
        stages=tuple(
            StageTemplate(first_layer=cuts[i], stop_layer=cuts[i + 1], node_index=i, num_devices=devices)
            for i in range(num_nodes)
        )
    )


def plan(*pipelines: tuple[str, ...], microbatches: int = 8, num_layers: int = 8, spares=()) -> ExecutionPlan:
    """A plan of these pipelines; the first takes what the even share leaves over."""
    share, rest = divmod(microbatches, len(pipelines)) if pipelines else (0, 0)
    return ExecutionPlan(
        pipelines=tuple(
            Pipeline(template=template(len(nodes), num_layers), nodes=nodes, num_microbatches=share + rest * (i == 0))
            for i, nodes in enumerate(pipelines)
        ),
        spares=spares,
    )


def job_started(nodes: tuple[str, ...], **job) -> JobStarted:
    return JobStarted(
        t_s=0.0,
        version="0.1.0",
        job=JobSpec(**({"max_steps": 120} | job)),
        nodes=tuple(NodeSpec(name=node, host="127.0.0.1") for node in nodes),
        started_at="2026-01-01T00:00:00Z",
    )


def adopted(t_s: float, generation: int, plan: ExecutionPlan, action: Action = Action.START, **fields) -> PlanAdopted:
    return PlanAdopted(
        t_s=t_s,
        generation=generation,
        plan=plan,
        action=action,
        reason=fields.pop("reason", f"{len(plan.pipelines)} pipelines on {len(plan.nodes)} nodes"),
        predicted_step_s=fields.pop("predicted_step_s", 0.25),
        num_layers=8,
        redundant=fields.pop("redundant", len(plan.pipelines) > 1),
        **fields,
    )


def committed(t_s: float, step: int, generation: int = 1, duration_s: float = 0.5, **fields) -> StepDone:
    tokens = fields.pop("tokens", 2048)
    record = CommitRecord(
        step=step,
        generation=generation,
        loss=fields.pop("loss", 8.0 / (1 + step / 50)),
        grad_norm=1.0,
        learning_rate=1e-3,
        num_samples=fields.pop("num_samples", 16),
        samples_repeated=fields.pop("samples_repeated", 0),
        samples_missing=fields.pop("samples_missing", 0),
        duration_s=duration_s,
    )
    assert not fields
    return StepDone(t_s=t_s, record=record, tokens=tokens)


def recovered(t_s: float, generation: int, *nodes: str, stall_s: float = 0.05, **fields) -> RecoveryDone:
    return RecoveryDone(
        t_s=t_s,
        began_s=fields.pop("began_s", t_s),
        generation=generation,
        nodes=nodes,
        cause=(cause := fields.pop("cause", PlanCause.LOSS if nodes else PlanCause.PEER_FAILED)),
        loss=LossCause.CONNECTION_LOST if cause is PlanCause.LOSS else None,
        action=fields.pop("action", Action.REBUILD),
        detect_s=0.01,
        decide_s=0.003,
        transfer_s=0.21,
        stall_s=stall_s,
        bytes_moved=28_000_000,
        layers_moved=2,
        microbatches_redone=4,
        steps_lost=fields.pop("steps_lost", 0),
    )


def run_with_a_loss(
    num_pipelines: int = 2, stages: int = 2, steps: int = 120, lost_at: int = 40, ends: bool = True
) -> Iterator[JournalEntry]:
    """A run whose second pipeline loses its last node in the step after `lost_at`, and goes on."""
    names = tuple(f"node{i}" for i in range(num_pipelines * stages))
    rows = [names[i * stages : (i + 1) * stages] for i in range(num_pipelines)]
    yield job_started(names, max_steps=steps)
    for index, node in enumerate(names):
        yield NodeConnected(t_s=0.5 + index / 100, node=node, agent_pid=1000 + index)
    for index, node in enumerate(names):
        yield WorkerUp(t_s=3.0 + index / 100, node=node, device=0, pid=2000 + index, data_digest="d")
    yield adopted(4.0, 1, plan(*rows, microbatches=8 * num_pipelines))
    now_s, generation, victim = 5.0, 1, rows[1][-1]
    for step in range(1, steps + 1):
        now_s += 0.5
        if step == lost_at + 1:
            yield NodeLost(
                t_s=now_s - 0.3,
                node=victim,
                loss=ConnectionLost(),
                is_tried_again=True,
            )
            yield RecoveryStarted(
                t_s=now_s - 0.3, generation=2, nodes=(victim,), cause=PlanCause.LOSS, loss=LossCause.CONNECTION_LOST
            )
            survivors = rows[1][:-1]
            after = plan(rows[0], *rows[2:], microbatches=8 * num_pipelines, spares=survivors)
            reason = "pipeline 1 cannot go on alone; its microbatches go to the others"
            yield adopted(now_s - 0.28, 2, after, Action.REINSTANTIATE, reason=reason, redundant=num_pipelines > 2)
            generation, now_s = 2, now_s + 0.4
        yield committed(now_s, step, generation, duration_s=0.9 if step == lost_at + 1 else 0.5)
        if step == lost_at + 1:
            yield recovered(now_s, 2, victim, began_s=now_s - 0.7, action=Action.REINSTANTIATE)
    if ends:
        yield JobEnded(t_s=now_s + 0.5, exit_code=0, reason="all steps committed")


def script_with_a_failure() -> tuple[JournalEntry, ...]:
    """A script on two nodes, of which a rank fails once; it still runs."""
    nodes = tuple(NodeRanks(node=f"node{index}", first_rank=2 * index, num_ranks=2) for index in range(2))
    started = ScriptStarted(
        t_s=0.0,
        version="1",
        run=RanksSpec(tag="my-script", entry="script", command=("train.py", "--lr", "1"), directory="/"),
        nodes=tuple(NodeSpec(name=each.node, host=each.node) for each in nodes),
        started_at="2026-01-02T03:04:05+00:00",
    )
    failed = GenerationCause.RANK_FAILED
    return (
        started,
        GenerationFormed(t_s=1.0, generation=1, cause=GenerationCause.START, nodes=nodes, num_failures=0),
        GenerationRuns(t_s=2.0, generation=1, away_s=2.0, is_warm=False),
        StatesProtected(t_s=20.0, newest=9, protected=8, num_missing=0),
        GenerationEnded(t_s=30.0, generation=1, cause=failed),
        GenerationFormed(t_s=30.5, generation=2, cause=failed, nodes=nodes, num_failures=1),
        GenerationRuns(t_s=31.0, generation=2, away_s=1.0, is_warm=True),
    )


def books_of(entries: Iterable[JournalEntry]) -> RunBooks:
    """What a journal comes to."""
    books = RunBooks()
    for entry in entries:
        books.apply(entry)
    return books


def replay_run(entries: Iterable[JournalEntry]) -> ReplayedRun | None:
    """What another master finds of a run; None where it has ended, or never came to train."""
    return books_of(entries).finish()


def history_of(entries: Iterable[JournalEntry]) -> History:
    """The history of a run, up to its last entry."""
    account = HistoryAccount()
    for entry in entries:
        account.apply(entry)
    return account.history()
