"""Which of a cluster's nodes are healthy: what to test next, and what the results mean. Pure.

Nodes are first tested alone, against the lower median of all. Then they are paired, and a pair that works proves both
of its nodes, because a fault of either would show. Every other node is a suspect: it is tested again, and with proven
nodes. A suspect that works with one of them is proven too: its partner before, or the link, was at fault. A suspect
that fails with two of them is at fault itself. So the partner of a faulty node is never blamed for it. (Pairs alone, as
in DLRover's check, double the median of a small cluster, or condemn partners.)

    round          who                                  decides
    1  alone       every node                           suspects: failed, or slow against the lower median
    2  pairs       passed nodes, two by two             a pair that works proves two nodes
    3  suspects    alone again, and with a proven node  proven; condemned when twice at fault alone
    4  suspects    with a second proven node            condemned when at fault with both

"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

# More than four rounds are only needed if no pair works at first.
_MAX_ROUNDS = 6

# These vary more between healthy nodes than other measures do, so they may be this many times slower.
_TOLERANCE = {"loopback": 2.0, "disk": 4.0}

_PAIR_TOLERANCE = 1.5


class Health(StrEnum):
    HEALTHY = "healthy"
    SLOW = "slow"
    FAULTY = "faulty"
    UNDECIDED = "undecided"
    """No healthy node is left for a test with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloResult:
    node: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The times of equal work on every node, keyed by measure (compute, memory, loopback, disk)."""
    error: str = ""
    is_final: bool = False
    """Whether no second test would change the error: the node is unreachable, or its software does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """A test of two nodes: the time of an exchange, or why there was none."""

    nodes: tuple[str, str]
    seconds: float | None = None
    error: str = ""

    def __post_init__(self) -> None:
        assert (self.seconds is None) == bool(self.error), self


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRound:
    """Tests to run next: alone first, then pairs. A node may be in several pairs, which run one after the other."""

    solo: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    node: str
    health: Health
    reason: str
    factor: float | None = None
    """How many times slower than the others a slow node is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkVerdict:
    """Two healthy nodes that do not work together."""

    nodes: tuple[str, str]
    reason: str
    factor: float | None = None
    """None if it does not work at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
    nodes: tuple[NodeVerdict, ...]
    links: tuple[LinkVerdict, ...]

    @property
    def is_healthy(self) -> bool:
        return not self.links and all(verdict.health is Health.HEALTHY for verdict in self.nodes)


class NodeCheck:
    """Takes results in, and returns what to test next and the verdict. A round costs O(nodes · pairs tested)."""

    def __init__(
        self, nodes: Sequence[str], *, slow_factor: float = 1.5, device_of: Mapping[str, str] | None = None
    ) -> None:
        """A node is slow from `slow_factor` times the lower median on.

        `device_of` names the devices of nodes, where there are several kinds: times alone are compared only with nodes
        that have the same devices.
        """
        assert slow_factor > 1
        assert len(set(nodes)) == len(nodes)
        self._nodes = tuple(nodes)
        self._slow_factor = slow_factor
        self._solo: defaultdict[str, list[SoloResult]] = defaultdict(list)
        self._pairs: defaultdict[tuple[str, str], list[PairResult]] = defaultdict(list)
        self._device_of = device_of or {}
        self._solo_median_s: dict[str, dict[str, float]] = {}
        """Keyed by device and by measure."""
        self._pair_median_s: float | None = None
        self._num_rounds = 0

    def next_round(self) -> CheckRound | None:
        """Return what to test next; None if no test could tell more."""
        if self._num_rounds == 0:
            return CheckRound(solo=self._nodes)
        if self._num_rounds >= _MAX_ROUNDS:
            return None
        if self._num_rounds == 1:
            passed = [node for node in self._nodes if self._has_passed_alone(node)]
            if len(passed) >= 2:
                return CheckRound(pairs=tuple(zip(passed[::2], passed[1::2], strict=False)))
        return self._test_suspects()

    def take(self, solo: Iterable[SoloResult], pairs: Iterable[PairResult]) -> None:
        self._num_rounds += 1
        for alone in solo:
            self._solo[alone.node].append(alone)
        together = tuple(pairs)
        for pair in together:
            self._pairs[_key(*pair.nodes)].append(pair)
        self._note_usual()
        # Later rounds test suspects, whose times must not become the measure of others.
        if self._pair_median_s is None:
            times_s = [pair.seconds for pair in together if pair.seconds is not None]
            self._pair_median_s = _lower_median(times_s) if times_s else None

    def _note_usual(self) -> None:
        by_device: defaultdict[str, list[SoloResult]] = defaultdict(list)
        for node, results in self._solo.items():
            by_device[self._device_of.get(node, "")] += results
        for device, results in by_device.items():
            if device not in self._solo_median_s and (medians := _medians(results)):
                self._solo_median_s[device] = medians

    def verdict(self) -> CheckVerdict:
        nodes = tuple(self._judge(node) for node in self._nodes)
        healthy = {verdict.node for verdict in nodes if verdict.health is Health.HEALTHY}
        links = tuple(
            LinkVerdict(nodes=pair, reason=self._pair_reason(pair), factor=self._pair_factor(pair))
            for pair in sorted(self._pairs)
            # Where one of the nodes is at fault, its links are not to blame.
            if healthy.issuperset(pair) and not self._works(pair)
        )
        return CheckVerdict(nodes=nodes, links=links)

    # --- what is known of a node ---------------------------------------------------------------------------------

    def _judge(self, node: str) -> NodeVerdict:
        if self._is_condemned_alone(node):
            return self._condemn_alone(node)
        if self._is_proven(node):
            return NodeVerdict(node=node, health=Health.HEALTHY, reason="")
        failed_with = self._failed_with(node)
        if len(failed_with) >= 2:  # one failure may be the link's
            return self._condemn_in_company(node, failed_with)
        return NodeVerdict(node=node, health=Health.UNDECIDED, reason="no healthy node is left to test it with")

    def _condemn_alone(self, node: str) -> NodeVerdict:
        results = self._solo[node]
        if results[-1].error:
            return NodeVerdict(node=node, health=Health.FAULTY, reason=results[-1].error)
        measure, factor = self._worst_measure(results[-1])
        reason = f"{measure} is {factor:.1f} times slower than on the other nodes"
        return NodeVerdict(node=node, health=Health.SLOW, reason=reason, factor=factor)

    def _condemn_in_company(self, node: str, partners: Sequence[str]) -> NodeVerdict:
        pairs = [_key(node, partner) for partner in partners]
        named = " and ".join(partners[:2])
        factors = [factor for pair in pairs if (factor := self._pair_factor(pair)) is not None]
        if len(factors) < len(pairs):
            broken = next(pair for pair in pairs if self._pair_factor(pair) is None)
            reason = f"no exchange with {named}, which work with others: {self._pair_reason(broken)}"
            return NodeVerdict(node=node, health=Health.FAULTY, reason=reason)
        reason = f"exchanges with {named} take {min(factors):.1f} times as long as those of others"
        return NodeVerdict(node=node, health=Health.SLOW, reason=reason, factor=min(factors))

    def _is_proven(self, node: str) -> bool:
        if len(self._nodes) == 1:  # there is no other node to prove it with
            return self._has_passed_alone(node)
        return self._has_passed_alone(node) and any(node in pair and self._works(pair) for pair in self._pairs)

    def _has_passed_alone(self, node: str) -> bool:
        return any(self._is_good(result) for result in self._solo[node])

    def _is_condemned_alone(self, node: str) -> bool:
        results = self._solo[node]
        if self._has_passed_alone(node):
            return False
        # One bad result may be due to a load that has passed by the second test.
        return len(results) >= 2 or any(result.is_final for result in results)

    def _is_good(self, result: SoloResult) -> bool:
        if result.error:
            return False
        usual_s = self._usual_s(result.node)
        return all(
            seconds < usual_s[measure] * self._slow_factor * _TOLERANCE.get(measure, 1.0)
            for measure, seconds in result.seconds.items()
            if measure in usual_s
        )

    def _usual_s(self, node: str) -> Mapping[str, float]:
        """The times of nodes like this one, keyed by measure."""
        return self._solo_median_s.get(self._device_of.get(node, ""), {})

    def _worst_measure(self, result: SoloResult) -> tuple[str, float]:
        usual_s = self._usual_s(result.node)
        factors = {
            measure: seconds / usual_s[measure] for measure, seconds in result.seconds.items() if measure in usual_s
        }
        measure = max(sorted(factors), key=lambda measure: factors[measure] / _TOLERANCE.get(measure, 1.0))
        return measure, factors[measure]

    # --- what is known of a pair ---------------------------------------------------------------------------------

    def _works(self, pair: tuple[str, str]) -> bool:
        factors = (self._factor(result) for result in self._pairs.get(pair, ()))
        return any(factor is not None and factor < self._slow_factor * _PAIR_TOLERANCE for factor in factors)

    def _factor(self, result: PairResult) -> float | None:
        if result.seconds is None or self._pair_median_s is None:
            return None
        return result.seconds / self._pair_median_s

    def _pair_factor(self, pair: tuple[str, str]) -> float | None:
        """Its best exchange's time over that of others; None without an exchange."""
        factors = [factor for result in self._pairs[pair] if (factor := self._factor(result)) is not None]
        return min(factors, default=None)

    def _pair_reason(self, pair: tuple[str, str]) -> str:
        factor = self._pair_factor(pair)
        if factor is None:
            return self._pairs[pair][-1].error
        return f"an exchange takes {factor:.1f} times as long as between other nodes"

    def _failed_with(self, node: str) -> list[str]:
        """The proven nodes that this one does not work with, in order."""
        # A failed test with an unproven node shows nothing: either may be at fault.
        return [
            other
            for other in self._nodes
            if other != node
            and (pair := _key(node, other)) in self._pairs
            and not self._works(pair)
            and self._is_proven(other)
        ]

    # --- what to test next ---------------------------------------------------------------------------------------

    def _test_suspects(self) -> CheckRound | None:
        proven = [node for node in self._nodes if self._is_proven(node)]
        suspects = [
            node
            for node in self._nodes
            if node not in proven and not self._is_condemned_alone(node) and len(self._failed_with(node)) < 2
        ]
        again = tuple(node for node in suspects if not self._has_passed_alone(node))
        # Without a proven node, other pairs of suspects may prove some.
        pairs = tuple(self._with_proven(suspects, proven) if proven else self._untried(suspects))
        return CheckRound(solo=again, pairs=pairs) if again or pairs else None

    def _with_proven(self, suspects: Sequence[str], proven: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Pair each suspect with a proven node that it has not met."""
        # The pairs of one node are tested one after the other, so suspects are spread over the proven nodes.
        load = dict.fromkeys(proven, 0)
        for suspect in suspects:
            unmet = [node for node in proven if _key(suspect, node) not in self._pairs]
            if unmet:
                partner = min(unmet, key=lambda node: load[node])
                load[partner] += 1
                yield suspect, partner

    def _untried(self, nodes: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Pair nodes that have not met, each at most once."""
        free = list(nodes)
        while free:
            node = free.pop(0)
            partner = next((other for other in free if _key(node, other) not in self._pairs), None)
            if partner is not None:
                free.remove(partner)
                yield node, partner


def _key(node: str, other: str) -> tuple[str, str]:
    return (node, other) if node < other else (other, node)


def _medians(results: Iterable[SoloResult]) -> dict[str, float]:
    by_measure: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        if not result.error:
            for measure, seconds in result.seconds.items():
                by_measure[measure].append(seconds)
    return {measure: _lower_median(values) for measure, values in sorted(by_measure.items())}


def _lower_median(values: Sequence[float]) -> float:
    # Of two values the faster is the measure. With up to a quarter of the nodes or links at fault, the lower median is
    # that of a healthy one.
    return sorted(values)[(len(values) - 1) // 2]
