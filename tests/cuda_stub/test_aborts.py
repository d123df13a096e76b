"""What torch's own locks, watchdog and GIL manners do to a worker whose peers are lost."""

from __future__ import annotations

import statistics

from . import roles
from .members import Members

_ABORT_S = 0.3


def test_no_poll_stops_all_threads_while_communicators_are_aborted(members: Members) -> None:
    # A poll that is let in before an abort waits for it with the GIL, and the abort of the other communicator, which it
    # waits for, never begins: frozen for ever.
    rounds = 16
    member = members.start(roles.has_its_groups_aborted, rounds, CUDA_STUB_ABORT_MS=str(round(_ABORT_S * 1e3)))
    stopped_s = [member.hear(within_s=20.0) for _ in range(rounds)]
    # A busy machine stops a process for long now and then, and all rounds stop as long as an abort takes.
    assert statistics.median(stopped_s) < _ABORT_S / 2


def test_posting_after_an_error_takes_no_longer_than_before(members: Members) -> None:
    member = members.start(roles.posts_after_an_error)
    assert member.hear() == "waits"
    members.control.set(0, "links_broken", 1)
    member.say()
    assert member.hear(within_s=15.0) < 5.0
    assert member.hear(within_s=15.0) < 10.0


def test_a_sum_that_fails_ends_beside_one_that_waits(members: Members) -> None:
    """Torch's own wait for the one would abort it, which waits for the other."""
    member = members.start(roles.has_a_sum_fail_beside_another)
    assert member.hear() == "waits"
    members.control.set(0, "links_broken", 1)
    member.say()
    said, after_s = member.hear(within_s=20.0)
    assert said == "DistBackendError"
    assert after_s < 10.0


def test_torch_records_no_operation_and_warns_of_no_variable(members: Members) -> None:
    shell = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "100")
    recorded, printed = members.start(roles.says_what_torch_records, **shell).hear()
    assert recorded == 0
    # Torch names this once in each process; of a failed sum, nothing else says how it has failed.
    assert "deprecated" not in printed.replace("Work::exception API is being deprecated", "")
