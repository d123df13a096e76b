"""Every journal entry, and every value in one that says what happened, as a sentence for people.

Nothing reads these sentences but people: what a decision needs is a field. `incident_sentences` says incidents.
"""

from __future__ import annotations

from typing import assert_never

from oobleck.control.protocol import WorkerEnd, end_text, server_end_text
from oobleck.job import DEFAULT_KIND

from . import losses, node_entries, ranks, run_entries
from .entries import JournalEntry
from .plan_entries import HangExplained, LayersArriving, PlanAdopted, PlanCause, RecoveryDone, RecoveryStarted
from .state_entries import CheckpointSaved, DataPlaced, RecordsDealt, SaveFailed, ShardQuarantined, ShardsKnown
from .step_entries import Evaluated, ReplicasDiffer, StepDone, StepRunsLong, StepsDone


def sentence(entry: JournalEntry) -> str:
    """An entry as one plain sentence, without its time."""
    match entry:
        case (
            run_entries.JobStarted()
            | run_entries.MasterResumed()
            | run_entries.ProfileKnown()
            | run_entries.ScalingDecided()
            | run_entries.JournalGap()
            | run_entries.Notice()
            | run_entries.JobEnded()
        ):
            return _of_the_run(entry)
        case (
            node_entries.NodeConnected()
            | node_entries.WorkerUp()
            | node_entries.WorkerDown()
            | node_entries.NodeLost()
            | node_entries.NodeUnfit()
            | node_entries.TerminationNoticed()
            | node_entries.ForkServerDown()
            | node_entries.NodeLeft()
            | node_entries.NodeAdded()
            | node_entries.PaceChanged()
        ):
            return _of_a_node(entry)
        case PlanAdopted() | HangExplained() | RecoveryStarted() | LayersArriving() | RecoveryDone():
            return _of_a_plan(entry)
        case StepDone() | StepRunsLong() | StepsDone() | Evaluated() | ReplicasDiffer():
            return _of_a_step(entry)
        case CheckpointSaved() | SaveFailed() | ShardsKnown() | DataPlaced() | RecordsDealt() | ShardQuarantined():
            return _of_the_state(entry)
        case (
            ranks.ScriptStarted()
            | ranks.GenerationFormed()
            | ranks.GenerationRuns()
            | ranks.RankDown()
            | ranks.RanksHung()
            | ranks.GenerationEnded()
        ):
            return _of_ranks(entry)
        case _:
            assert_never(entry)


# --- how processes end, and nodes are lost -----------------------------------------------------------------------


def fork_server_text(entry: node_entries.ForkServerDown) -> str:
    """How a node's fork server ended, and whether there is another one."""
    again = "it is started again" if entry.is_restarted else "it is not started again, for it has ended too often"
    return f"{server_end_text(entry.end)}; {again}"


def loss_text(loss: losses.Loss) -> str:
    """Why a node was lost: `not heard of for 3.1 s`."""
    match loss:
        case losses.ConnectionLost():
            return "its connection was lost"
        case losses.AgentLost(had_no_master=had_no_master):
            return "its agent was lost while there was no master" if had_no_master else "its agent is gone"
        case losses.NotReading(num_unread=count):
            return f"took none of {count} messages"
        case losses.ProtocolBroken(problem=problem):
            return f"broke the protocol: {problem}"
        case losses.Silent(silent_s=silent_s, is_worker=is_worker):
            return f"{'its worker did not answer' if is_worker else 'not heard of'} for {silent_s:.1f} s"
        case losses.WorkerEnded(pid=pid, end=end):
            return end_text(end) if loss.is_users else f"worker process {pid} ended: {end_text(end)}"
        case losses.NoWorkerStarts(problem=problem):
            return f"no worker can be started: {problem}"
        case losses.AgentLeft(reason=reason):
            return f"its agent stopped: {reason}"
        case losses.CutOff():
            return "it reaches the master, and its peers do not reach it"
        case losses.Unreachable(problem=problem) | losses.Misfit(problem=problem):
            return problem
        case losses.Unfit(fault=fault):
            return f"faulty: {fault}"
        case _:
            assert_never(loss)


def given_up_text(end: WorkerEnd, *, num_restarts: int) -> str:
    """Why a node's workers are not started again."""
    return f"its worker was started again {num_restarts} times, and ended again: {end_text(end)}"


def error_text(error: run_entries.WorkerError) -> str:
    """The exception that ended a run, with all that is known of it."""
    return f"an error ended the workers; {error.worker_id} said:\n{error.end.traceback or error.end.message}"


# --- entries -----------------------------------------------------------------------------------------------------


def _of_the_run(
    entry: run_entries.JobStarted
    | run_entries.MasterResumed
    | run_entries.ProfileKnown
    | run_entries.ScalingDecided
    | run_entries.JournalGap
    | run_entries.Notice
    | run_entries.JobEnded,
) -> str:
    match entry:
        case run_entries.JobStarted():
            return f"job {entry.job.tag} starts on {len(entry.nodes)} nodes"
        case run_entries.MasterResumed():
            return f"a new master takes over; the one before was last heard {entry.away_s:.1f} s ago"
        case run_entries.ProfileKnown():
            return "the model's profile is known" + (f" on {entry.kind}" if entry.kind != DEFAULT_KIND else "")
        case run_entries.ScalingDecided():
            train = f"{entry.num_nodes} of {entry.num_available} nodes are to train"
            return f"{train} ({entry.policy}): {entry.reason}"
        case run_entries.JournalGap():
            return _gap(entry)
        case run_entries.Notice():
            return entry.text
        case run_entries.JobEnded():
            return entry.reason
        case _:
            assert_never(entry)


def _gap(entry: run_entries.JournalGap) -> str:
    since = f"the journal could not be written from {entry.since_s:.1f} s on: {entry.problem}"
    if entry.until_s is None:
        return f"{since}; what happened since is not in it yet"
    lost = f"{entry.num_lost} entries are missing" if entry.num_lost else "nothing is missing"
    return f"{since}; since {entry.until_s:.1f} s it is: {entry.num_late} entries came late, {lost}"


def _of_a_node(
    entry: node_entries.NodeConnected
    | node_entries.WorkerUp
    | node_entries.WorkerDown
    | node_entries.NodeLost
    | node_entries.NodeUnfit
    | node_entries.TerminationNoticed
    | node_entries.ForkServerDown
    | node_entries.NodeLeft
    | node_entries.NodeAdded
    | node_entries.PaceChanged,
) -> str:
    match entry:
        case node_entries.NodeConnected():
            return f"{entry.node} connected (agent process {entry.agent_pid})"
        case node_entries.WorkerUp():
            return f"{entry.node} device {entry.device} is ready (worker process {entry.pid})"
        case node_entries.WorkerDown(also=()):
            return f"the worker of {entry.node} ended ({end_text(entry.end)}); it is started again"
        case node_entries.WorkerDown():
            return f"a worker of {entry.node} ended ({end_text(entry.end)}); the node's workers are started again"
        case node_entries.NodeLost():
            return f"{entry.node} lost: {loss_text(entry.loss)}"
        case node_entries.NodeUnfit(is_tried_again=True):
            return f"{entry.node}: it is not taken in again: {entry.fault}"
        case node_entries.NodeUnfit():
            way_back = f"once it is repaired, `oobleck add {entry.node}` lets it in"
            return f"{entry.node} is faulty and left out: {entry.fault}; {way_back}"
        case node_entries.TerminationNoticed():
            return f"{entry.node} is to be terminated: {entry.reason}"
        case node_entries.ForkServerDown():
            return f"{entry.node}'s fork server ended: {fork_server_text(entry)}"
        case node_entries.NodeLeft():
            return f"{entry.node} has left"
        case node_entries.NodeAdded():
            return f"{entry.node.name} is added{f' ({entry.node.origin})' if entry.node.origin else ''}"
        case node_entries.PaceChanged():
            slow = f"{entry.factor:.1f} times the usual time"
            return f"{entry.node} takes {slow if entry.factor > 1 else 'the usual time again'}"
        case _:
            assert_never(entry)


def _of_a_plan(entry: PlanAdopted | HangExplained | RecoveryStarted | LayersArriving | RecoveryDone) -> str:
    match entry:
        case PlanAdopted():
            return f"generation {entry.generation}: {entry.reason}"
        case HangExplained(cut_off=(), stuck=()):
            return "no worker is stuck, and no network cut"
        case HangExplained(cut_off=()):
            return f"all wait for {', '.join(map(str, entry.stuck))}"
        case HangExplained():
            return f"the network between {', '.join(entry.cut_off)} and their peers is cut"
        case RecoveryStarted():
            return _recovering(entry.cause, ", ".join(entry.nodes))
        case LayersArriving():
            share = entry.received_bytes / entry.all_bytes
            return f"{entry.node} has received {share:.0%} of the {entry.all_bytes / 1e9:.2f} GB that it needs"
        case RecoveryDone():
            return _recovered(entry)
        case _:
            assert_never(entry)


def _recovering(cause: PlanCause, names: str) -> str:
    match cause:
        case PlanCause.JOINED:
            return f"taking in {names}"
        case PlanCause.DRAINED:
            return f"letting {names} go"
        case PlanCause.SCALED:
            return f"continuing with more nodes, or fewer: {names}"
        case PlanCause.SLOW:
            return f"planning again for the pace of {names}"
        case PlanCause.RETRIED:
            return f"trying again whether {names} is slow"
        case PlanCause.NETWORK:
            return f"asking all nodes again whether they reach each other{f'; {names} lost' if names else ''}"
        case PlanCause.CORRUPTION:
            return f"making the layers of {names} equal to their other copies"
        case (
            PlanCause.LOSS
            | PlanCause.PEER_FAILED
            | PlanCause.HANG
            | PlanCause.MASTER_LOST
            | PlanCause.CHECKPOINT_BROKEN
            | PlanCause.DATA_UNREADABLE
        ):
            return f"recovering from the loss of {names}" if names else "regrouping; no node is lost"
        case _:
            assert_never(cause)


def _recovered(entry: RecoveryDone) -> str:
    names = ", ".join(entry.nodes)
    what = f"{names} {_happened(entry.cause)}" if names else "regrouped"
    if entry.unfinished:
        return f"{what}; this recovery was not completed: {entry.unfinished}"
    copied = f"{entry.layers_moved} layers copied" if entry.layers_moved else "nothing copied"
    lost = "no step lost" if not entry.steps_lost else f"{entry.steps_lost} steps lost"
    return f"{what}; {entry.action.value}; {copied} in {entry.transfer_s:.2f} s; {lost}"


def _happened(cause: PlanCause) -> str:
    """What has happened to the nodes of a recovery."""
    match cause:
        case PlanCause.JOINED:
            return "taken in"
        case PlanCause.DRAINED:
            return "drained"
        case PlanCause.SLOW:
            return "planned for"
        case PlanCause.SCALED:
            return "set aside or taken back"
        case PlanCause.RETRIED:
            return "tried again"
        case PlanCause.CORRUPTION:
            return "repaired"
        case (
            PlanCause.LOSS
            | PlanCause.PEER_FAILED
            | PlanCause.HANG
            | PlanCause.NETWORK
            | PlanCause.MASTER_LOST
            | PlanCause.CHECKPOINT_BROKEN
            | PlanCause.DATA_UNREADABLE
        ):
            return "lost"
        case _:
            assert_never(cause)


def _of_a_step(entry: StepDone | StepRunsLong | StepsDone | Evaluated | ReplicasDiffer) -> str:
    match entry:
        case StepDone(record=record):
            return f"step {record.step} committed: loss {record.loss:.4f}"
        case StepRunsLong():
            return f"still running step {entry.step} after {_while(entry.running_s)}: {_doing(entry)}"
        case StepsDone(record=record):
            return f"steps {entry.first_step} to {record.step} committed, {record.duration_s:.3f} s each"
        case Evaluated():
            return f"evaluation after step {entry.step}: loss {entry.loss:.4f} ({entry.num_samples} samples)"
        case ReplicasDiffer():
            odd, trusted = (", ".join(map(str, worker_ids)) for worker_ids in (entry.odd, entry.trusted))
            text = f"after step {entry.step} layer {entry.layer} on {odd} differs from that on {trusted}"
            if entry.is_sure:
                return f"{text}; {odd} computed or kept it wrongly, and takes it from the others"
            return f"{text}; nobody can tell which is right: {odd} takes it from the others; check all of these nodes"
        case _:
            assert_never(entry)


def _while(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _doing(entry: StepRunsLong) -> str:
    """What a step that runs long waits for: `node2's worker computes microbatch 0`."""
    if not entry.computing:
        return "its workers exchange data"
    first, num_others = entry.computing[0], len(entry.computing) - 1
    what = "computes" if entry.microbatch is None else f"computes microbatch {entry.microbatch}"
    worker = f"{first.node}'s worker{f' {first.device}' if first.device else ''}"
    return f"{worker} {what}{f', and {num_others} more compute' if num_others else ''}"


def _of_the_state(
    entry: CheckpointSaved | SaveFailed | ShardsKnown | DataPlaced | RecordsDealt | ShardQuarantined,
) -> str:
    match entry:
        case CheckpointSaved():
            what = f"checkpoint of step {entry.step}: {entry.size_bytes / 2**20:.1f} MiB"
            return f"{what}; training waited {entry.pause_s:.3f} s, the disk took {entry.duration_s:.1f} s"
        case SaveFailed():
            what = f"step {entry.step} is not saved" if entry.step else "a save has failed"
            newest = f"the newest checkpoint is that of step {entry.newest_step}"
            return f"{what}: {entry.reason}; {'there is none' if entry.newest_step is None else newest}"
        case ShardsKnown():
            return f"the data is in {len(entry.names)} shards"
        case DataPlaced():
            return f"the data continues at record {entry.position.records}"
        case RecordsDealt():
            return f"step {entry.records.step} takes {entry.records.num_records} records"
        case ShardQuarantined():
            return f"{entry.shard} is quarantined, so the data is incomplete: {entry.problem}"
        case _:
            assert_never(entry)


def _of_ranks(
    entry: ranks.ScriptStarted
    | ranks.GenerationFormed
    | ranks.GenerationRuns
    | ranks.RankDown
    | ranks.RanksHung
    | ranks.GenerationEnded,
) -> str:
    match entry:
        case ranks.ScriptStarted():
            return f"{entry.run.kinds} starts on {_counted(len(entry.nodes), 'node')}"
        case ranks.GenerationFormed():
            names = ", ".join(each.node for each in entry.nodes)
            return f"generation {entry.generation}: {_counted(entry.world_size, 'rank')} on {names}"
        case ranks.GenerationRuns():
            how = "warm" if entry.is_warm else "cold: nothing of theirs was imported before"
            return f"generation {entry.generation} runs, {entry.away_s:.2f} s later ({how})"
        case ranks.RankDown():
            return f"rank {entry.rank} on {entry.node} failed: {rank_end_text(entry)}"
        case ranks.RanksHung():
            return f"generation {entry.generation} hangs: {hang_text(entry)}"
        case ranks.GenerationEnded():
            return f"generation {entry.generation} ends: {_why(entry.cause, ', '.join(entry.nodes))}"
        case _:
            assert_never(entry)


def rank_end_text(entry: ranks.RankDown) -> str:
    """How a rank ended: `exit code 1: ValueError: no such column`."""
    said = f": {entry.error.message}" if entry.error is not None and entry.error.message else ""
    return f"{end_text(entry.end)}{said}"


def hang_text(entry: ranks.RanksHung) -> str:
    """Why a generation is taken to hang, and which rank holds the others up."""
    quiet = f"no rank has printed or saved anything for {entry.quiet_s:.0f} s"
    if not entry.culprits:
        return f"{quiet}; none stands out"
    first = entry.culprits[0]
    others = f" and {len(entry.culprits) - 1} more" if len(entry.culprits) > 1 else ""
    where = f" at {first.place}" if first.place else ""
    wait = "1 rank waits" if entry.num_waiting == 1 else f"{entry.num_waiting} ranks wait"
    return f"{quiet}; {wait} for rank {first.rank} on {first.node}{others}{where}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _why(cause: ranks.GenerationCause, names: str) -> str:
    match cause:
        case ranks.GenerationCause.START:
            return "it begins"
        case ranks.GenerationCause.RANK_FAILED:
            return "a rank has failed"
        case ranks.GenerationCause.HANG:
            return "it hangs"
        case ranks.GenerationCause.NODE_LOST:
            return f"{names} lost"
        case ranks.GenerationCause.NODE_JOINED:
            return f"{names} joins"
        case ranks.GenerationCause.NODE_DRAINED:
            return f"{names} leaves"
        case ranks.GenerationCause.STOPPED:
            return "a stop was asked for"
        case ranks.GenerationCause.FINISHED:
            return "all ranks have finished"
        case _:
            assert_never(cause)
