"""`oobleck run`: runs an unmodified script that was written for torchrun, on the nodes of any launcher."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from oobleck.cli.common_options import base_dir_of
from oobleck.cli.inputs import DialIn, NodeOptions, NodeSource, VirtualOnes, read_source
from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.job import ControlSpec
from oobleck.job.bounds import bounds_of, require
from oobleck.job.ranks import DEFAULT_RESTARTS, RanksSpec
from oobleck.runtime.files import BASE_DIR_VARIABLE, default_tag
from oobleck.runtime.script_command import check_command
from oobleck.storage.scripts import identity_of

from . import options

_TAG_CHARS = 40


def run(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS] [HOSTFILE] SCRIPT [ARGUMENTS]", show_default=False),
    ] = None,
) -> None:
    """Run a script that was written for torchrun, on this machine or on the nodes of a hostfile.

    It takes torchrun's options. When a process or a node fails, all processes start again on the remaining nodes,
    within a fraction of a second: they are forked from a process that has done the same imports. A new node takes part
    in the next start.
    """
    try:
        line = options.parse_command_line(words or [], os.environ)
    except options.HelpAsked:
        head, examples, tail = ctx.get_help().partition("Examples:")
        typer.echo(f"{head.rstrip()}\n\n{options.options_text()}\n\n{examples}{tail}")
        return
    given = line.given
    for text in line.unused:
        print(f"oobleck: {text}", file=sys.stderr)  # noqa: T201  before anything else runs
    source = _read_source(line)
    try:
        spec = _spec_of(line, source)
    except ConfigError as error:
        raise UsageError(_by_option(str(error))) from error
    named_dir = given.get("--base-dir") or os.environ.get(BASE_DIR_VARIABLE)
    base_dir = base_dir_of(Path(named_dir) if named_dir else None)
    if not spec.is_tag_given and (tag := default_tag(base_dir, spec.tag, identity_of(spec).script)) != spec.tag:
        print(f"oobleck: another script's run is called {spec.tag}; this one is {tag}", file=sys.stderr)  # noqa: T201
        spec = replace(spec, tag=tag)

    from .run_ranks import RanksRun, run_ranks

    if "--exclude-straggler" in line.flags and "--network-check" not in line.flags:
        raise UsageError("--exclude-straggler: slow nodes are found by --network-check; give both")
    config = given.get("--ssh-config")
    if config is not None and isinstance(source, VirtualOnes):
        raise UsageError("--ssh-config: virtual nodes need none; leave it out, or name a hostfile instead of --local")
    raise SystemExit(
        run_ranks(
            RanksRun(
                spec=spec,
                source=source,
                python=given.get("--python"),
                ssh_config=expand_user(Path(config)).absolute() if config is not None else None,
                base_dir=base_dir,
                check="--network-check" in line.flags,
                leaves_out_slow="--exclude-straggler" in line.flags,
            )
        )
    )


def _read_source(line: options.CommandLine) -> NodeSource:
    given = line.given
    hostfile = line.hostfile or given.get("--hostfile")
    slurm_job, is_slurm, is_ray = given.get("--slurm-job"), "--slurm" in line.flags, "--ray" in line.flags
    named = (hostfile, given.get("--local"), given.get("--hosts-from"), given.get("--dial-in"), slurm_job)
    local = options.whole("--local", given)
    if "--standalone" in line.flags and any(named):
        raise UsageError("--standalone runs on this machine alone; leave it out, or the nodes")
    if not any((*named, is_slurm, is_ray, given.get("--kubernetes"))):
        if line.nodes is not None and line.nodes[0] > 1:
            raise UsageError(
                f"--nnodes: at least {line.nodes[0]} nodes are asked for, and none is named; name a hostfile before "
                "the script, or virtual nodes with --local N (this command is started once, not on each node)"
            )
        local = 1
    keys = given.get("--keys")
    nodes = NodeOptions(
        local=local,
        hosts_from=given.get("--hosts-from"),
        dial_in=given.get("--dial-in"),
        num_nodes=options.whole("--nodes", given),
        slurm=is_slurm,
        slurm_job=slurm_job,
        ray=is_ray,
        kubernetes=given.get("--kubernetes"),
        keys=Path(keys) if keys is not None else None,
    )
    return read_source(Path(hostfile) if hostfile is not None else None, nodes)


def _spec_of(line: options.CommandLine, source: NodeSource) -> RanksSpec:
    given, num_nodes = line.given, len(source.names)
    low, high = line.nodes if line.nodes is not None else (1, num_nodes)
    if low > num_nodes and not isinstance(source, DialIn):
        raise UsageError(f"--nnodes: at least {low} nodes are asked for, and there are {num_nodes}")
    lease_s, lease_bounds = options.seconds("--lease", given, 3.0), bounds_of(ControlSpec)["lease_s"]
    require(lease_bounds.hold(lease_s), "lease_s", lease_s, str(lease_bounds))
    unit = options.whole("--node-unit", given)
    spec = RanksSpec(
        tag=given.get("--tag", _tag_of(line.command[0])),
        is_tag_given="--tag" in given,
        entry=line.entry,
        command=line.command,
        directory=str(expand_user(Path(given.get("--directory", "."))).absolute()),
        ranks_per_node=line.ranks_per_node,
        min_nodes=low,
        max_nodes=high,
        node_unit=1 if unit is None else unit,
        max_restarts=DEFAULT_RESTARTS if line.max_restarts is None else line.max_restarts,
        run_id=line.run_id,
        role=line.role,
        environment=line.environment,
        log_dir=line.log_dir,
        redirects=line.redirects,
        tee=line.tee,
        shown_ranks=line.shown_ranks,
        master_port=line.master_port,
        shutdown_timeout_s=line.shutdown_timeout_s,
        hang_timeout_s=options.seconds("--hang-timeout", given, 600.0),
        join_timeout_s=options.seconds("--join-timeout", given, 600.0),
        hides_devices="--virtual-local-rank" in line.flags,
        is_warmed="--no-warm" not in line.flags and line.entry != "program",
        control=ControlSpec(lease_s=lease_s, heartbeat_interval_s=min(0.5, lease_s / 2), relay_nodes=0),
    )
    named = next((each for each in source.specs if each.devices != tuple(range(len(each.devices)))), None)
    if named is not None and "CUDA_VISIBLE_DEVICES" in line.environment:
        raise UsageError(f"--env: the line of {named.name} names the devices that its ranks see: CUDA_VISIBLE_DEVICES")
    if isinstance(source, VirtualOnes) and "--python" not in given:
        check_command(spec, os.environ)
    return spec


def _by_option(problem: str) -> str:
    """Return an error about a field of the specification as one about its option."""
    field, colon, rest = problem.partition(": ")
    option = f"--{field.removesuffix('_s').replace('_', '-')}"
    return f"{option}{colon}{rest}" if option in (*options.LAUNCHER_OPTIONS, *options.USED) else problem


def _tag_of(command: str) -> str:
    name = Path(command).name.removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-")[:_TAG_CHARS] or "script"
