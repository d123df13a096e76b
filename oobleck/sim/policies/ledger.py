"""The accounts of a modelled run: time by activity, steps, and the summary of the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

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

    def add(self, other: Ledger, share: float) -> None:
        """Add another run's times and steps, which count as a share of this run's."""
        for activity, seconds in other._seconds.items():
            self._seconds[activity] += share * seconds
        self._recoveries += other._recoveries
        self._step_times += other._step_times
        self.steps += share * other.steps
        self.steps_lost += share * other.steps_lost

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        return tuple(self._stretches)

    def close(self, stretches: Iterable[Stretch], now_s: float) -> None:
        """Replace what was done over time, and put the recoveries in order."""
        self._stretches, self.now_s = list(stretches), now_s
        self._recoveries.sort(key=lambda recovery: recovery.t_s)


def merged(ledgers: Sequence[Ledger], *, batch_size: int, tokens_per_sample: int) -> Ledger:
    """Return the accounts of runs beside each other, each with an equal part of every step; O(s log s) stretches."""
    whole = Ledger(batch_size=batch_size, tokens_per_sample=tokens_per_sample)
    for ledger in ledgers:
        whole.add(ledger, 1 / len(ledgers))
    changes = sorted(
        (edge_s, sign, stretch.samples_per_s / len(ledgers), stretch.activity)
        for ledger in ledgers
        for stretch in ledger.stretches
        for edge_s, sign in ((stretch.start_s, 1), (stretch.stop_s, -1))
    )
    stretches: list[Stretch] = []
    rate, doing, before_s = 0.0, Counter[Activity](), 0.0
    for edge_s, sign, own_rate, activity in changes:
        if edge_s > before_s:
            busiest = max((each for each in Activity if doing[each]), key=_by_progress)
            stretches.append(Stretch(start_s=before_s, stop_s=edge_s, activity=busiest, samples_per_s=max(0.0, rate)))
            before_s = edge_s
        rate += sign * own_rate
        doing[activity] += sign
    whole.close(stretches, before_s)
    return whole


def _by_progress(activity: Activity) -> bool:
    """Rank activities: runs beside each other train if one of them does."""
    return activity is Activity.TRAINING


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
