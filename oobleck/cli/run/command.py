"""`oobleck run`: runs an unmodified script that was written for torchrun, on the nodes of any launcher."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from oobleck.cli.common_options import base_dir_of
from oobleck.cli.inputs import DialIn, NodeOptions, NodeSource, VirtualOnes, read_source, read_workdir
from oobleck.cli.option_fields import declared_fields
from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.job.ranks import RanksSpec
from oobleck.runtime.files import BASE_DIR_VARIABLE, default_tag
from oobleck.runtime.script_command import check_command
from oobleck.storage.scripts import identity_of

if TYPE_CHECKING:
    from oobleck.runtime.workdir import Workdir

from . import options

_OF_A_SOURCE = {"num_nodes", "keys", "hosts_every"}
"""The options of nodes that name none: each belongs to another one."""


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
        with _naming_options():
            line = options.parse_command_line(words or [], os.environ)
    except options.HelpAsked:
        head, examples, tail = ctx.get_help().partition("Examples:")
        typer.echo(f"{head.rstrip()}\n\n{options.options_text()}\n\n{examples}{tail}")
        return
    own = line.own
    for text in line.unused:
        print(f"oobleck: {text}", file=sys.stderr)  # noqa: T201  before anything else runs
    if _has_input():
        said = "the ranks do not get this command's input: they have none, as they may start again; name a file instead"
        print(f"oobleck: {said}", file=sys.stderr)  # noqa: T201
    source = _read_source(line)
    with _naming_options():
        spec = _spec_of(line, source)
    named_dir = own.get("--base-dir") or os.environ.get(BASE_DIR_VARIABLE)
    base_dir = base_dir_of(Path(named_dir) if named_dir else None)
    owner = identity_of(spec).script
    if not spec.is_tag_given and (tag := default_tag(base_dir, spec.tag, owner)) != spec.tag:
        print(f"oobleck: another script's run is called {spec.tag}; this one is {tag}", file=sys.stderr)  # noqa: T201
        spec = replace(spec, tag=tag)
    _check_together(line, source)

    from .run_ranks import RanksRun, run_ranks

    workdir = None
    if "--workdir" in own:
        workdir, spec = _in_workdir(read_workdir(Path(own["--workdir"])), spec, source)
    config = own.get("--ssh-config")
    raise SystemExit(
        run_ranks(
            RanksRun(
                spec=spec,
                source=source,
                python=own.get("--python"),
                ssh_config=expand_user(Path(config)).absolute() if config is not None else None,
                base_dir=base_dir,
                check="--network-check" in line.flags,
                owner=owner,
                workdir=workdir,
                leaves_out_slow="--exclude-straggler" in line.flags,
            )
        )
    )


def _check_together(line: options.CommandLine, source: NodeSource) -> None:
    """Raise UsageError for options that mean nothing without, or beside, another one."""
    if "--exclude-straggler" in line.flags and "--network-check" not in line.flags:
        raise UsageError("--exclude-straggler: slow nodes are found by --network-check; give both")
    if "--ssh-config" in line.own and isinstance(source, VirtualOnes):
        raise UsageError("--ssh-config: virtual nodes need none; leave it out, or name a hostfile instead of --local")


def _in_workdir(path: Path, spec: RanksSpec, source: NodeSource) -> tuple[Workdir, RanksSpec]:
    """Return the directory that travels to nodes, and the specification of ranks that run in its copy there."""
    from oobleck.runtime.workdir import Workdir, pack

    inside = os.path.relpath(os.path.realpath(spec.directory), path)
    if inside.split(os.sep)[0] == os.pardir:
        raise UsageError(
            f"--workdir: the script runs in {spec.directory}, which is not in {path}; name one that has it"
        )
    if isinstance(source, VirtualOnes):
        return Workdir(path=path), spec
    script = spec.command[0]
    if spec.entry != "module" and os.path.isabs(script) and Path(os.path.realpath(script)).is_relative_to(path):
        raise UsageError(f"--workdir: {script} is copied to another place; name it from {spec.directory} on")
    # Agents run in the copy, wherever a node has its home directory.
    return pack(path, (".",)), replace(spec, directory=inside)


def _has_input() -> bool:
    """Whether a file or a pipe brings data, which a script could mean to read."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISREG(kind):
            return os.fstat(sys.stdin.fileno()).st_size > os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR)
        if stat.S_ISFIFO(kind):
            num_bytes = array("i", [0])
            fcntl.ioctl(sys.stdin, termios.FIONREAD, num_bytes)
            return num_bytes[0] > 0
    except (OSError, ValueError, AttributeError):  # it is closed, or another program's replacement
        pass
    return False


def _read_source(line: options.CommandLine) -> NodeSource:
    hostfile, local = line.hostfile or line.own.get("--hostfile"), options.whole("--local", line.own)
    given = {name: _value_of(line, option, hint) for name, option, hint in declared_fields(NodeOptions)}
    is_named = bool(hostfile) or "--local" in line.own or any(given[name] for name in given.keys() - _OF_A_SOURCE)
    if "--standalone" in line.flags and is_named:
        raise UsageError("--standalone runs on this machine alone; leave it out, or the nodes")
    if not is_named:
        if line.nodes is not None and line.nodes[0] > 1:
            raise UsageError(
                f"--nnodes: at least {line.nodes[0]} nodes are asked for, and none is named; name a hostfile before "
                "the script, or virtual nodes with --local N (this command is started once, not on each node)"
            )
        local = 1
    return read_source(Path(hostfile) if hostfile is not None else None, NodeOptions(local=local, **given))


def _value_of(line: options.CommandLine, name: str, hint: Any) -> Any:
    """Return the value of an option of nodes, as the type of its field wants it; None, or False, if it is not there."""
    if hint is bool:
        return name in line.flags
    if (text := line.own.get(name)) is None:
        return None
    if int in get_args(hint):
        return options.whole(name, line.own)
    return Path(text) if Path in get_args(hint) else text


def _spec_of(line: options.CommandLine, source: NodeSource) -> RanksSpec:
    num_nodes = len(source.names)
    low, high = line.nodes if line.nodes is not None else (1, num_nodes)
    if low > num_nodes and not isinstance(source, DialIn):
        raise UsageError(f"--nnodes: at least {low} nodes are asked for, and there are {num_nodes}")
    unit = options.whole("--node-unit", line.own)
    spec = replace(line.spec, min_nodes=low, max_nodes=high, node_unit=1 if unit is None else unit)
    named = next((each for each in source.specs if each.devices != tuple(range(len(each.devices)))), None)
    # The variable would show ranks other devices than those that the line names.
    if named is not None and "CUDA_VISIBLE_DEVICES" in spec.environment:
        raise UsageError(f"--env: the line of {named.name} names the devices that its ranks see: CUDA_VISIBLE_DEVICES")
    # Virtual nodes are this machine, so a wrong command is found before anything starts.
    if isinstance(source, VirtualOnes) and "--python" not in line.own:
        check_command(spec, os.environ)
    return spec


@contextmanager
def _naming_options() -> Iterator[None]:
    """Turn an error about a field of the specification into one about its option."""
    try:
        yield
    except ConfigError as error:
        field, colon, rest = str(error).partition(": ")
        option = f"--{field.removesuffix('_s').replace('_', '-')}"
        is_option = option in (*options.LAUNCHER_OPTIONS, *options.USED)
        raise UsageError(f"{option}{colon}{rest}" if is_option else str(error)) from error
