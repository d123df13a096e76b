"""The accounts of a modelled run: time by activity, steps, and the summary of the run."""

from __future__ import annotations

from collections import defaultdict

from oobleck.control.journal import RecoverySummary, StepTime, Summary, TimeSplit
from oobleck.sim.costs import Activity, Outcome, Stretch

_STATES = {
    Activity.STARTING: "starting_s",
    Activity.TRAINING: "useful_s",
    Activity.REDOING: "redone_s",
    Activity.RECOVERING: "reconfiguring_s",
    Activity.CHECKPOINT: "checkpoint_s",
    Activity.IDLE: "idle_s",
}


class Ledger:
    """The accounts of one run. Steps may be fractions: a mean over many."""

    def __init__(self, *, batch_size: int, tokens_per_sample: int) -> None:
        self._batch_size = batch_size
        self._tokens_per_sample = tokens_per_sample
        self._seconds: dict[Activity, float] = defaultdict(float)
        self._stretches: list[Stretch] = []
        self._recoveries: list[RecoverySummary] = []
        self._step_times: list[tuple[float, float]] = []
        self._made: list[tuple[float, float]] = []  # (steps, seconds) of training that is not lost, the latest last
        self.now_s = 0.0
        self.steps = 0.0
        self.steps_lost = 0.0

    def spend(self, until_s: float, activity: Activity) -> None:
        if until_s > self.now_s:
            self._seconds[activity] += until_s - self.now_s
            self._stretches.append(Stretch(start_s=self.now_s, stop_s=until_s, activity=activity))
            self.now_s = until_s

    def train(self, until_s: float, *, steps: float, step_s: float, checkpoint_s: float) -> None:
        """Let time pass in which `steps` are made, `checkpoint_s` of it for checkpoints."""
        length_s = until_s - self.now_s
        if length_s <= 0:
            return
        self._seconds[Activity.TRAINING] += length_s - checkpoint_s
        self._seconds[Activity.CHECKPOINT] += checkpoint_s
        rate = self._batch_size / step_s
        self._stretches.append(
            Stretch(start_s=self.now_s, stop_s=until_s, activity=Activity.TRAINING, samples_per_s=rate)
        )
        self._step_times.append((step_s, steps))
        self._made.append((steps, length_s - checkpoint_s))
        self.steps += steps
        self.now_s = until_s

    def lose(self, steps: float) -> None:
        """Lose the latest steps, which are made again: their time counts as redone."""
        self.steps -= steps
        self.steps_lost += steps
        spent_s = 0.0
        while steps > 0 and self._made:  # the steps may have been made at several speeds
            made, took_s = self._made.pop()
            if made > steps:
                share_s = took_s * steps / made
                self._made.append((made - steps, took_s - share_s))
                took_s = share_s
            spent_s += took_s
            steps -= made
        self._seconds[Activity.TRAINING] -= spent_s
        self._seconds[Activity.REDOING] += spent_s

    def recovered(
        self, *, began_s: float, nodes: tuple[str, ...], action: str, stall_s: float, cause: str = "connection_lost"
    ) -> None:
        self._recoveries.append(
            RecoverySummary(
                t_s=began_s,
                cause=cause,
                nodes=nodes,
                action=action,
                detect_s=0.0,
                decide_s=0.0,
                transfer_s=0.0,
                stall_s=stall_s,
                bytes_moved=0,
                microbatches_redone=0,
            )
        )

    def outcome(self, *, policy: str, about: str, seed: int, max_steps: int) -> Outcome:
        # Differences of floats may end just below 0.
        split = TimeSplit(**{_STATES[activity]: max(0.0, spent) for activity, spent in self._seconds.items()})
        samples = round(self.steps * self._batch_size)
        trained_s = self.now_s - split.starting_s
        summary = Summary(
            tag=policy,
            exit_code=0,
            reason=f"the trace ends after {int(self.steps)} steps",
            max_steps=max_steps,
            steps_committed=int(self.steps),
            samples_committed=samples,
            steps_lost=round(self.steps_lost),
            samples_repeated=0,
            samples_missing=0,
            losses=(),
            tokens_per_s=samples * self._tokens_per_sample / trained_s if trained_s > 0 else None,
            step_time_s=_step_time(self._step_times),
            goodput=split.goodput,
            downtime_s=split.downtime_s,
            elapsed_s=self.now_s,
            generations=1 + len(self._recoveries),
            recoveries=tuple(self._recoveries),
            seed=seed,
            plan=None,
        )
        return Outcome(policy=policy, about=about, summary=summary, stretches=tuple(self._stretches))


def _step_time(times: list[tuple[float, float]]) -> StepTime | None:
    ordered = sorted(pair for pair in times if pair[1] > 0)
    total = sum(count for _, count in ordered)
    if not total:
        return None

    def quantile(share: float) -> float:
        below = 0.0
        for step_s, count in ordered:
            below += count
            if below >= share * total:
                return step_s
        return ordered[-1][0]

    return StepTime(median=quantile(0.5), p95=quantile(0.95))
