"""The failure model that a trace's own losses and repairs suggest, from which like traces are drawn."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from oobleck.errors import ConfigError

from .events import Joined, Lost, event_to_json
from .generate import FailureModel
from .trace import Trace

_SHARES = tuple(number / 20 for number in range(1, 20))


def model_of(trace: Trace) -> FailureModel:
    """Return the rate of a trace's losses, the numbers of nodes lost at once, and how long nodes are away.

    Raises ConfigError for a trace with other events, without a loss, or on whose nodes not all start.
    """
    if len(trace.start) < len(trace.nodes):
        raise ConfigError("not all of the trace's nodes are there at the start, so no like traces can be drawn")
    at_once: Counter[float] = Counter()
    lost_s: dict[str, float] = {}
    away_s: list[float] = []
    for event in trace.events:
        match event:
            case Lost(t_s=t_s, node=node):
                at_once[t_s] += 1
                lost_s[node] = t_s
            case Joined(t_s=t_s, node=node):
                away_s.append(t_s - lost_s[node])
            case _:
                kind = event_to_json(event)["kind"]
                raise ConfigError(f"the trace has an event {kind}; like traces can be drawn of losses and joins alone")
    if not at_once:
        raise ConfigError("the trace has no losses, so no like traces can be drawn")
    points = [*trace.counts, (trace.duration_s, 0)]
    node_s = sum(count * (until_s - since_s) for (since_s, count), (until_s, _) in pairwise(points))
    away_s.sort()
    # `generate` needs quantiles above 0 that grow.
    repairs = tuple((share, max(1e-3, away_s[int(share * len(away_s))])) for share in _SHARES) if away_s else ()
    whole = _whole_domains(trace)
    others = Counter(number for t_s, number in at_once.items() if t_s not in whole) or Counter([1])
    return FailureModel(
        mean_lifetime_s=node_s / at_once.total(),
        batches=dict(sorted(others.items())),
        domain_share=len(whole) / len(at_once),
        repairs=repairs,
        source=f"drawn like {trace.source or 'a trace'}",
    )


def _whole_domains(trace: Trace) -> set[float]:
    """Return when all present nodes of a failure domain, several of them, were lost at once."""
    here = Counter(trace.domains[node] for node in trace.start if node in trace.domains)
    lost_at: dict[float, Counter[str]] = {}
    whole = set()
    for event in trace.events:
        match event:
            case Lost(t_s=t_s, node=node) if node in trace.domains:
                domain = trace.domains[node]
                lost = lost_at.setdefault(t_s, Counter())
                lost[domain] += 1
                here[domain] -= 1
                if not here[domain] and lost[domain] > 1:
                    whole.add(t_s)
            case Joined(node=node) if node in trace.domains:
                here[trace.domains[node]] += 1
            case _:
                pass
    return whole
