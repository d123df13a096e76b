"""Opens the launcher of any source of nodes: the one place that knows all launchers."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import trio

from oobleck.cli import inputs
from oobleck.runtime import launchers
from oobleck.runtime.ssh import SSHOptions, serve_local_nodes

# After this time, a run begins without the nodes that a scheduler has failed to start.
_STARTS_S = 60.0


@asynccontextmanager
async def open_launcher(
    source: inputs.NodeSource,
    options: SSHOptions,
    *,
    keys_directory: Path | None = None,
    run_id: str = "",
    renew_keys: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    environment: Mapping[str, str] | None = None,
    num_devices: int = 1,
    num_spare: int = inputs.NUM_SPARE_NODES,
    num_gpus: int = 0,
) -> AsyncIterator[launchers.Launcher]:
    """Open the launcher of a source, within `open_ssh_loop`; virtual nodes live as long as the context.

    Nodes that dial in find the keys of the run in `keys_directory`, and `tell` reports how to start them. By `run_id`
    a scheduler distinguishes them from those of other runs.

    Commands on virtual nodes get `environment`. Each of these nodes has `num_devices`, unless the source sets another
    number, and `num_spare` more can be added. Their devices are this machine's `num_gpus` in turn, shared where there
    are fewer.
    """
    match source:
        case inputs.FromHostfile(path=path, text=text):
            yield launchers.ListedNodes(
                launchers.Hostfile(path=path), text, parse=inputs.parse_hostfile, options=options
            )
        case inputs.FromCommand(command=command, interval_s=interval_s, text=text):
            asked = launchers.HostsCommand(command=command, interval_s=interval_s)
            yield launchers.ListedNodes(asked, text, parse=inputs.parse_hostfile, options=options)
        case inputs.DialIn() | inputs.FromSlurm() | inputs.FromRay():
            assert keys_directory is not None
            patience_s = options.connect_timeout_s
            async with _callers(source, keys_directory, patience_s, tell, run_id, renew_keys=renew_keys) as callers:
                yield callers
        case inputs.VirtualOnes():
            shapes = source.shapes(num_spare=num_spare, num_devices=num_devices)
            async with serve_local_nodes(len(shapes), environment=environment) as (nodes, reached_by):
                gpus = itertools.cycle(range(num_gpus))
                specs = [
                    replace(node, device=device, devices=(*itertools.islice(gpus, number),) or tuple(range(number)))
                    for node, (device, number) in zip(nodes, shapes, strict=True)
                ]
                yield launchers.VirtualNodes(specs, reached_by, num_first=source.count)
        case _:
            assert_never(source)


@asynccontextmanager
async def _callers(
    source: inputs.DialIn | inputs.FromSlurm | inputs.FromRay,
    directory: Path,
    patience_s: float,
    tell: Callable[[str], None],
    run_id: str,
    *,
    renew_keys: bool,
) -> AsyncIterator[launchers.DialedInNodes]:
    """Listen for nodes that dial in, and have Slurm or Ray start them where they are theirs."""
    listeners, place = await launchers.listen(source.host, source.port)
    if isinstance(source, inputs.DialIn) and source.keys is not None:
        keys, file = launchers.read_keys(source.keys)
    else:
        keys, file = launchers.settle_keys(directory, master=place, renew=renew_keys)
    # A scheduler that fails to start a node may never do so; a person who starts nodes by hand may take any time.
    is_scheduled = isinstance(source, inputs.FromSlurm | inputs.FromRay) or source.pods is not None
    callers = launchers.DialedInNodes(
        num_first=len(source.names),
        parse=inputs.parse_hostfile,
        patience_s=patience_s,
        begins_after_s=_STARTS_S if is_scheduled else math.inf,
    )
    async with trio.open_nursery() as serving:
        serving.start_soon(callers.serve, listeners, keys)
        actors: launchers.RayActors | None = None
        if isinstance(source, inputs.FromRay):
            tell(f"starting `oobleck node` on {len(source.names)} nodes of the Ray cluster")
            is_named, log = source.host is not None, directory / "ray.log"
            actors = launchers.RayActors(run_id=run_id, file=file, is_place_named=is_named, log=log, callers=callers)
            serving.start_soon(actors.run)
        elif isinstance(source, inputs.FromSlurm):
            jobs = launchers.SlurmJobs(job_id=source.job_id, name=source.job_name)
            tell(f"starting `oobleck node` on {len(source.names)} nodes of {jobs}")
            tasks = launchers.SlurmTasks(jobs=jobs, file=file, log=directory / "srun.log", callers=callers)
            serving.start_soon(tasks.run)
        elif source.pods is not None:
            tell(f"waiting for {source.count} pods with the labels {source.pods}")
            serving.start_soon(launchers.PodFollower(launchers.KubernetesAPI.of_pod(), source.pods, callers).run)
        else:
            tell(f"waiting for {source.count} nodes: oobleck node {shlex.quote(str(file))}")
        yield callers
        if actors is not None:  # after a failure of the master they stay, and the next one finds them
            await actors.end()
        serving.cancel_scope.cancel()
