"""What a worker says of itself while its training thread does something else: at a fence, and when it is late.

All of this runs on the control thread, or on threads of its own where it takes longer than a message.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from oobleck.control import protocol
from oobleck.control.steps import CommitState
from oobleck.planner import WorkerId
from oobleck.training import comm
from oobleck.training.worker_log import WorkerLog

_STACK_LINES = 20
_LOOK_S = 0.02
_BUSY_SHARE = 0.1
"""A process that uses at least this share of a core is computing."""


@dataclass(frozen=True, slots=True)
class Standing:
    worker_id: WorkerId
    commit_state: CommitState
    waiter: comm.Waiter
    groups: comm.GroupTable
    links: comm.PeerLinks
    _: KW_ONLY
    training_thread: int
    log: WorkerLog
    send: Callable[[protocol.WorkerMessage], None]

    def answer(self, fence: protocol.Fence) -> None:
        """Answer a fence, and end what it stops on the GPU."""
        if fence.probe_addresses:
            self._explain(fence)
            return
        # First: an abort may take long, and a worker that does not answer is taken for lost.
        self.send(self._fenced(fence))
        self._end_work()

    def report(self, asked: protocol.AskActivity) -> None:
        """Report what the training thread is doing, once it progresses or patience ends."""
        asked_s, mark, done = time.monotonic(), self.waiter.mark, self.commit_state.microbatches_done

        def answer() -> None:
            self._await_progress(mark, done, asked_s + asked.patience_s)
            activity = protocol.Activity(
                device=self.worker_id.device,
                inquiry=asked.inquiry,
                microbatches_done=self.commit_state.microbatches_done,
                waits_for=self.waiter.waits_for,
                has_come_on=self._has_progressed(mark, done),
            )
            self.log.info("is late; waits for %s", ", ".join(map(str, activity.waits_for)) or "no other worker")
            self.send(activity)

        threading.Thread(target=answer, daemon=True, name="activity").start()

    def _fenced(self, fence: protocol.Fence) -> protocol.Status:
        # First: from here on, nothing of an earlier generation is applied, and it is known whether the pipeline stops.
        status = self.commit_state.answer(fence)
        self.links.forget(fence.lost)
        self.log.info(
            "is fenced by generation %d%s: has applied step %d, %s, %d microbatches done%s",
            fence.generation,
            f", without {', '.join(fence.lost)}" if fence.lost else "",
            status.applied,
            "holds no sums" if status.reduced is None else f"holds the sums of step {status.reduced}",
            status.microbatches_done,
            "; its part of the step is broken" if status.broken else "",
        )
        return status

    def _end_work(self) -> None:
        self.groups.abort_fenced(is_pipeline_stopped=self.commit_state.is_pipeline_stopped())

    def _explain(self, fence: protocol.Fence) -> None:
        """Answer a fence that asks why no step is committed."""
        # Before the fence, which ends the training thread's wait.
        asked_s, used_s, mark = time.monotonic(), time.process_time(), self.waiter.mark
        waits_for, stack = self.waiter.waits_for, self._stack()
        status = self._fenced(fence)
        self._end_work()  # before the answer, which tells whether the training thread goes on after it
        self.links.renew()  # before the answer, so that the next plan is formed over links that are new at both ends
        self.log.warning("is held up; waits for %s", ", ".join(map(str, waits_for)) or "no other worker")

        def answer() -> None:
            others = [each for each in fence.probe_addresses if each.worker_id != self.worker_id]
            unreachable = comm.probe_all(others)
            # A worker that waits for another is not the cause, so its answer need not wait until patience ends.
            if not waits_for:
                self._await_progress(mark, status.microbatches_done, asked_s + fence.patience_s)
            is_busy = time.process_time() - used_s >= _BUSY_SHARE * (time.monotonic() - asked_s)
            # CPU time is no progress of a worker that waits, as it may be polling.
            comes_on = self._has_progressed(mark, status.microbatches_done) or (is_busy and not waits_for)
            self.log.info("has %sprogressed since", "" if comes_on else "not ")
            found = replace(status, waits_for=waits_for, has_come_on=comes_on)
            self.send(replace(found, unreachable=unreachable, stack=stack))

        # Probing peers and waiting for progress take seconds, in which the control thread has other messages to handle.
        threading.Thread(target=answer, daemon=True, name="explain").start()

    def _await_progress(self, mark: comm.Mark, microbatches_done: int, until_s: float) -> None:
        while not self._has_progressed(mark, microbatches_done) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _has_progressed(self, mark: comm.Mark, microbatches_done: int) -> bool:
        return self.waiter.has_come_on(mark) or self.commit_state.microbatches_done != microbatches_done

    def _stack(self) -> str:
        # The innermost calls are the last lines.
        frame = sys._current_frames().get(self.training_thread)
        return "".join(traceback.format_stack(frame)[-_STACK_LINES:]) if frame is not None else ""
