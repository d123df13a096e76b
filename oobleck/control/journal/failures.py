"""What can be at fault in a run, and what a person should do about it: two enums whose members have words.

`failure_of_end` finds what ended a process; each `Loss` has its own failure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from oobleck.control.protocol import ErrorKind, Exited, Killed, Raised, Unseen, WorkerEnd

from .entry import Worded

# SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS: a process causes these itself. Any other signal counts as
# one from outside.
_CRASHES = frozenset({4, 5, 6, 7, 8, 11, 31})


class Remedy(Worded):
    """What a person should do now."""

    def text(self, *, node: str, repeated: int) -> str:
        """Return the remedy as a sentence, for a node that was at fault `repeated` times."""
        return self.template.format(node=node, repeated=repeated)

    NOTHING = "nothing", "Nothing to do."
    NOTHING_HANDED_OVER = "nothing_handed_over", "Nothing to do: the node hands its state over before it goes."
    NOTHING_CONTINUED = "nothing_continued", "Nothing to do: training continued meanwhile."
    START_AGAIN = "start_again", "Start the run again by the same command: it continues from what is saved."
    READ_TRACEBACK = "read_traceback", "Read the traceback in the agent's log; the same code will fail again."
    READ_LOG = "read_log", "See the end of the agent's log on that node."
    READ_STACKS = "read_stacks", "See the stacks in the agents' logs; a hang that recurs is a bug in the training code."
    READ_STACK = "read_stack", "See where its training thread was; a hang that recurs is a bug in the training code."
    READ_REASON = "read_reason", "See the reason above."
    CORRECT_JOB = "correct_job", "Change the job as the message says; it must be the same on every node."
    CORRECT_DATA = (
        "correct_data",
        "Correct data.paths, data.shards or their files; all nodes must have the same.",
    )
    USE_LESS_MEMORY = "use_less_memory", "Make microbatch_size smaller, or set recompute."
    LOOK_AT_DEVICE = (
        "look_at_device",
        (
            "Look for the GPU's own error on that node: dmesg -T | grep -i xid. A device-side assert is a mistake "
            "in the model or its data: CUDA_LAUNCH_BLOCKING=1 names the line."
        ),
    )
    LOWER_LEARNING_RATE = "lower_learning_rate", "Lower the learning rate, or begin again from before that step."
    LOOK_FOR_OOM_KILLER = (
        "look_for_oom_killer",
        "If nobody killed it, look for the kernel's out-of-memory killer: dmesg -T | grep -i oom.",
    )
    LOOK_FOR_CORE_DUMP = (
        "look_for_core_dump",
        "Native code crashed: look for a core dump, and compare driver and torch versions.",
    )
    REACH_MACHINE = "reach_machine", "See whether the machine is up and SSH answers."
    LOOK_AT_LOAD = "look_at_load", "See whether the machine swaps, or was suspended."
    CHECK_SPEED = "check_speed", "Look for other work and throttled clocks on it: `oobleck check` measures its speed."
    CHECK_NETWORK = "check_network", "See its network to the others: `oobleck check` names the faulty link or node."
    CHECK_IF_REPEATED = (
        "check_if_repeated",
        "If it recurs, check the network with `oobleck check`; else nothing to do.",
    )
    CHECK_REPEATED_NODE = (
        "check_repeated_node",
        (
            "{node} was at fault {repeated} times within ten minutes: look at it with `oobleck check`; "
            "`oobleck drain {node}` takes it out if it is still in, `oobleck add` brings it back."
        ),
    )
    TEST_MEMORY = "test_memory", "If it recurs, test the machine's memory: the copy was replaced, the cause was not."
    TEST_NODE = "test_node", "Test the node (`oobleck check`): other nodes computed the same step well."
    REPAIR_NODE = "repair_node", "Repair the node: the evidence says what is wrong with it."
    MAKE_ROOM = "make_room", "Free space on that disk, or in shared memory; the next save is tried automatically."
    MAKE_ROOM_FOR_JOURNAL = "make_room_for_journal", "Free disk space for the run: entries in memory are then written."
    IS_TRIED_AGAIN = "is_tried_again", "The node is tried again automatically."
    ADD_NODE = "add_node", "The node is not tried again: `oobleck add {node}` brings it back."


class Failure(StrEnum):
    """What was at fault, in a few words, and its remedy."""

    text: str
    remedy: Remedy

    def __new__(cls, value: str, text: str, remedy: Remedy) -> Failure:
        member = str.__new__(cls, value)
        member._value_, member.text, member.remedy = value, text, remedy
        return member

    USER_EXCEPTION = "user_exception", "an error in the training code", Remedy.READ_TRACEBACK
    JOB_ERROR = "job_error", "the job cannot be run as it is", Remedy.CORRECT_JOB
    DATA_ERROR = "data_error", "data that cannot be used", Remedy.CORRECT_DATA
    OUT_OF_MEMORY = "out_of_memory", "out of memory", Remedy.USE_LESS_MEMORY
    DEVICE = "device", "a device failed", Remedy.LOOK_AT_DEVICE
    KILLED = "killed", "a process was killed from outside", Remedy.LOOK_FOR_OOM_KILLER
    CRASHED = "crashed", "a process crashed", Remedy.LOOK_FOR_CORE_DUMP
    EXITED = "exited", "a process ended", Remedy.READ_LOG
    FORK_SERVER = "fork_server", "the process that starts workers ended", Remedy.LOOK_FOR_OOM_KILLER
    NO_WORKER = "no_worker", "no worker can be started", Remedy.READ_LOG
    CONTACT_LOST = "contact_lost", "contact was lost", Remedy.REACH_MACHINE
    FROZEN = "frozen", "a node stopped answering", Remedy.LOOK_AT_LOAD
    HANG = "hang", "training hung", Remedy.READ_STACKS
    STUCK = "stuck", "a worker holds the others up", Remedy.READ_STACK
    CUT_OFF = "cut_off", "a node does not reach its peers", Remedy.CHECK_NETWORK
    PEER = "peer", "a collective failed", Remedy.CHECK_IF_REPEATED
    BAD_LOSS = "bad_loss", "the loss is not a number", Remedy.LOWER_LEARNING_RATE
    CORRUPTION = "corruption", "a copy of a layer differed", Remedy.TEST_MEMORY
    WRONG_STEP = "wrong_step", "a node computed a step wrongly", Remedy.TEST_NODE
    SLOW = "slow", "a node became slow", Remedy.CHECK_SPEED
    UNFIT_NODE = "unfit_node", "a node cannot take part", Remedy.REPAIR_NODE
    TERMINATION = "termination", "a node is about to be taken away", Remedy.NOTHING_HANDED_OVER
    MASTER_LOST = "master_lost", "the master was lost", Remedy.NOTHING_CONTINUED
    NOT_SAVED = "not_saved", "the state was not saved", Remedy.MAKE_ROOM
    JOURNAL_GAP = "journal_gap", "the journal could not be written", Remedy.MAKE_ROOM_FOR_JOURNAL
    REQUESTED = "requested", "taken out on request", Remedy.NOTHING
    JOB_FAILED = "job_failed", "the job failed", Remedy.READ_REASON


_FAILURE_OF_ERROR = {
    ErrorKind.CODE: Failure.USER_EXCEPTION,
    ErrorKind.MEMORY: Failure.OUT_OF_MEMORY,
    ErrorKind.DEVICE: Failure.DEVICE,
    ErrorKind.PEER: Failure.PEER,
    ErrorKind.DATA: Failure.DATA_ERROR,
    ErrorKind.JOB: Failure.JOB_ERROR,
}


def failure_of_end(end: WorkerEnd) -> Failure:
    match end:
        case Killed(is_out_of_memory=True):
            return Failure.OUT_OF_MEMORY
        case Killed(signal=signal):
            return Failure.CRASHED if signal in _CRASHES else Failure.KILLED
        case Exited() | Unseen():
            return Failure.EXITED
        case Raised(kind=kind):
            return _FAILURE_OF_ERROR[kind]
        case _:
            assert_never(end)
