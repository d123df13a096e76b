"""Failure traces drawn from a seed: losses of one or several nodes, repairs, slow nodes, and notices."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from oobleck.errors import ConfigError, shown
from oobleck.job import MAX_NODES
from oobleck.job.bounds import MAX_SECONDS

from .events import Joined, Lost, Noticed, Slowed, TraceEvent
from .trace import MAX_EVENTS, Trace

_DAY_S = 86_400.0
_MAX_WEIGHT = 1e9
_HOUR_S = 3600.0

# AWS P3 spot instances were preempted in these numbers at once, so often (the SOSP'23 artifact's trace).
_SPOT_BATCHES: Mapping[int, float] = {1: 39, 2: 13, 3: 15, 4: 7, 5: 1, 6: 4}
# 3 to 5 % of hardware failures coincide with others.
_TOGETHER: Mapping[int, float] = {1: 96, 2: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailSlow:
    rate_per_node_hour: float
    mean_duration_s: float
    least_factor: float
    most_factor: float

    def __post_init__(self) -> None:
        _require(0 <= self.rate_per_node_hour <= 1e6, "rate_per_node_hour", self.rate_per_node_hour, "0 to 1e6")
        _require(0 < self.mean_duration_s <= MAX_SECONDS, "mean_duration_s", self.mean_duration_s, "above 0")
        _require(1 <= self.least_factor <= self.most_factor, "least_factor", self.least_factor, "1 to most_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    mean_lifetime_s: float
    """For one node."""
    shape: float = 1.0
    """The shape of the Weibull distribution of lifetimes."""
    batches: Mapping[int, float]
    """Weights of the numbers of nodes lost at once; nodes of one loss are neighbours by number."""
    domain_share: float = 0.0
    """The share of losses that take all present nodes of a failure domain, where nodes have one; they return together.
    Other losses take nodes of one domain, too."""
    repairs: tuple[tuple[float, float], ...] = ()
    """Growing quantiles of the time until a node returns: (share of repairs, seconds). Empty: no node returns."""
    fail_slow: FailSlow | None = None
    notice_s: float | None = None
    """The time from the provider's notice to a loss; None for no notice."""
    source: str = ""

    def __post_init__(self) -> None:
        mean_s = self.mean_lifetime_s
        _require(math.isfinite(mean_s) and mean_s > 0, "mean_lifetime_s", mean_s, "above 0")
        _require(0.1 <= self.shape <= 10, "shape", self.shape, "0.1 to 10")
        sizes_fit = bool(self.batches) and min(self.batches) >= 1 and max(self.batches) <= MAX_NODES
        _require(sizes_fit, "batches", dict(self.batches), f"sizes from 1 to {MAX_NODES:,}")
        weights_fit = all(0 < weight <= _MAX_WEIGHT for weight in self.batches.values())
        _require(weights_fit, "batches", dict(self.batches), f"sizes with weights above 0, {_MAX_WEIGHT:,.0f} at most")
        _require(0 <= self.domain_share <= 1, "domain_share", self.domain_share, "0 to 1")
        notice_fits = self.notice_s is None or 0 <= self.notice_s <= MAX_SECONDS
        _require(notice_fits, "notice_s", self.notice_s, f"0 to {MAX_SECONDS:,.0f}")
        _require(all(seconds > 0 for _, seconds in self.repairs), "repairs", self.repairs, "seconds above 0")

    @property
    def mean_batch(self) -> float:
        return math.fsum(size * weight for size, weight in self.batches.items()) / math.fsum(self.batches.values())


def _require(condition: bool, name: str, value: object, expectation: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {shown(value)}; it must be {expectation}")


# Mean hours of absence are absent nodes over losses an hour (Little's law), in the SOSP'23 artifact's traces.
_AWAY_H = {"p3": 0.54, "g4dn": 1.6, "gcp": 1.1}
# InfiniteHBD's trace (SIGCOMM 2025) has 584 faults of 400 servers in 348 days.
_HARDWARE_REPAIRS = tuple(
    (share, hours * _HOUR_S)
    for share, hours in ((0.1, 0.23), (0.25, 2.05), (0.5, 20.4), (0.75, 76.0), (0.9, 312.0), (0.99, 1748.0))
)


def _hardware(per_thousand_node_days: float, source: str) -> FailureModel:
    mean_s = 1000 * _DAY_S / per_thousand_node_days
    return FailureModel(mean_lifetime_s=mean_s, batches=_TOGETHER, repairs=_HARDWARE_REPAIRS, source=source)


def _spot(per_node_hour: float, mean_away_h: float, source: str) -> FailureModel:
    # Only the mean of the absence is known: these are three quantiles of an exponential distribution with it.
    away = tuple((share, -math.log(1 - share) * mean_away_h * _HOUR_S) for share in (0.1, 0.5, 0.9))
    mean_s = _HOUR_S / per_node_hour
    return FailureModel(mean_lifetime_s=mean_s, batches=_SPOT_BATCHES, repairs=away, source=source)


PRESETS: Mapping[str, FailureModel] = {
    "llama3": _hardware(3.79, "Llama 3 pretraining: 419 unexpected interruptions of 2,048 8-GPU nodes in 54 days"),
    "rsc1": _hardware(6.50, "Meta RSC-1: 6.50 failures in 1,000 node-days"),
    "rsc2": _hardware(2.34, "Meta RSC-2: 2.34 failures in 1,000 node-days"),
    "infinitehbd": _hardware(4.2, "InfiniteHBD, SIGCOMM 2025: 4.2 faults in 1,000 node-days"),
    "byterobust": _hardware(1.6, "ByteRobust: about 1.6 failures in 1,000 node-days"),
    "spot-p3": _spot(0.61, _AWAY_H["p3"], "AWS P3 spot instances: 0.61 preemptions in a node-hour"),
    "spot-g4dn": _spot(0.55, _AWAY_H["g4dn"], "AWS g4dn spot instances: 0.55 preemptions in a node-hour"),
    "spot-gcp": _spot(0.31, _AWAY_H["gcp"], "GCP a2-highgpu-1g spot instances: 0.31 preemptions in a node-hour"),
}


def generate(
    model: FailureModel, *, num_nodes: int, duration_s: float, seed: int, domains: Sequence[str] = ()
) -> Trace:
    """Draw a trace: O(events · log(nodes)). The same arguments give the same trace, everywhere.

    `domains` has the failure domain of each node, empty for one by itself.
    """
    return _Generator(model, num_nodes, duration_s, seed, domains).trace()


class _Generator:
    def __init__(
        self, model: FailureModel, num_nodes: int, duration_s: float, seed: int, domains: Sequence[str]
    ) -> None:
        _require(1 <= num_nodes <= MAX_NODES, "nodes", num_nodes, f"from 1 to {MAX_NODES:,}")
        _require(0 < duration_s <= MAX_SECONDS, "duration_s", duration_s, f"above 0, and at most {MAX_SECONDS:,.0f}")
        if model.repairs:  # at least about as many events as with the slowest repairs
            cycle_s = model.mean_lifetime_s + model.repairs[-1][1]
            if 2 * num_nodes * duration_s / cycle_s > MAX_EVENTS:
                raise _too_many(duration_s)
        self._model = model
        self._duration_s = duration_s
        self._seed = seed
        self._rng = random.Random(seed)
        self._nodes = tuple(f"node{number}" for number in range(num_nodes))
        self._lives = [0] * num_nodes
        self._here = list(range(num_nodes))  # the numbers of present nodes, sorted
        self._queue: list[tuple[float, int, str, int, int]] = []
        self._events: list[TraceEvent] = []
        _require(not domains or len(domains) == num_nodes, "domains", len(domains), "one for each node")
        self._domains = domains
        # How many nodes a loss takes on average: each node begins fewer by that.
        of_domain = Counter(filter(None, domains))
        mean_domain = sum(of_domain.get(domain, 1) for domain in domains) / num_nodes
        share = model.domain_share if domains else 0.0
        self._mean_batch = model.mean_batch if not share else (1 - share) * model.mean_batch + share * mean_domain

    def trace(self) -> Trace:
        for number in range(len(self._nodes)):
            self._begin_life(number, 0.0)
        while self._queue:
            t_s, _, what, number, life = heapq.heappop(self._queue)
            # A high rate of failures must not fill the memory first.
            if len(self._events) > MAX_EVENTS:
                raise _too_many(t_s)
            # Other nodes' failures may have ended the life that this belongs to.
            if life == self._lives[number]:
                self._happen(t_s, what, number)
        events = tuple(sorted([*self._events, *self._notices()], key=lambda event: event.t_s))
        return Trace(
            duration_s=self._duration_s,
            nodes=self._nodes,
            start=self._nodes,
            events=events,
            domains={node: domain for node, domain in zip(self._nodes, self._domains, strict=False) if domain},
            source=f"{self._model.source or 'generated'}; seed {self._seed}",
        )

    def _at(self, t_s: float, what: str, number: int) -> None:
        if t_s <= self._duration_s:
            heapq.heappush(self._queue, (t_s, len(self._queue) + len(self._events), what, number, self._lives[number]))

    def _begin_life(self, number: int, now_s: float) -> None:
        model = self._model
        mean_s = model.mean_lifetime_s * self._mean_batch
        # Below a shape of 1 failures cluster, as on LANL's systems (0.7 to 0.8; Schroeder and Gibson, DSN 2006).
        scale_s = mean_s / math.gamma(1 + 1 / model.shape)
        self._at(now_s + self._rng.weibullvariate(scale_s, model.shape), "fail", number)
        self._be_slow_later(number, now_s)

    def _be_slow_later(self, number: int, now_s: float) -> None:
        slow = self._model.fail_slow
        if slow is not None and slow.rate_per_node_hour > 0:
            self._at(now_s + self._rng.expovariate(slow.rate_per_node_hour / _HOUR_S), "slow", number)

    def _happen(self, t_s: float, what: str, number: int) -> None:
        match what:
            case "fail":
                self._fail(t_s, number)
            case "join":
                insort(self._here, number)
                self._events.append(Joined(t_s=t_s, node=self._nodes[number]))
                self._begin_life(number, t_s)
            case "slow":
                self._slow_down(t_s, number)
            case "well":
                self._events.append(Slowed(t_s=t_s, node=self._nodes[number], factor=1.0))
                self._be_slow_later(number, t_s)

    def _fail(self, t_s: float, first: int) -> None:
        sizes, weights = list(self._model.batches), list(self._model.batches.values())
        size, repairs, here = self._rng.choices(sizes, weights)[0], self._model.repairs, self._here
        whole_s: float | None = None
        if self._domains:
            own = self._domains[first]
            here = [number for number in here if number == first or (own and self._domains[number] == own)]
            if self._rng.random() < self._model.domain_share:
                size, whole_s = len(here), _draw(self._rng, repairs) if repairs else None
        start = bisect_left(here, first)
        # The node and its next present neighbours, cyclically.
        for number in [*here[start : start + size], *here[: max(0, min(start, start + size - len(here)))]]:
            self._lives[number] += 1
            self._here.pop(bisect_left(self._here, number))
            self._events.append(Lost(t_s=t_s, node=self._nodes[number]))
            if repairs:
                self._at(t_s + (_draw(self._rng, repairs) if whole_s is None else whole_s), "join", number)

    def _slow_down(self, t_s: float, number: int) -> None:
        slow = self._model.fail_slow
        assert slow is not None
        factor = self._rng.uniform(slow.least_factor, slow.most_factor)
        self._events.append(Slowed(t_s=t_s, node=self._nodes[number], factor=factor))
        self._at(t_s + self._rng.expovariate(1 / slow.mean_duration_s), "well", number)

    def _notices(self) -> Iterator[Noticed]:
        """Yield a notice before each loss, by the model's time or since the node joined."""
        if self._model.notice_s is None:
            return
        since = dict.fromkeys(self._nodes, 0.0)
        for event in self._events:
            if isinstance(event, Joined):
                since[event.node] = event.t_s
            elif isinstance(event, Lost):
                noticed_s = max(since[event.node], event.t_s - self._model.notice_s)
                if noticed_s < event.t_s:
                    yield Noticed(t_s=noticed_s, node=event.node, grace_s=event.t_s - noticed_s)


def _too_many(until_s: float) -> ConfigError:
    return ConfigError(
        f"more than {MAX_EVENTS:,} events until {until_s:,.0f} s; ask for a shorter duration, fewer nodes, or fewer "
        "failures"
    )


def _draw(rng: random.Random, quantiles: Sequence[tuple[float, float]]) -> float:
    """Draw from a distribution with known quantiles, log-linear between them and constant outside."""
    share = rng.random()
    index = bisect_right([known for known, _ in quantiles], share)
    if index in (0, len(quantiles)):
        return quantiles[max(0, index - 1)][1]
    (low, low_s), (high, high_s) = quantiles[index - 1], quantiles[index]
    return float(low_s * (high_s / low_s) ** ((share - low) / (high - low)))
