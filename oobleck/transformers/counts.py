"""A run's tokens and floating-point operations, counted in the script's process by the batches of each step."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from .kept_state import KeptStates
from .streams import is_stream

if TYPE_CHECKING:
    from .job import TrainerJob

_MOST_S, _MOST_SHARE = 10.0, 0.05
"""For how long batches are read to count floating-point operations: seconds, or a share of the run if that is more."""


class BatchCounts:
    def __init__(self, trainer: Any, job: TrainerJob, states: KeptStates) -> None:
        self._trainer, self._job, self._states = trainer, job, states
        self._began_s = time.monotonic()
        self._counts_tokens = trainer.args.include_num_input_tokens_seen != "no"
        self._counts_flos = not is_stream(trainer.train_dataset)  # which may come over a network
        self._counting_s = 0.0

    def add(self, step: int) -> None:
        """Count a step."""
        trainer = self._trainer
        if not self._counts_tokens and not self._counts_flos:
            return
        began_s = time.monotonic()
        try:
            for inputs in self._job.batches_of(step):
                if self._counts_tokens:
                    trainer._track_num_input_tokens(inputs)
                trainer.current_flos += float(trainer.floating_point_ops(inputs))
            trainer.store_flos()
        # It is the user's code, which workers call for microbatches, and the script has not asked for this count.
        except Exception as error:
            if self._counts_tokens:
                raise
            self._stop(f"{type(error).__name__}: {error}")
        self._counting_s += time.monotonic() - began_s
        if self._counting_s > max(_MOST_S, _MOST_SHARE * (time.monotonic() - self._began_s)):
            self._stop(f"which took {self._counting_s:.0f} s for {step} steps")

    def go_back(self, last_step: int) -> None:
        """Take the counts of a step that is done, which are known if it is one of this run."""
        state = self._trainer.state
        known = self._states.counts_after(last_step)
        state.num_input_tokens_seen, state.total_flos = known or (0, 0)
        for step in range(1, last_step + 1) if known is None and self._counts_tokens else ():
            self.add(step)

    def _stop(self, why: str) -> None:
        if self._counts_flos and not self._counts_tokens:
            self._counts_flos, self._trainer.state.total_flos = False, 0
            sys.stderr.write(f"oobleck: total_flos is 0: to count them, batches are read here, too: {why}\n")
