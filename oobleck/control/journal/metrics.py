"""A run in numbers, for monitoring: one sample a step, or whenever one is asked for. Pure.

`prometheus_text` writes a sample in Prometheus' text format (version 0.0.4). prometheus-client is not used: it would
save fifteen lines, and `--metrics` would need it installed. Its server knows no UNIX sockets and runs in its own
threads. The tests read the text with its parser.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from oobleck.control.protocol import CommitRecord
from oobleck.job import DEFAULT_KIND
from oobleck.planner import profile_from_json
from oobleck.planner.profiles import Profile, sheet_of_product

from .entries import JournalEntry
from .goodput import TimeAccount
from .node_entries import NodeAdded
from .plan_entries import PlanAdopted, RecoveryDone
from .run_entries import JobStarted, ProfileKnown
from .step_entries import StepDone, StepsDone

_FLOPS_PER_PARAMETER, _FLOPS_PER_FROZEN = 6, 4
"""Operations of a token's forward and backward pass: a multiplication and an addition, three times, or twice where the
parameter has no gradient. Attention is left out."""
_PARAMETER_BYTES = {"float64": 8}
_HALF_PRECISION = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """A run at one moment; None for values that are not known yet, or not finite."""

    t_s: float
    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    step_time_s: float | None
    """The newest step's, like the next two."""
    tokens_per_s: float | None
    mfu: float | None
    """Useful floating-point operations over the devices' peak, 0 to 1; None without a data sheet of each device."""
    tokens: int
    goodput: float
    """Useful over elapsed time; the next two, its parts, sum to the elapsed time."""
    useful_s: float
    downtime_s: Mapping[str, float] = field(default_factory=dict)
    """Keyed by state."""
    nodes: int
    pipelines: int
    generation: int
    recoveries: int
    steps_lost: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Metrics:
    """Follows a journal, O(1) an entry but for plans and profiles.

    A value on the wire, which lacks the job, the profiles and the newest plan: `learn` those entries again.
    """

    _account: TimeAccount = field(default_factory=TimeAccount)
    _record: CommitRecord | None = None
    _step_tokens: int = 0
    _tokens: int = 0
    _recoveries: int = 0
    _steps_lost: int = 0
    _added: dict[str, str] = field(default_factory=dict)
    """The kinds of nodes that have joined."""
    _num_nodes: int = field(default=0, init=False)
    _num_pipelines: int = field(default=0, init=False)
    _generation: int = field(default=0, init=False)
    _dtype: str = field(default="float32", init=False)
    _profiles: dict[str, Profile] = field(default_factory=dict, init=False)
    _kind_of: dict[str, str] = field(default_factory=dict, init=False)
    _kinds: Counter[str] = field(default_factory=Counter, init=False)
    """How many devices of each kind train."""

    def apply(self, entry: JournalEntry) -> None:
        self._account.apply(entry)
        match entry:
            case JobStarted() | ProfileKnown() | PlanAdopted():
                self.learn(entry)
            case NodeAdded(node=spec):
                self._added[spec.name] = spec.kind
            case StepDone():
                self._record, self._step_tokens = entry.record, entry.tokens
                self._tokens += entry.tokens
            case StepsDone():
                self._record, self._step_tokens = entry.record, entry.tokens_per_step
                self._tokens += entry.tokens_per_step * entry.num_steps
            case RecoveryDone():
                self._recoveries += 1
                self._steps_lost += entry.steps_lost
            case _:
                pass

    def learn(self, entry: JobStarted | ProfileKnown | PlanAdopted) -> None:
        """Take in an entry's job, profile or plan, but not that time has passed."""
        match entry:
            case JobStarted():
                self._dtype = entry.job.dtype
                self._kind_of = {spec.name: spec.kind for spec in entry.nodes}
            case ProfileKnown():
                self._profiles[entry.kind] = profile_from_json(entry.profile_json)
            case PlanAdopted(plan=plan):
                self._num_nodes, self._num_pipelines = len(plan.nodes), len(plan.pipelines)
                worker_ids = {each for one in plan.pipelines for stage in one.stages for each in stage.worker_ids}
                self._generation = entry.generation
                kind_of = {**self._kind_of, **self._added}
                self._kinds = Counter(kind_of.get(worker_id.node, DEFAULT_KIND) for worker_id in worker_ids)

    def sample(self, now_s: float) -> MetricSample:
        record, split = self._record, self._account.at(now_s)
        worked_s = record.duration_s if record and record.duration_s > 0 else None
        rate = self._step_tokens / worked_s if worked_s else None
        return MetricSample(
            t_s=now_s,
            step=record.step if record else 0,
            loss=_finite(record.loss) if record else None,
            grad_norm=_finite(record.grad_norm) if record else None,
            learning_rate=_finite(record.learning_rate) if record else None,
            step_time_s=worked_s,
            tokens_per_s=rate,
            mfu=self._utilisation(rate),
            tokens=self._tokens,
            goodput=split.goodput,
            useful_s=split.useful_s,
            downtime_s=split.downtime_s,
            nodes=self._num_nodes,
            pipelines=self._num_pipelines,
            generation=self._generation,
            recoveries=self._recoveries,
            steps_lost=self._steps_lost,
        )

    def _utilisation(self, tokens_per_s: float | None) -> float | None:
        if tokens_per_s is None or not self._kinds or not self._kinds.keys() <= self._profiles.keys():
            return None
        # The profiles of all kinds count the same model, so any of them gives its operations.
        profiles = [self._profiles[kind] for kind in self._kinds]
        sheets = [sheet_of_product(profile.device.name) for profile in profiles]  # a CPU's peak depends on its cores
        # The embedding, which comes first, is looked up and not multiplied.
        layers, parameter_bytes = profiles[0].layers[1:], _PARAMETER_BYTES.get(self._dtype, 4)
        flops = sum(
            _FLOPS_PER_PARAMETER * layer.trained_bytes + _FLOPS_PER_FROZEN * layer.frozen_bytes for layer in layers
        )
        # Without a data sheet of every device, a peak would be too low, and the utilisation too high.
        peak = 0.0
        for sheet, count in zip(sheets, self._kinds.values(), strict=True):
            if sheet is None:
                return None
            peak += count * (sheet.bfloat16_flops if self._dtype in _HALF_PRECISION else sheet.float32_flops)
        return flops / parameter_bytes * tokens_per_s / peak


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_HELP = {
    "step": ("counter", "Committed optimizer steps."),
    "tokens": ("counter", "Tokens of committed steps."),
    "loss": ("gauge", "Loss of the newest step."),
    "grad_norm": ("gauge", "Global gradient norm of the newest step."),
    "learning_rate": ("gauge", "Learning rate of the newest step."),
    "step_time_s": ("gauge", "Seconds that the newest step took."),
    "tokens_per_s": ("gauge", "Tokens a second in the newest step."),
    "mfu": ("gauge", "Useful floating-point operations over the peak of the devices, 0 to 1."),
    "goodput": ("gauge", "Useful over elapsed time, 0 to 1."),
    "nodes": ("gauge", "Nodes that train."),
    "pipelines": ("gauge", "Pipelines of the current plan."),
    "generation": ("gauge", "Version of membership and plan."),
    "recoveries": ("counter", "Changes of the plan: nodes lost, joined or drained."),
    "steps_lost": ("counter", "Committed steps that had to be run again."),
}
_NAMES = {"step_time_s": "step_time_seconds", "tokens_per_s": "tokens_per_second"}


def prometheus_text(sample: MetricSample, tag: str) -> str:
    """Write a sample in Prometheus' text format, without the values that are not known."""
    return "".join(f"{line}\n" for line in _prometheus_lines(sample, tag))


def _prometheus_lines(sample: MetricSample, tag: str) -> Iterator[str]:
    label = f'run="{tag}"'  # a tag needs no escapes: it has letters, digits and ._- only
    values = sample.to_dict()
    for key, (kind, text) in _HELP.items():
        value = values[key]
        if value is None:
            continue
        name = f"oobleck_{_NAMES.get(key, key)}{'_total' if kind == 'counter' else ''}"
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        yield f"{name}{{{label}}} {value}"
    yield "# HELP oobleck_time_seconds_total Elapsed time by what it went into; the parts sum to the whole."
    yield "# TYPE oobleck_time_seconds_total counter"
    for state, seconds in {"useful": sample.useful_s, **sample.downtime_s}.items():
        yield f'oobleck_time_seconds_total{{{label},state="{state}"}} {seconds}'


def metric_rows(entries: Iterable[JournalEntry]) -> list[dict[str, object]]:
    """Return the sample of each committed step, with a column for each part of the downtime: O(entries)."""
    metrics, rows = Metrics(), []
    for entry in entries:
        metrics.apply(entry)
        if isinstance(entry, StepDone):
            sample = metrics.sample(entry.t_s)
            row = sample.to_dict()
            del row["downtime_s"]
            rows.append(row | {f"downtime_{state}_s": seconds for state, seconds in sample.downtime_s.items()})
    return rows
