"""Which nodes take the places of a move's pipelines: those that have to receive least, over enough domains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from oobleck.plan import ExecutionPlan
from oobleck.planner.catalog import Catalog
from oobleck.planner.kinds import Counts, Form

from .domains import Domains
from .living_nodes import LivingNodes
from .matching import Position, match_nodes

# The most numbers of groups that are tried for whole domains.
_MOST_GROUPINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The nodes of each new pipeline, and the old one that it continues."""

    action: str
    pipelines: tuple[tuple[int | None, Counts], ...]
    detail: str
    """A clause for the sentence of the decision."""
    groups: tuple[frozenset[str], ...] = ()
    """The nodes that each new pipeline may have; any if empty."""


def lacking(catalog: Catalog, domains: Domains, plan: ExecutionPlan) -> int:
    """Return how many copies, or domains of copies, layers lack for f, summed over the layers."""
    if not domains:
        return max(0, catalog.settings.fault_threshold + 1 - len(plan.pipelines)) * plan.num_layers
    placed = ((catalog.needed(each.template), each.nodes) for each in plan.pipelines)
    return domains.missing(placed, plan.num_layers)


class Placing:
    """Places the living nodes; `continued` are the forms in which old pipelines go on, and `intact` the whole ones."""

    def __init__(
        self,
        catalog: Catalog,
        living: LivingNodes,
        domains: Domains,
        continued: Mapping[int, Form],
        intact: frozenset[int],
    ) -> None:
        self._catalog, self._living, self._domains = catalog, living, domains
        self._continued, self._intact = continued, intact
        self.wanted_domains = domains.possible(living.holdings) if domains else 1
        """In how many domains the copies of a layer can lie, up to f + 1."""

    def apart(self, set_aside: frozenset[str]) -> Iterator[Move]:
        """Yield moves that plan for groups of whole domains, each of which holds the model alone."""
        if self.wanted_domains == 1:
            return
        catalog, nodes = self._catalog, [node for node in self._living.holdings if node not in set_aside]
        most = len(self._domains.by_domain(nodes))
        total = catalog.count(self._living.holdings)
        for number in {*range(self.wanted_domains, most + 1)[: _MOST_GROUPINGS - 1], most}:
            pipelines: list[tuple[Counts, frozenset[str]]] = []
            groups = self._domains.groups(nodes, number)
            for group, wanted in zip(groups, self._numbers(groups), strict=True):
                own = catalog.best_for(catalog.count(group), total, wanted)
                if own is None:
                    break
                pipelines += [(counts, frozenset(group)) for counts in own]
            else:
                detail = f"pipelines are planned for {number} groups of failure domains"
                yield Move(
                    action="rebuild",
                    pipelines=tuple((None, counts) for counts, _ in pipelines),
                    detail=detail,
                    groups=tuple(group for _, group in pipelines),
                )

    def _numbers(self, groups: Sequence[Sequence[str]]) -> list[int | None]:
        """Return how many pipelines each group of nodes is to form, if their number is fixed."""
        if self._catalog.settings.num_pipelines is None:
            return [None] * len(groups)
        left = self._catalog.num_pipelines(self._catalog.count(self._living.holdings))[0] - len(groups)
        numbers: list[int | None] = []
        # What is rounded away goes to the last group.
        for index, group in enumerate(groups):
            rest = sum(map(len, groups[index:]))
            more = max(0, round(left * len(group) / rest))
            left -= more
            numbers.append(1 + more)
        return numbers

    def stays_whole(self, origin: int | None, form: Form, nodes: Sequence[str]) -> bool:
        """Whether a new pipeline is an untouched old one, so that its nodes hold all that they need."""
        # Identity is enough: what continues keeps its form and the tuple of its nodes.
        return (
            origin in self._intact
            and nodes is self._living.plan.pipelines[origin].nodes
            and form is self._continued[origin]
        )

    def assign(
        self, move: Move, forms: Sequence[Form], *, set_aside: frozenset[str] = frozenset(), evenly: bool = False
    ) -> list[tuple[str, ...]]:
        """Return the nodes of each new pipeline, matched by kind; pipelines that continue whole keep their nodes."""
        living, catalog = self._living, self._catalog
        old = living.plan.pipelines
        nodes: list[tuple[str, ...] | None] = []
        kept: set[int] = set()
        for (origin, _), form in zip(move.pipelines, forms, strict=True):
            own = old[origin].nodes if origin is not None and origin in self._intact else ()
            stays = (
                not evenly and origin is not None and form is self._continued.get(origin) and set_aside.isdisjoint(own)
            )
            nodes.append(own if own and stays else None)
            if own and stays and origin is not None:
                kept.add(origin)
        others = (node for index, each in enumerate(old) if index not in kept for node in each.nodes)
        free = [*filter(living.origins.__contains__, others), *living.free]
        groups: Sequence[frozenset[str] | None] = move.groups or [None] * len(forms)
        waiting: dict[tuple[frozenset[str] | None, int], list[Position]] = {}
        for (origin, _), form, chosen, group in zip(move.pipelines, forms, nodes, groups, strict=True):
            if chosen is None:
                for kind, needed in zip(form.kinds, catalog.needed(form.template), strict=True):
                    position = Position(needed=needed, origin=-1 if origin is None else origin)
                    waiting.setdefault((group, kind), []).append(position)
        matched = {}
        candidates = catalog.by_kind([node for node in free if node not in set_aside])
        for (group, kind), positions in waiting.items():
            held = {node: living.holdings[node] for node in candidates[kind] if group is None or node in group}
            found = match_nodes(positions, held, living.origins, catalog.costs.layer_bytes, evenly=evenly)
            matched[group, kind] = iter(found)
        assigned = [
            tuple(next(matched[group, kind]) for kind in form.kinds) if chosen is None else chosen
            for form, chosen, group in zip(forms, nodes, groups, strict=True)
        ]
        return self._spread(forms, assigned, set_aside)

    def lacking(self, forms: Sequence[Form], nodes: Sequence[Sequence[str]]) -> int:
        """Return how many domains layers lack, of those that can be had."""
        if self.wanted_domains == 1:
            return 0
        placed = ((self._catalog.needed(form.template), own) for form, own in zip(forms, nodes, strict=True))
        return self._domains.missing(placed, self._catalog.costs.num_layers, wanted=self.wanted_domains)

    def _spread(
        self, forms: Sequence[Form], nodes: list[tuple[str, ...]], set_aside: frozenset[str]
    ) -> list[tuple[str, ...]]:
        """Return the nodes with some of them swapped, where layers lie in too few domains."""
        if not (lacking := self.lacking(forms, nodes)):
            return nodes
        living, catalog = self._living, self._catalog
        given = list(chain.from_iterable(nodes))
        used = frozenset(given)
        idle = [node for node in living.holdings if node not in used and node not in set_aside]
        best = nodes
        # What no swap makes better may still be possible from another start.
        for placed in (given, self._in_order(forms, [*given, *idle])):
            if not placed:
                continue
            others = [node for node in (*given, *idle) if node not in frozenset(placed)]
            swapped = self._domains.spread(
                [needed for form in forms for needed in catalog.needed(form.template)],
                placed,
                others,
                catalog.kind,
                living.holdings,
                catalog.costs.layer_bytes,
                self.wanted_domains,
            )
            waiting = iter(swapped)
            # A pipeline that keeps its nodes keeps the tuple, by which it is recognised.
            found = [own if (now := tuple(next(waiting) for _ in own)) == own else now for own in nodes]
            left = self.lacking(forms, found)
            if left < lacking:
                best, lacking = found, left
            if not lacking:
                break
        return best

    def _in_order(self, forms: Sequence[Form], nodes: Sequence[str]) -> list[str]:
        """Return the nodes of the pipelines' places, one domain after the other."""
        alike = self._catalog.by_kind(nodes)
        used = [sum(form.kinds.count(kind) for form in forms) for kind in range(len(alike))]
        waiting = [iter(self._domains.together(own, number)) for own, number in zip(alike, used, strict=True)]
        return [next(waiting[kind]) for form in forms for kind in form.kinds]
