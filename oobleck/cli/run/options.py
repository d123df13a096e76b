"""torchrun's command line, and dlrover-run's, read for `oobleck run`: both spellings, and `PET_*` in the environment.

A table has all options of torchrun 2.13. What has no meaning here is accepted and said to be unused; what would change
what a script does, and is not there, is refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from oobleck.control.node_ranks import OWN_VARIABLES
from oobleck.errors import UsageError
from oobleck.job import MAX_NODES
from oobleck.job.ranks import RankStreams, Redirection
from oobleck.storage.scripts import DIRECTORY_VARIABLE, MEMORY_VARIABLE, START_VARIABLE

LAUNCHER_OPTIONS = {
    "--hostfile": ("FILE", "nodes, one per line; in place of HOSTFILE before the script"),
    "--local": ("N", "run on N virtual nodes of this machine (1 where no nodes are named)"),
    "--hosts-from": ("COMMAND", "take the nodes from a shell command that prints a hostfile"),
    "--dial-in": ("[HOST:]PORT", "listen there for nodes that dial in: `oobleck node`"),
    "--nodes": ("N", "begin once N nodes have dialled in"),
    "--keys": ("DIRECTORY", "use keys that `oobleck keys` has made"),
    "--slurm-job": ("NAME", "take the nodes of all Slurm jobs that run by this name"),
    "--kubernetes": ("LABELS", "in a pod: take the pods with these labels"),
    "--tag": ("NAME", "name of the run; by default, the script's"),
    "--base-dir": ("DIRECTORY", "directory of all runs"),
    "--python": ("FILE", "Python interpreter on the nodes"),
    "--ssh-config": ("FILE", "read this ssh config instead of ~/.ssh/config"),
    "--directory": ("DIRECTORY", "where the script runs, on every node; by default, the current directory"),
    "--env": ("NAME[=VALUE]", "give ranks this variable; may be repeated"),
    "--hang-timeout": ("SECONDS", "how long ranks may print and save nothing while one waits (600; 0: for ever)"),
    "--join-timeout": ("SECONDS", "how long to wait for MIN nodes (600)"),
    "--node-unit": ("N", "run on a multiple of N nodes (1)"),
    "--lease": ("SECONDS", "how long a node may be silent before it is lost (3)"),
}
"""Our own, with a value each."""
LAUNCHER_FLAGS = {
    "--slurm": "take the nodes of the Slurm allocation that this command is in",
    "--ray": "take the nodes of the Ray cluster that runs here",
    "--no-warm": "start every generation from nothing, as torchrun does",
    "--network-check": "check the nodes before, and leave faulty ones out",
    "--exclude-straggler": "with --network-check: leave slow ones out too",
    "--save-at-breakpoint": "after a failure, write what ranks have saved in memory to disk; this is always done",
}
_REPEATED = ("--env",)

USED = {
    "--nnodes": "MIN:MAX",
    "--nproc-per-node": "N|gpu|cpu|auto|slots",
    "--rdzv-id": "ID",
    "--max-restarts": "N",
    "--role": "NAME",
    "--log-dir": "DIRECTORY",
    "--redirects": "0-3|RANK:0-3,…",
    "--tee": "0-3|RANK:0-3,…",
    "--local-ranks-filter": "RANK,…",
    "--master-port": "PORT",
    "--shutdown-timeout": "SECONDS",
}
_FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
UNUSED = {
    "--rdzv-backend": "ranks meet at a port of the first node, which is free",
    "--rdzv-endpoint": "ranks meet at a port of the first node, which is free",
    "--rdzv-conf": "there is no rendezvous server; --join-timeout says how long nodes are waited for",
    "--monitor-interval": "the end of a rank is noticed at once",
    "--start-method": "ranks are forked from a process of their own",
    "--node-rank": "nodes are numbered in the order of the hostfile",
    "--master-addr": "it is the address of the first node",
    "--local-addr": "the hostfile's address= says it",
    "--event-log-handler": "`oobleck events` shows what happened",
    "--signals-to-handle": "Ctrl-C and SIGTERM are passed on",
}
"""torchrun's options without a meaning here, and why."""
REFUSED = {
    "--duplicate-stdout-filters": "filter the files below --log-dir",
    "--duplicate-stderr-filters": "filter the files below --log-dir",
    "--logs-specs": "--log-dir, --redirects and --tee say what is written where",
    "--numa-binding": "start the script through numactl with --no-python",
    "--comm-perf-test": "`oobleck check` measures the network",
    "--auto-config": "name the options",
    "--auto-tunning": "name the options",
}
"""Options of torchrun and dlrover-run that are not there, and what there is instead."""
_OWN_VARIABLES = {
    **OWN_VARIABLES,
    **dict.fromkeys((MEMORY_VARIABLE, START_VARIABLE), f"{DIRECTORY_VARIABLE} says where states lie"),
}
_DLROVERS = ("--comm-perf-test", "--auto-config", "--auto-tunning")
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"}
_TRUE = ("1", "true", "t", "yes", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What a command line asks for; `None` where it says nothing."""

    given: Mapping[str, str]
    """Our own options, by name."""
    flags: frozenset[str]
    environment: Mapping[str, str]
    hostfile: str | None
    entry: Literal["script", "module", "program"]
    command: tuple[str, ...]
    nodes: tuple[int, int] | None
    ranks_per_node: str
    max_restarts: int | None
    run_id: str
    role: str
    log_dir: str | None
    redirects: RankStreams
    tee: RankStreams
    shown_ranks: tuple[int, ...]
    master_port: int | None
    shutdown_timeout_s: float
    unused: tuple[str, ...]
    """Options that were given and have no meaning here."""


class HelpAsked(Exception):
    """`--help` stands before the script."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `oobleck run --help` shows what there is")


def parse_command_line(words: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """Read the words after `oobleck run`, and torchrun's variables PET_*. Raises UsageError."""
    options = _until_command(words)
    rest = tuple(words[len(options) :])
    if any(_dashed(word) == "--help" for word in options):
        raise HelpAsked
    known, unknown = _parser().parse_known_args([_dashed(word) for word in options])
    if unknown:
        raise UsageError(f"{unknown[0]}: there is no such option; `oobleck run --help` shows what there is")
    said = {f"--{name.replace('_', '-')}": value for name, value in vars(known).items() if value not in (None, False)}
    said = {**_from_environment(environment), **said}
    for name, instead in REFUSED.items():
        if name in said:
            raise UsageError(f"{name}: `oobleck run` has no such option; {instead}")
    entry: Literal["script", "module", "program"] = "script"
    if "--module" in said and "--no-python" in said:
        raise UsageError("--module and --no-python: take one of them")
    if "--module" in said:
        entry = "module"
    if "--no-python" in said:
        entry = "program"
    hostfile, command = _split_command(rest, entry, said)
    return CommandLine(
        given={name: str(said[name]) for name in LAUNCHER_OPTIONS if name in said and name not in _REPEATED},
        flags=frozenset(name for name in (*LAUNCHER_FLAGS, *_FLAGS) if name in said),
        environment=dict(_variables(said.get("--env", ()), environment)),
        hostfile=hostfile,
        entry=entry,
        command=command,
        nodes=_node_range(str(said["--nnodes"])) if "--nnodes" in said else None,
        ranks_per_node=str(said.get("--nproc-per-node", "slots")),
        max_restarts=whole("--max-restarts", said),
        run_id=str(said.get("--rdzv-id", "none")),
        role=str(said.get("--role", "default")),
        log_dir=str(said["--log-dir"]) if "--log-dir" in said else None,
        redirects=_streams("--redirects", said),
        tee=_streams("--tee", said),
        shown_ranks=_ranks(said),
        master_port=whole("--master-port", said),
        shutdown_timeout_s=seconds("--shutdown-timeout", said, 30.0),
        unused=tuple(f"{name} is not used: {why}" for name, why in UNUSED.items() if name in said),
    )


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in (*LAUNCHER_OPTIONS, *USED, *UNUSED, *REFUSED):
        if name in _REPEATED:
            parser.add_argument(name, action="append")
        else:
            parser.add_argument(name, nargs="?" if name in REFUSED else None, const="" if name in REFUSED else None)
    for name in (*LAUNCHER_FLAGS, *_FLAGS):
        parser.add_argument(name, action="store_true")
    return parser


def _dashed(word: str) -> str:
    """An option as it is in the tables: `--nproc_per_node=2` as `--nproc-per-node=2`, `-m` as `--module`."""
    if not word.startswith("-"):
        return word
    name, equals, value = word.partition("=")
    if name in _SHORT:
        return _SHORT[name] + equals + value
    if not name.startswith("--") or name == "--":
        return word
    return f"{_whole_name(name.replace('_', '-'))}{equals}{value}"


def _whole_name(name: str) -> str:
    """An option of torchrun's may be shortened as long as it is like no other of them, as argparse has it."""
    torchruns = (*USED, *_FLAGS, *UNUSED, *(each for each in REFUSED if each not in _DLROVERS), "--help")
    if name in (*torchruns, *LAUNCHER_OPTIONS, *LAUNCHER_FLAGS, *REFUSED):
        return name
    meant = [each for each in torchruns if each.startswith(name)]
    if len(meant) > 1:
        raise UsageError(f"{name}: this may be {' or '.join(meant)}; write it out")
    return meant[0] if meant else name


def _until_command(words: Sequence[str]) -> Sequence[str]:
    """The options before the script: those that take a value take the next word."""
    flags = (*LAUNCHER_FLAGS, *_FLAGS, "--help")
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        name = _dashed(words[at])
        is_whole = "=" in name or name in flags or name in REFUSED
        at += 1 if is_whole else 2
    return words[:at]


def _split_command(rest: tuple[str, ...], entry: str, said: Mapping[str, object]) -> tuple[str | None, tuple[str, ...]]:
    """Tell a hostfile from what follows it: before a script, a word that is no Python file."""
    if rest[:1] == ("--",):
        rest = rest[1:]
    hostfile = None
    if entry == "script" and len(rest) > 1 and not rest[0].endswith(".py") and rest[1].endswith(".py"):
        hostfile, rest = rest[0], rest[1:]
    if hostfile is not None and "--hostfile" in said:
        raise UsageError(f"{hostfile}: --hostfile names the nodes already")
    if not rest:
        what = {"script": "a script", "module": "a module", "program": "a program"}[entry]
        raise UsageError(f"name {what} to run, as in: oobleck run --local 2 train.py")
    return hostfile, rest


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """torchrun's own variables: PET_NNODES is --nnodes."""
    said: dict[str, object] = {}
    for name in (*USED, *UNUSED, *REFUSED, *_FLAGS):
        value = environment.get(f"PET_{name[2:].replace('-', '_').upper()}")
        if value is None or (name in _FLAGS and value.lower() not in _TRUE):
            continue
        said[name] = value
    return said


def _variables(given: object, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    assert isinstance(given, list | tuple)
    for text in given:
        name, equals, value = str(text).partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env: {text!r} is not NAME or NAME=VALUE")
        if name in _OWN_VARIABLES:
            raise UsageError(f"--env: {name} is set for each rank by the run itself; {_OWN_VARIABLES[name]}")
        if not equals and name not in environment:
            raise UsageError(f"--env: {name} is not set here; give its value, as in {name}=1")
        yield name, value if equals else environment[name]


def _node_range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or len(text) > 20:
        raise UsageError(f"--nnodes: {text!r} is not N or MIN:MAX, as in 2:4")
    low, high = int(least), int(most or least)
    if not 1 <= low <= high <= MAX_NODES:
        raise UsageError(f"--nnodes: {text} is not possible; it must be MIN:MAX from 1 to {MAX_NODES}")
    return low, high


def whole(name: str, said: Mapping[str, object]) -> int | None:
    """The whole number that an option was given, if it was; who uses it says which are possible. Raises UsageError."""
    if name not in said:
        return None
    text = str(said[name])
    if not re.fullmatch(r"[+-]?[0-9]{1,300}", text):
        raise UsageError(f"{name}: {text!r} is not a whole number")
    return int(text)


def seconds(name: str, said: Mapping[str, object], default: float) -> float:
    """The seconds that an option was given. Raises UsageError."""
    try:
        return float(str(said.get(name, default)))
    except ValueError:
        raise UsageError(f"{name}: {said[name]!r} is not a number of seconds") from None


def _ranks(said: Mapping[str, object]) -> tuple[int, ...]:
    text = str(said.get("--local-ranks-filter", ""))
    if text and not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise UsageError(f"--local-ranks-filter: {text!r} is not a list of local ranks, as in 0,1")
    return tuple(int(each) for each in text.split(",") if each)


def _streams(name: str, said: Mapping[str, object]) -> RankStreams:
    """`3` for both streams of all ranks, 1 for stdout, 2 for stderr; `0:1,1:2` for single local ranks."""
    text = str(said.get(name, "0"))
    if re.fullmatch(r"[0-3]", text):
        return RankStreams(all=_redirection(text))
    if not re.fullmatch(r"[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*", text):
        raise UsageError(f"{name}: {text!r} is not 0, 1, 2, 3 or RANK:0-3,…, as in 0:3,1:2")
    pairs = (each.split(":") for each in text.split(","))
    return RankStreams(single=tuple((int(rank), _redirection(kind)) for rank, kind in pairs))


def _redirection(kind: str) -> Redirection:
    return Redirection(stdout=kind in "13", stderr=kind in "23")


def options_text() -> str:
    """All options, for `--help`."""
    ours = [(f"{name} {value}", text) for name, (value, text) in LAUNCHER_OPTIONS.items()]
    ours += list(LAUNCHER_FLAGS.items())
    width = max(len(name) for name, _ in ours)
    return "\n".join(
        (
            "Options of torchrun, as in --nproc-per-node or --nproc_per_node, or PET_NPROC_PER_NODE:",
            *(f"  {name} {value}" for name, value in USED.items()),
            f"  {', '.join(_FLAGS)}",
            f"  in short: {', '.join(f'{short} {long}' for short, long in _SHORT.items())}",
            f"  accepted and not used: {', '.join(UNUSED)}",
            "",
            "Options of oobleck run:",
            *(f"  {name.ljust(width)}  {text}" for name, text in ours),
        )
    )
