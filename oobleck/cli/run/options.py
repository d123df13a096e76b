"""Reads the command lines of torchrun and dlrover-run for `oobleck run`, in both spellings, and `PET_*` variables.

The tables have all options of torchrun 2.13. An option without a meaning here is accepted with a notice; one that would
change what a script does, and is missing here, is refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from oobleck.cli.inputs import NodeOptions, ReachOptions, read_variables
from oobleck.cli.option_fields import declared_options
from oobleck.control.node_ranks import OWN_VARIABLES
from oobleck.errors import UsageError
from oobleck.host.user_path import expand_user
from oobleck.job import MAX_NODES, ControlSpec, tag_of
from oobleck.job.bounds import bounds_of, require
from oobleck.job.ranks import DEFAULT_COPY_RATE, DEFAULT_RESTARTS, RanksSpec, RankStreams, Redirection
from oobleck.storage import scripts

# For a script, --hosts-from runs at its default interval.
_SHARED = [
    each for group in (NodeOptions, ReachOptions) for each in declared_options(group) if each[0] != "--hosts-every"
]
LAUNCHER_OPTIONS = {
    "--hostfile": ("FILE", "Nodes, one per line; in place of HOSTFILE before the script."),
    "--local": ("N", "Run on N virtual nodes of this machine (1 if no nodes are named)."),
    **{name: (value, text) for name, value, text in _SHARED if value is not None},
    "--tag": ("NAME", "Name of the run; by default, the script's."),
    "--base-dir": ("DIRECTORY", "Directory of all runs."),
    "--directory": ("DIRECTORY", "Where the script runs, on every node; by default, the current directory."),
    "--env": ("NAME[=VALUE]", "Give ranks this variable, by default with its value here; may be repeated."),
    "--env-file": ("FILE", "Give ranks the variables of a file with lines NAME=VALUE or NAME; --env wins."),
    "--workdir": ("DIRECTORY", "Copy this directory to all nodes, without what git ignores; the script runs in it."),
    "--hang-timeout": ("SECONDS", "How long ranks may print and save nothing while one waits (600; 0: no limit)."),
    "--join-timeout": ("SECONDS", "How long to wait for MIN nodes (600)."),
    "--node-unit": ("N", "Run on a multiple of N nodes (1)."),
    "--copies": (
        "N",
        "How many other nodes get a copy of sharded states (1; 0: none); xor:K keeps a parity of K nodes.",
    ),
    "--spares": ("N", "How many processes of a node have run up to `oobleck.attempts`, for lost ranks' places (1)."),
    "--copy-rate": ("RATE", "How fast a node may send copies, as in 2GB/s (256MB/s)."),
    "--lease": ("SECONDS", "How long a node may be silent before it is lost (3)."),
}
LAUNCHER_FLAGS = {
    **{name: text for name, value, text in _SHARED if value is None},
    "--no-warm": "Start every generation from nothing, as torchrun does.",
    "--network-check": "Check the nodes first, and leave faulty ones out.",
    "--exclude-straggler": "With --network-check: leave slow ones out too.",
    "--save-at-breakpoint": "After a failure, write what ranks have saved in memory to disk; this always happens.",
}
_REPEATED = ("--env", "--env-file")

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
REFUSED = {
    "--duplicate-stdout-filters": "filter the files below --log-dir",
    "--duplicate-stderr-filters": "filter the files below --log-dir",
    "--logs-specs": "--log-dir, --redirects and --tee say what is written where",
    "--numa-binding": "start the script through numactl with --no-python",
    "--comm-perf-test": "`oobleck check` measures the network",
    "--auto-config": "name the options",
    "--auto-tunning": "name the options",
}
"""Options of torchrun and dlrover-run that do not exist here, and what to use instead."""
_OWN_VARIABLES = {
    **OWN_VARIABLES,
    **dict.fromkeys(
        (scripts.MEMORY_VARIABLE, scripts.START_VARIABLE, scripts.SAVED_VARIABLE, scripts.LOCAL_RANK_VARIABLE),
        f"{scripts.DIRECTORY_VARIABLE} says where states lie",
    ),
    scripts.COPIES_VARIABLE: "--copies sets it",
    scripts.GRACE_VARIABLE: "--shutdown-timeout sets it",
}
_DLROVERS = ("--comm-perf-test", "--auto-config", "--auto-tunning")
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"}
_TRUE = ("1", "true", "t", "yes", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    own: Mapping[str, str]
    """The options of `LAUNCHER_OPTIONS`, keyed by name."""
    flags: frozenset[str]
    hostfile: str | None
    nodes: tuple[int, int] | None
    """The range of `--nnodes`, if it is there."""
    spec: RanksSpec
    """All but the numbers of nodes."""
    unused: tuple[str, ...]
    """A notice for each option that has no meaning here."""


class HelpAsked(Exception):
    """Raised for a `--help` before the script."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `oobleck run --help` shows what there is")


def parse_command_line(words: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """Read the words after `oobleck run`, and torchrun's variables PET_*.

    Raises UsageError, and ConfigError for a value that `RanksSpec` does not allow.
    """
    options = _until_command(words)
    rest = tuple(words[len(options) :])
    if any(_dashed(word) == "--help" for word in options):
        raise HelpAsked
    known, unknown = _parser().parse_known_args([_dashed(word) for word in options])
    if unknown:
        raise UsageError(f"{unknown[0]}: there is no such option; `oobleck run --help` shows what there is")
    values = {f"--{name.replace('_', '-')}": value for name, value in vars(known).items() if value not in (None, False)}
    values = {**_from_environment(environment), **values}  # as in torchrun, the command line overrides the environment
    for name, instead in REFUSED.items():
        if name in values:
            raise UsageError(f"{name}: `oobleck run` has no such option; {instead}")
    if "--module" in values and "--no-python" in values:
        raise UsageError("--module and --no-python: use only one of them")
    entry: Literal["script", "module", "program"] = (
        "module" if "--module" in values else "program" if "--no-python" in values else "script"
    )
    hostfile, command = _split_command(rest, entry, values)
    own = {name: str(values[name]) for name in LAUNCHER_OPTIONS if name in values and name not in _REPEATED}
    flags = frozenset(name for name in (*LAUNCHER_FLAGS, *_FLAGS) if name in values)
    spec = RanksSpec(
        tag=own.get("--tag", _tag_of(command[0])),
        is_tag_given="--tag" in own,
        entry=entry,
        command=command,
        directory=str(expand_user(Path(own.get("--directory", "."))).absolute()),
        ranks_per_node=str(values.get("--nproc-per-node", "slots")),
        max_nodes=MAX_NODES,
        max_restarts=DEFAULT_RESTARTS if (restarts := whole("--max-restarts", values)) is None else restarts,
        run_id=str(values.get("--rdzv-id", "none")),
        role=str(values.get("--role", "default")),
        environment=_variables(values, environment),
        log_dir=str(values["--log-dir"]) if "--log-dir" in values else None,
        redirects=_streams("--redirects", values),
        tee=_streams("--tee", values),
        shown_ranks=_ranks(values),
        master_port=whole("--master-port", values),
        shutdown_timeout_s=seconds("--shutdown-timeout", values, 30.0),
        hang_timeout_s=seconds("--hang-timeout", own, 600.0),
        join_timeout_s=seconds("--join-timeout", own, 600.0),
        spares=1 if (spares := whole("--spares", own)) is None else spares,
        **_copies(own),
        copy_rate=_rate(own),
        hides_devices="--virtual-local-rank" in flags,
        is_warmed="--no-warm" not in flags and entry != "program",
        control=_control(own),
    )
    return CommandLine(
        own=own,
        flags=flags,
        hostfile=hostfile,
        nodes=_node_range(str(values["--nnodes"])) if "--nnodes" in values else None,
        spec=spec,
        unused=tuple(f"{name} is not used: {why}" for name, why in UNUSED.items() if name in values),
    )


def _copies(own: Mapping[str, str]) -> dict[str, int]:
    text = own.get("--copies", "1")
    if text.startswith("xor:"):
        return {"copies": 1, "parity_nodes": _whole_number("--copies", text.removeprefix("xor:"), shown_as=text)}
    return {"copies": _whole_number("--copies", text)}


def _control(own: Mapping[str, str]) -> ControlSpec:
    lease_s, lease_bounds = seconds("--lease", own, 3.0), bounds_of(ControlSpec)["lease_s"]
    require(lease_bounds.hold(lease_s), "lease_s", lease_s, str(lease_bounds))
    return ControlSpec(lease_s=lease_s, heartbeat_interval_s=min(0.5, lease_s / 2), relay_nodes=0)


def _tag_of(command: str) -> str:
    name = Path(command).name.removesuffix(".py")
    return tag_of(name, otherwise="script")


def _parser() -> _Parser:
    # `_whole_name` completes names, by torchrun's options alone.
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in (*LAUNCHER_OPTIONS, *USED, *UNUSED, *REFUSED):
        if name in _REPEATED:
            parser.add_argument(name, action="append")
        else:
            # A refused option may have a value or none; its own message follows in either case.
            parser.add_argument(name, nargs="?" if name in REFUSED else None, const="" if name in REFUSED else None)
    for name in (*LAUNCHER_FLAGS, *_FLAGS):
        parser.add_argument(name, action="store_true")
    return parser


def _dashed(word: str) -> str:
    """Spell an option as in the tables: `--nproc_per_node=2` as `--nproc-per-node=2`, `-m` as `--module`."""
    if not word.startswith("-"):
        return word
    name, equals, value = word.partition("=")
    if name in _SHORT:
        return _SHORT[name] + equals + value
    if not name.startswith("--") or name == "--":
        return word
    return f"{_whole_name(name.replace('_', '-'))}{equals}{value}"


def _whole_name(name: str) -> str:
    """Complete a shortened option. Like argparse, torchrun accepts any beginning that only one of its options has."""
    torchruns = (*USED, *_FLAGS, *UNUSED, *(each for each in REFUSED if each not in _DLROVERS), "--help")
    if name in (*torchruns, *LAUNCHER_OPTIONS, *LAUNCHER_FLAGS, *REFUSED):
        return name
    meant = [each for each in torchruns if each.startswith(name)]
    if len(meant) > 1:
        raise UsageError(f"{name}: this may be {' or '.join(meant)}; write it out")
    return meant[0] if meant else name


def _until_command(words: Sequence[str]) -> Sequence[str]:
    flags = (*LAUNCHER_FLAGS, *_FLAGS, "--help")
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        name = _dashed(words[at])
        is_whole = "=" in name or name in flags or name in REFUSED
        # The word after an option that is no flag is its value, whatever it looks like.
        at += 1 if is_whole else 2
    return words[:at]


def _split_command(
    rest: tuple[str, ...], entry: str, values: Mapping[str, object]
) -> tuple[str | None, tuple[str, ...]]:
    """Split a hostfile off: a word before a script that does not name a Python file."""
    if rest[:1] == ("--",):
        rest = rest[1:]
    hostfile = None
    if entry == "script" and len(rest) > 1 and not rest[0].endswith(".py") and rest[1].endswith(".py"):
        hostfile, rest = rest[0], rest[1:]
    if hostfile is not None and "--hostfile" in values:
        raise UsageError(f"{hostfile}: --hostfile names the nodes already")
    if not rest:
        what = {"script": "a script", "module": "a module", "program": "a program"}[entry]
        raise UsageError(f"name {what} to run, as in: oobleck run --local 2 train.py")
    return hostfile, rest


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Read torchrun's own variables: PET_NNODES stands for --nnodes."""
    values: dict[str, object] = {}
    for name in (*USED, *UNUSED, *REFUSED, *_FLAGS):
        value = environment.get(f"PET_{name[2:].replace('-', '_').upper()}")
        if value is None or (name in _FLAGS and value.lower() not in _TRUE):
            continue
        values[name] = value
    return values


def _variables(values: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    settings, files = values.get("--env", []), values.get("--env-file", [])
    assert isinstance(settings, list)
    assert isinstance(files, list)
    found = read_variables(settings, [Path(file) for file in files], environment)
    for name in found.keys() & _OWN_VARIABLES.keys():
        raise UsageError(f"--env: {name} is set for each rank by the run itself; {_OWN_VARIABLES[name]}")
    return found


def _node_range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or len(text) > 20:
        raise UsageError(f"--nnodes: {text!r} is not N or MIN:MAX, as in 2:4")
    low, high = int(least), int(most or least)
    if not 1 <= low <= high <= MAX_NODES:
        raise UsageError(f"--nnodes: {text} is not possible; it must be MIN:MAX from 1 to {MAX_NODES}")
    return low, high


def whole(name: str, values: Mapping[str, object]) -> int | None:
    """Return the whole number of an option, if it is there; the caller checks its bounds. Raises UsageError."""
    if name not in values:
        return None
    return _whole_number(name, str(values[name]))


def _whole_number(name: str, text: str, *, shown_as: str = "") -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,300}", text):
        raise UsageError(f"{name}: {shown_as or text!r} is not a whole number")
    return int(text)


def seconds(name: str, values: Mapping[str, object], default: float) -> float:
    """Return the seconds of an option, or their default. Raises UsageError."""
    try:
        return float(str(values.get(name, default)))
    except ValueError:
        raise UsageError(f"{name}: {values[name]!r} is not a number of seconds") from None


def _rate(own: Mapping[str, str]) -> float:
    text = own.get("--copy-rate")
    if text is None:
        return DEFAULT_COPY_RATE
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMGT]?)B/s", text)
    if match is None:
        raise UsageError(f"--copy-rate: {text!r} is not a rate, as in 500MB/s or 2GB/s")
    return float(match[1]) * 1000.0 ** " kMGT".index(match[2] or " ")


def _ranks(values: Mapping[str, object]) -> tuple[int, ...]:
    text = str(values.get("--local-ranks-filter", ""))
    if text and not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise UsageError(f"--local-ranks-filter: {text!r} is not a list of local ranks, as in 0,1")
    return tuple(int(each) for each in text.split(",") if each)


def _streams(name: str, values: Mapping[str, object]) -> RankStreams:
    """Read `3` for both streams of all ranks, 1 for stdout, 2 for stderr; `0:1,1:2` for single local ranks."""
    text = str(values.get(name, "0"))
    if re.fullmatch(r"[0-3]", text):
        return RankStreams(all=_redirection(text))
    if not re.fullmatch(r"[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*", text):
        raise UsageError(f"{name}: {text!r} is not 0, 1, 2, 3 or RANK:0-3,…, as in 0:3,1:2")
    pairs = (each.split(":") for each in text.split(","))
    return RankStreams(single=tuple((int(rank), _redirection(kind)) for rank, kind in pairs))


def _redirection(kind: str) -> Redirection:
    return Redirection(stdout=kind in "13", stderr=kind in "23")


_PANELS = (
    ("Nodes", ("--hostfile", "--local", *(name for name, _, _ in _SHARED), "--node-unit", "--join-timeout")),
    ("Node check", ("--network-check", "--exclude-straggler")),
    ("Code and environment", ("--directory", "--env", "--env-file", "--workdir")),
    ("Failures", ("--hang-timeout", "--lease", "--no-warm", "--save-at-breakpoint", "--spares")),
    ("Saved states", ("--copies", "--copy-rate")),
    ("Run", ("--tag", "--base-dir")),
)


def options_text() -> str:
    """Return all options in groups, for `--help`."""
    texts = {name: (f"{name} {value}", text) for name, (value, text) in LAUNCHER_OPTIONS.items()}
    texts |= {name: (name, text) for name, text in LAUNCHER_FLAGS.items()}
    width = max(len(name) for name, _ in texts.values())
    lines = [
        "Options of torchrun, as in --nproc-per-node or --nproc_per_node, or PET_NPROC_PER_NODE:",
        *(f"  {name} {value}" for name, value in USED.items()),
        f"  {', '.join(_FLAGS)}",
        f"  in short: {', '.join(f'{short} {long}' for short, long in _SHORT.items())}",
        f"  accepted and not used: {', '.join(UNUSED)}",
        "",
        "Options of oobleck run:",
    ]
    for panel, names in _PANELS:
        lines += ["", f"{panel}:", *(f"  {texts[name][0].ljust(width)}  {texts[name][1]}" for name in names)]
    return "\n".join(lines)
