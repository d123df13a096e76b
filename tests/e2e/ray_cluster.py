"""A Ray cluster on loopback, of a raylet for each name: `python ray_cluster.py DIRECTORY NAME …`.

It prints the address once all are there. `kill NAME` on its input kills a raylet; the end of its input ends all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

OBJECTS_BYTES = 80 << 20
"""The least that Ray takes."""


def main() -> None:
    directory, *names = sys.argv[1:]
    os.environ["RAY_TMPDIR"] = directory
    Path(directory, "ray").mkdir()
    common = {"num_cpus": 2, "object_store_memory": OBJECTS_BYTES, "include_dashboard": False}
    cluster = Cluster()
    raylets = {name: cluster.add_node(node_name=name, **common) for name in names}
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        cluster.remove_node(raylets[line.split()[1]], allow_graceful=False)
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
