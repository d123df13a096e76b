"""What-if analysis: the plan after each loss of nodes before it happens, and the cost of other numbers of pipelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.plan import ExecutionPlan, LayerTransfer

from .formatting import counted
from .planner import Planner
from .profiles import Profile
from .values import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """A loss, and the decision that follows."""

    lost: tuple[str, ...]
    num_alike: int
    """How many losses this one stands for, itself included."""
    decision: Decision | None
    """None where training cannot continue without a checkpoint or more nodes; `failure` gives the reason."""
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """All losses of `num_lost` nodes at once, or a sample of them."""

    num_lost: int
    cases: tuple[LossCase, ...]
    num_kinds: int
    """How many cases cover all losses."""

    @property
    def is_sample(self) -> bool:
        return len(self.cases) < self.num_kinds


def what_if_lost(planner: Planner, plan: ExecutionPlan, num_lost: int, *, max_cases: int = 64) -> LossReport:
    """Decide every loss of one node, or of two at once, or an even sample of `max_cases` of them.

    O(nodes of the distinct templates) decisions for one, and O(the square of that) for two.
    """
    groups = _groups(plan, lambda node: (planner.kind_of(node), planner.domain_of(node)))
    kinds = list(_singles(groups) if num_lost == 1 else _pairs(groups))
    wanted = min(len(kinds), max_cases)
    cases = []
    # Cases are listed group by group, so the first ones alone would leave whole groups out.
    for lost, num_alike in [kinds[number * len(kinds) // wanted] for number in range(wanted)]:
        decision, failure = None, ""
        try:
            decision = planner.reconfigure(plan, lost=lost)
        except (PlanningError, Unrecoverable) as error:
            failure = str(error)
        cases.append(LossCase(lost=lost, num_alike=num_alike, decision=decision, failure=failure))
    return LossReport(num_lost=num_lost, cases=tuple(cases), num_kinds=len(kinds))


def moved_bytes(profile: Profile, transfers: Sequence[LayerTransfer]) -> int:
    """Return the bytes of layers that transfers copy between nodes or devices."""
    return sum(profile.layers[each.layer].state_bytes // each.num_parts for each in transfers)


def transfer_s(profile: Profile, transfers: Sequence[LayerTransfer]) -> float:
    """Return the least seconds of the copying: the bytes of the busiest node, in or out, at the link's full speed."""
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    for each in transfers:
        if each.source.node != each.target.node:
            size = profile.layers[each.layer].state_bytes / each.num_parts
            sent[each.source.node] += size
            received[each.target.node] += size
    return max((*sent.values(), *received.values()), default=0.0) / profile.network.inter_node_bytes_per_s


# A case has the lost nodes, and the number of losses like this one.
_Case = tuple[tuple[str, ...], int]
# A group has the nodes of each pipeline of one template; a spare counts as a pipeline of one node.
_Group = list[tuple[str, ...]]


def _groups(plan: ExecutionPlan, likeness: Callable[[str], object]) -> list[_Group]:
    # Losing either of two nodes at the same place of like pipelines leads to the same plan but for names.
    groups: dict[object, _Group] = defaultdict(list)
    for pipeline in plan.pipelines:
        groups[pipeline.template.stages, tuple(map(likeness, pipeline.nodes))].append(pipeline.nodes)
    for node in plan.spares:
        groups[likeness(node)].append((node,))
    return list(groups.values())


def _singles(groups: list[_Group]) -> Iterator[_Case]:
    for group in groups:
        for node in group[0]:
            yield (node,), len(group)


def _pairs(groups: list[_Group]) -> Iterator[_Case]:
    for index, group in enumerate(groups):
        count = len(group)
        for pair in combinations(group[0], 2):
            yield pair, count
        if count > 1:
            # In two pipelines of one template, places (a, b) and (b, a) are alike.
            for a, first in enumerate(group[0]):
                for b, second in enumerate(group[1][a:], start=a):
                    yield (first, second), count * (count - 1) // (2 if a == b else 1)
        for other in groups[index + 1 :]:
            for first in group[0]:
                for second in other[0]:
                    yield (first, second), count * len(other)


def explain_pipelines(planner: Planner, nodes: Sequence[str], chosen: Decision) -> str:
    """Compare a plan in a sentence with one pipeline fewer and one more, or with one kind of nodes in each pipeline."""
    if len(planner.kinds) > 1:
        return _without_mixing(planner, nodes, chosen)
    count = len(chosen.plan.pipelines)
    parts = [_with_as_many(planner, nodes, number, chosen) for number in (count - 1, count + 1) if number >= 1]
    if planner.settings.num_pipelines is not None:
        parts.insert(0, f"{planner.settings.num_pipelines} were asked for")
    return f"{counted(count, 'pipeline')}: {'; '.join(parts)}"


def _with_as_many(planner: Planner, nodes: Sequence[str], number: int, chosen: Decision) -> str:
    smallest, num_microbatches = min(planner.templates(len(nodes))), planner.settings.num_microbatches
    if number > len(nodes) // smallest:
        room = f"there is room for {len(nodes) // smallest} in {len(nodes)}"
        return f"{number} are not possible (the model needs {counted(smallest, 'node')}, so {room})"
    if number > num_microbatches:
        return f"{number} are not possible (a step has {num_microbatches} microbatches)"
    other = planner.with_changes(num_pipelines=number).initial_plan(nodes)
    if len(other.plan.pipelines) != number:
        return f"{number} would have no memory for {num_microbatches} microbatches"
    share, wanted = other.predicted_step_s / chosen.predicted_step_s - 1, planner.settings.fault_threshold + 1
    longer = f"take {100 * abs(share):.1f} % {'longer' if share > 0 else 'less'} a step"
    shortfall = f", and f = {planner.settings.fault_threshold} asks for at least {wanted}" if number < wanted else ""
    return f"{number} would {longer if abs(share) >= 5e-4 else 'be as fast'}{shortfall}"


def _without_mixing(planner: Planner, nodes: Sequence[str], chosen: Decision) -> str:
    subject = "pipelines with nodes of one kind each"
    if all(len(set(map(planner.kind_of, pipeline.nodes))) == 1 for pipeline in chosen.plan.pipelines):
        return f"these are {subject}; mixing them saves nothing"
    try:
        other = planner.with_changes(num_pipelines=planner.settings.num_pipelines, mixes=False).initial_plan(nodes)
    except PlanningError:
        return f"{subject} cannot hold the model"
    share = other.predicted_step_s / chosen.predicted_step_s - 1
    fewer = len(other.plan.pipelines) < min(len(chosen.plan.pipelines), planner.settings.fault_threshold + 1)
    return f"{subject} would take {100 * share:.1f} % longer a step" + (", with fewer copies" if fewer else "")
