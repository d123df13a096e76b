"""Kinds of nodes for tests, drawn by hypothesis, and all pipelines over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from oobleck.planner import NodeKind, PipelineTemplate, StageTemplate
from oobleck.planner.kinds import Form, KindCosts
from tests.planner.drawing import ROOMY_BYTES, make_layer, make_network, make_profile

DEVICES = ((1, 1), (1, 2), (2, 2), (3, 1), (1, 1, 1))


@st.composite
def kinds_of_nodes(draw: st.DrawFn, *, max_layers: int = 6, devices: Sequence[tuple[int, ...]] = DEVICES):
    """Kinds that differ in speed, evenly or not, in devices and in memory; messages cost something or nothing."""
    num_layers = draw(st.integers(2, max_layers))
    per_node = draw(st.sampled_from(devices))
    layers = [
        (draw(st.floats(0.5, 4.0)), draw(st.integers(0, 50)), draw(st.integers(1, 4)), draw(st.integers(1, 6)))
        for _ in range(num_layers)
    ]
    kinds = []
    for number, count in enumerate(per_node):
        slowness = draw(st.floats(1.0, 4.0))
        uneven = draw(st.booleans())
        profile = make_profile(
            [
                make_layer(
                    seconds * slowness * (draw(st.floats(0.8, 1.25)) if uneven else 1.0),
                    name=f"layer {index}",
                    output_bytes=output_bytes,
                    activation_bytes=activation_bytes,
                    param_bytes=param_bytes,
                )
                for index, (seconds, output_bytes, activation_bytes, param_bytes) in enumerate(layers)
            ],
            memory_bytes=draw(st.sampled_from((60, 120, ROOMY_BYTES))),
            network=make_network(inter=draw(st.sampled_from((50.0, 100.0)))),
        )
        kinds.append(NodeKind(name=f"kind{number}", profile=profile, devices_per_node=count))
    return tuple(kinds)


def all_pipelines(costs: KindCosts, counts: Sequence[int]) -> Iterator[Form]:
    """All orders of the nodes and all cuts, whether they fit or not."""
    nodes = [kind for kind, number in enumerate(counts) for _ in range(number)]
    for order in sorted(set(itertools.permutations(nodes))):
        places = [(index, device) for index, kind in enumerate(order) for device in range(costs.devices[kind])]
        for cuts in itertools.combinations(range(1, costs.num_layers), len(places) - 1):
            stops = (0, *cuts, costs.num_layers)
            stages = tuple(
                StageTemplate(first_layer=first, stop_layer=stop, node_index=index, first_device=device)
                for (first, stop), (index, device) in zip(itertools.pairwise(stops), places, strict=True)
            )
            yield Form(template=PipelineTemplate(stages=stages), kinds=order)
