"""Where the copies of a node's saved states lie: on other nodes, of other failure domains. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def place(
    nodes: Sequence[str],
    num_copies: int,
    *,
    domains: Mapping[str, str],
    before: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the nodes that hold each node's copies; a node that `domains` lacks is a domain of its own.

    No node holds the copies of more than `num_copies` + 1 others, and choices of `before` stay where they can, so that
    a lost node moves only the copies that it held, and its own. O(nodes² · copies).
    """
    ring = sorted(nodes, key=lambda node: (domains.get(node, node), node))
    present, num_wanted = set(nodes), min(num_copies, len(ring) - 1)
    chosen = {node: [each for each in before.get(node, ()) if each in present][:num_wanted] for node in ring}
    held = Counter(target for targets in chosen.values() for target in targets)
    # Nodes of one domain are neighbours. A step of a share of the ring leaves a domain that is not larger than that,
    # and comes back after `num_copies` + 1 of them: such groups lose no state to two losses in two of them.
    stride = max(1, len(ring) // (num_copies + 1))
    for index, node in enumerate(ring):
        targets = chosen[node]
        while len(targets) < num_wanted:
            near = {domains.get(each, each) for each in (node, *targets)}
            preferred = (index + stride * (len(targets) + 1)) % len(ring)
            _, _, _, place = min(
                (held[other] > num_copies, domains.get(other, other) in near, (at - preferred) % len(ring), at)
                for at, other in enumerate(ring)
                if other != node and other not in targets
            )
            targets.append(ring[place])
            held[ring[place]] += 1
    return {node: tuple(targets) for node, targets in chosen.items()}
