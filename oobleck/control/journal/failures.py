"""What can be at fault in a run, and what a person should do about it: two enums, and the rules between them.

what is known                 who says which failure it is
how a process ended           `failure_of_end`
why a node was lost           `failure_of_loss`
a failure                     `remedy_of`
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from oobleck.control.protocol import ErrorKind, Exited, Killed, Raised, Unseen, WorkerEnd

from . import losses

_CRASHES = frozenset({4, 6, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: what a process brings upon itself."""


class Failure(StrEnum):
    """What was at fault."""

    USER_EXCEPTION = "user_exception"
    JOB_ERROR = "job_error"
    DATA_ERROR = "data_error"
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE = "device"
    KILLED = "killed"
    CRASHED = "crashed"
    EXITED = "exited"
    FORK_SERVER = "fork_server"
    NO_WORKER = "no_worker"
    CONTACT_LOST = "contact_lost"
    FROZEN = "frozen"
    HANG = "hang"
    STUCK = "stuck"
    CUT_OFF = "cut_off"
    PEER = "peer"
    BAD_LOSS = "bad_loss"
    CORRUPTION = "corruption"
    SLOW = "slow"
    UNFIT_NODE = "unfit_node"
    TERMINATION = "termination"
    MASTER_LOST = "master_lost"
    NOT_SAVED = "not_saved"
    JOURNAL_GAP = "journal_gap"
    REQUESTED = "requested"
    JOB_FAILED = "job_failed"


class Remedy(StrEnum):
    """What a person should do now."""

    NOTHING = "nothing"
    NOTHING_HANDED_OVER = "nothing_handed_over"
    NOTHING_CONTINUED = "nothing_continued"
    READ_TRACEBACK = "read_traceback"
    READ_LOG = "read_log"
    READ_STACKS = "read_stacks"
    READ_STACK = "read_stack"
    READ_REASON = "read_reason"
    CORRECT_JOB = "correct_job"
    CORRECT_DATA = "correct_data"
    USE_LESS_MEMORY = "use_less_memory"
    LOOK_AT_DEVICE = "look_at_device"
    LOWER_LEARNING_RATE = "lower_learning_rate"
    LOOK_FOR_OOM_KILLER = "look_for_oom_killer"
    LOOK_FOR_CORE_DUMP = "look_for_core_dump"
    REACH_MACHINE = "reach_machine"
    LOOK_AT_LOAD = "look_at_load"
    CHECK_SPEED = "check_speed"
    CHECK_NETWORK = "check_network"
    CHECK_IF_REPEATED = "check_if_repeated"
    CHECK_REPEATED_NODE = "check_repeated_node"
    """This node was at fault again and again."""
    TEST_MEMORY = "test_memory"
    REPAIR_NODE = "repair_node"
    MAKE_ROOM = "make_room"
    MAKE_ROOM_FOR_JOURNAL = "make_room_for_journal"
    IS_TRIED_AGAIN = "is_tried_again"
    """Nothing: the run tries to get the lost node back."""
    ADD_NODE = "add_node"
    """The lost node is not tried again until the user adds it."""


def failure_of_end(end: WorkerEnd) -> Failure:
    """What ended a worker."""
    match end:
        case Killed(is_out_of_memory=True):
            return Failure.OUT_OF_MEMORY
        case Killed(signal=signal):
            return Failure.CRASHED if signal in _CRASHES else Failure.KILLED
        case Exited() | Unseen():
            return Failure.EXITED
        case Raised(kind=kind):
            return _failure_of_error(kind)
        case _:
            assert_never(end)


def _failure_of_error(kind: ErrorKind) -> Failure:
    match kind:
        case ErrorKind.CODE:
            return Failure.USER_EXCEPTION
        case ErrorKind.MEMORY:
            return Failure.OUT_OF_MEMORY
        case ErrorKind.DEVICE:
            return Failure.DEVICE
        case ErrorKind.PEER:
            return Failure.PEER
        case ErrorKind.DATA:
            return Failure.DATA_ERROR
        case ErrorKind.JOB:
            return Failure.JOB_ERROR
        case _:
            assert_never(kind)


def failure_of_loss(loss: losses.Loss, *, is_requested: bool) -> Failure:
    """What a node was lost by; of one that the user had killed, that is all, if nothing of its own came before."""
    match loss:
        case losses.WorkerEnded(end=end):
            return failure_of_end(end)
        case losses.NoWorkerStarts():
            return Failure.NO_WORKER
        case losses.Silent():
            return Failure.FROZEN
        case losses.AgentLeft():
            return Failure.REQUESTED
        case losses.ConnectionLost() | losses.AgentLost() | losses.NotReading() | losses.ProtocolBroken():
            return Failure.REQUESTED if is_requested else Failure.CONTACT_LOST
        case losses.Unreachable() | losses.Misfit() | losses.Unfit():
            return Failure.REQUESTED if is_requested else Failure.UNFIT_NODE
        case losses.CutOff():
            return Failure.REQUESTED if is_requested else Failure.CUT_OFF
        case _:
            assert_never(loss)


def remedy_of(failure: Failure) -> Remedy:
    """What to do about a failure."""
    match failure:
        case Failure.USER_EXCEPTION:
            return Remedy.READ_TRACEBACK
        case Failure.JOB_ERROR:
            return Remedy.CORRECT_JOB
        case Failure.DATA_ERROR:
            return Remedy.CORRECT_DATA
        case Failure.OUT_OF_MEMORY:
            return Remedy.USE_LESS_MEMORY
        case Failure.DEVICE:
            return Remedy.LOOK_AT_DEVICE
        case Failure.KILLED | Failure.FORK_SERVER:
            return Remedy.LOOK_FOR_OOM_KILLER
        case Failure.CRASHED:
            return Remedy.LOOK_FOR_CORE_DUMP
        case Failure.EXITED | Failure.NO_WORKER:
            return Remedy.READ_LOG
        case Failure.CONTACT_LOST:
            return Remedy.REACH_MACHINE
        case Failure.FROZEN:
            return Remedy.LOOK_AT_LOAD
        case Failure.HANG:
            return Remedy.READ_STACKS
        case Failure.STUCK:
            return Remedy.READ_STACK
        case Failure.CUT_OFF:
            return Remedy.CHECK_NETWORK
        case Failure.PEER:
            return Remedy.CHECK_IF_REPEATED
        case Failure.BAD_LOSS:
            return Remedy.LOWER_LEARNING_RATE
        case Failure.CORRUPTION:
            return Remedy.TEST_MEMORY
        case Failure.SLOW:
            return Remedy.CHECK_SPEED
        case Failure.UNFIT_NODE:
            return Remedy.REPAIR_NODE
        case Failure.TERMINATION:
            return Remedy.NOTHING_HANDED_OVER
        case Failure.MASTER_LOST:
            return Remedy.NOTHING_CONTINUED
        case Failure.NOT_SAVED:
            return Remedy.MAKE_ROOM
        case Failure.JOURNAL_GAP:
            return Remedy.MAKE_ROOM_FOR_JOURNAL
        case Failure.REQUESTED:
            return Remedy.NOTHING
        case Failure.JOB_FAILED:
            return Remedy.READ_REASON
        case _:
            assert_never(failure)
