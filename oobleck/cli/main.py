"""The `oobleck` command: finds the command that was asked for, loads only that, and reports its errors.

A command is a function with typer's annotations in a module of its own. `COMMANDS` names it and gives its
one line of help, so that `oobleck --help` imports none of them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

import typer

from oobleck import __version__
from oobleck.errors import EXIT_CODES_TEXT, ConfigError, ExitCode, OobleckError, exit_code_of
from oobleck.host.streams import Output, as_output, open_standard_streams, settle

Examples = tuple[tuple[str, str], ...]
"""CliCommand lines, each with what it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliCommand:
    """A command: `target` is `module:function`, and the function's docstring is its long help.

    Without a target, that is the function of the command's name in the module of its name.
    """

    name: str
    target: str = ""
    help: str
    examples: Examples = ()
    subcommands: tuple[CliCommand, ...] = ()
    """Commands below this one, which has no target of its own then."""
    pass_through: bool = False
    """Whether it reads all words after its name itself, `--help` included."""

    def load(self) -> Callable[..., None]:
        """Import the command's module and return its function."""
        module, _, function = self.target.partition(":")
        loaded: Callable[..., None] = getattr(
            import_module(module or f"oobleck.cli.{self.name}"), function or self.name
        )
        return loaded


COMMANDS: tuple[CliCommand, ...] = (
    CliCommand(
        name="up",
        help="Train a job on the nodes of a hostfile, or on this machine.",
        examples=(
            ("oobleck up --local 4", "train the default job on four virtual nodes of this machine"),
            ("oobleck up hosts.txt --job job.yaml", "train on the nodes of a hostfile"),
            ("oobleck up hosts.txt train.py -- --its-args", "train what a Python script says"),
            ("oobleck up --hosts-from ./hosts.sh", "train on the nodes that a command prints, now and later"),
            ("oobleck up hosts.txt --dry-run", "show the plan and start nothing"),
        ),
    ),
    CliCommand(
        name="run",
        help="Run a script that was written for torchrun, and start it again when a process or a node fails.",
        pass_through=True,
        examples=(
            ("oobleck run --nproc-per-node 8 train.py", "on this machine, as torchrun does"),
            ("oobleck run --nproc-per-node 8 hosts.txt train.py", "on all nodes of a hostfile"),
            (
                "oobleck run --nnodes 2:4 --max-restarts 3 hosts.txt train.py",
                "on two of them at least, on four at most",
            ),
            ("oobleck run --local 4 -m package.train", "a module, on four virtual nodes of this machine"),
        ),
    ),
    CliCommand(
        name="node",
        help="Give this machine to a run, where nobody may log in.",
        examples=(
            ("oobleck node node.json", "dial in to the master of a run that was started with --dial-in"),
            ("oobleck node node.json 'worker3 slots=8'", "by another name, with eight devices"),
        ),
    ),
    CliCommand(
        name="keys",
        target="oobleck.cli.node:keys",
        help="Make the keys of a run and its nodes beforehand.",
        examples=(
            ("oobleck keys keys --master oobleck-master:7077", "two files, as Kubernetes' Secrets are made from"),
        ),
    ),
    CliCommand(
        name="check",
        help="Test nodes before a job, and name the faulty and the slow ones.",
        examples=(
            ("oobleck check hosts.txt", "every node alone, then in pairs"),
            ("oobleck check hosts.txt --json", "machine-readable; the exit status is 0 only when all are healthy"),
        ),
    ),
    CliCommand(
        name="verify",
        help="Compare a job on virtual nodes with the script by itself, step by step.",
        examples=(
            ("oobleck verify train.py -- --its-args", "a script: eight steps by itself, and on four virtual nodes"),
            ("oobleck verify --job job.yaml --steps 20", "a job file, with the uncut model in one process"),
            ("oobleck verify train.py --json", "machine-readable; the exit status is 0 only when all is equal"),
        ),
    ),
    CliCommand(
        name="plan",
        help="Show the pipelines that a job would use, and what failures would do to them.",
        examples=(
            ("oobleck plan --profile gpt2.json --nodes 13 --global-batch 128", "the plan on 13 nodes"),
            ("oobleck plan … --after-losing node3,node7", "and what follows the loss of two of them"),
        ),
    ),
    CliCommand(
        name="sim",
        help="Play a failure trace: what a job would do on a cluster that fails like that.",
        examples=(
            ("oobleck sim --failures trace.json --model gpt3-6.7b --device A100 …", "with estimated step times"),
            ("oobleck sim --failures trace.json --policy oobleck,varuna,restart …", "compared with other systems"),
        ),
    ),
    CliCommand(
        name="trace",
        help="Make, convert and look at failure traces.",
        examples=(
            ("oobleck trace generate --nodes 64 --duration 7d --preset spot-p3 -o t.json", "from published rates"),
            ("oobleck trace convert p3-trace.csv -o t.json", "from a public trace"),
            ("oobleck trace info t.json", "what is in it"),
        ),
        subcommands=(
            CliCommand(
                name="generate",
                target="oobleck.cli.trace:generate_trace",
                help="Generate a trace from published rates, or from your own.",
                examples=(
                    ("oobleck trace generate --nodes 2048 --duration 54d --preset llama3", "hardware failures"),
                    ("oobleck trace generate --nodes 64 --duration 1d --mtbf 10m --repair 1h", "one in ten minutes"),
                ),
            ),
            CliCommand(
                name="convert",
                target="oobleck.cli.trace:convert_trace",
                help="Read a public trace of another format.",
                examples=(("oobleck trace convert fault_trace.json --nodes 400", "the format is detected"),),
            ),
            CliCommand(
                name="info",
                target="oobleck.cli.trace:trace_info",
                help="Show what is in a trace.",
                examples=(("oobleck trace info trace.json", "nodes, rates, nodes that are up over time"),),
            ),
        ),
    ),
    CliCommand(
        name="checkpoint",
        help="See, verify and convert what runs have saved.",
        examples=(
            ("oobleck checkpoint list", "the checkpoints of all runs"),
            ("oobleck checkpoint verify gpt2-demo", "read every byte of a run's newest one"),
            ("oobleck checkpoint export gpt2-demo model/", "for transformers' from_pretrained"),
        ),
        subcommands=(
            CliCommand(
                name="list",
                target="oobleck.cli.checkpoint:list_checkpoints",
                help="Show the checkpoints of a run, or of all runs.",
                examples=(("oobleck checkpoint list gpt2-demo", "of one run"),),
            ),
            CliCommand(
                name="inspect",
                target="oobleck.cli.checkpoint:inspect_checkpoint",
                help="Show what is in a checkpoint.",
                examples=(("oobleck checkpoint inspect gpt2-demo", "a run's newest one"),),
            ),
            CliCommand(
                name="verify",
                target="oobleck.cli.checkpoint:verify_checkpoint",
                help="Compare every byte of a checkpoint with its checksums.",
                examples=(("oobleck checkpoint verify gpt2-demo", "exit code 1 when something is wrong"),),
            ),
            CliCommand(
                name="export",
                target="oobleck.cli.checkpoint:export_checkpoint",
                help="Write a checkpoint's weights as a model directory.",
                examples=(("oobleck checkpoint export gpt2-demo model/ --format hf", "as save_pretrained does"),),
            ),
            CliCommand(
                name="import",
                target="oobleck.cli.checkpoint:import_checkpoint",
                help="Make a checkpoint from a model directory.",
                examples=(("oobleck checkpoint import model/ imported/", "then `oobleck up … --resume imported/`"),),
            ),
        ),
    ),
    CliCommand(
        name="profile",
        help="Measure what a job's layers cost on this machine.",
        examples=(
            ("oobleck profile job.yaml --output gpt2.json", "measure a job's model, for `oobleck plan --profile`"),
            ("oobleck profile train.py --device cuda -- --its-args", "a script's, on this machine's GPU"),
        ),
    ),
    CliCommand(
        name="status",
        target="oobleck.cli.control:status",
        help="Show what a run is doing.",
        examples=(
            ("oobleck status", "the only active run"),
            ("oobleck status gpt2-demo --json", "a run by its tag, machine-readable"),
        ),
    ),
    CliCommand(
        name="events",
        help="Explain what went wrong in a run.",
        examples=(
            ("oobleck events", "the newest run: each failure with its cause, what was done, what it cost"),
            ("oobleck events gpt2-demo --follow", "report failures as they happen"),
        ),
    ),
    CliCommand(
        name="report",
        help="Write one HTML page about a run.",
        examples=(
            ("oobleck report", "the newest run; the page goes next to its journal"),
            ("oobleck report gpt2-demo -o report.html", "a run by its tag"),
        ),
    ),
    CliCommand(
        name="kill",
        target="oobleck.cli.control:kill",
        help="Kill a node of a run, to see it recover.",
        examples=(
            ("oobleck kill node2", "a node of the only active run"),
            ("oobleck kill node2 --tag gpt2-demo", "a node of a run by its tag"),
        ),
    ),
    CliCommand(
        name="add",
        target="oobleck.cli.control:add",
        help="Take nodes into a run, or lost ones back.",
        examples=(
            ("oobleck add node2", "take a lost node back"),
            ("oobleck add 'node7 slots=1 port=2222'", "a new node, written as in a hostfile"),
        ),
    ),
    CliCommand(
        name="drain",
        target="oobleck.cli.control:drain",
        help="Take a node out of a run.",
        examples=(("oobleck drain node2", "it finishes the step, and gives away what only it holds"),),
    ),
    CliCommand(
        name="chaos",
        help="Play a failure trace on a run.",
        examples=(
            ("oobleck chaos examples/chaos.json --local 4", "on a new run of the default job"),
            ("oobleck chaos trace.json --tag gpt2-demo --speedup 60", "on an active run, one minute per second"),
        ),
    ),
    CliCommand(
        name="stop",
        target="oobleck.cli.control:stop",
        help="Finish the step and end a run.",
        examples=(
            ("oobleck stop", "finish the step in flight, then end"),
            ("oobleck stop gpt2-demo --now", "end at once"),
        ),
    ),
    CliCommand(
        name="version",
        help="Show the versions of Oobleck and of what it runs on.",
    ),
)

_CONTEXT: dict[str, object] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

_PASS_THROUGH: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

_EXAMPLES: Examples = (
    ("oobleck up --local 4", "train the default job on four virtual nodes of this machine"),
    ("oobleck up hosts.txt --job job.yaml", "train on the nodes of a hostfile"),
    ("oobleck status", "see what the run is doing, from another terminal"),
    ("oobleck kill node2", "lose a node, and watch the run continue without it"),
)


def main(arguments: Sequence[str] | None = None, *, commands: Sequence[CliCommand] = COMMANDS) -> int:
    """Run a command line (by default this process's) and return its exit status.

    Errors of ours become a message on stderr. Anything else is a bug and keeps its traceback.
    """
    open_standard_streams()
    stdout = as_output(sys.stdout)
    status = _run(list(sys.argv[1:] if arguments is None else arguments), commands, stdout)
    failure = settle(stdout)
    if failure is None or status != ExitCode.DONE or stdout.lasting:
        return status
    if failure.errno != errno.EPIPE:  # else the reader has gone, as with `| head`
        print(f"oobleck: standard output: {failure.strerror}", file=sys.stderr)  # noqa: T201 - as below
    return ExitCode.FAILED


def _run(given: list[str], commands: Sequence[CliCommand], stdout: Output) -> int:
    try:
        _application(given, commands, os.environ)(args=given, prog_name="oobleck")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.DONE if end.code is None else ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OobleckError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        return _report_group(group)
    except OSError as error:
        if error is stdout.failure:
            return ExitCode.DONE  # said where it is settled
        if error.filename is None:
            raise
        return _report(_of_file(error))
    return ExitCode.DONE


def _of_file(error: OSError) -> ConfigError:
    """What an error of a path says: a disk is full, or somebody has named one that is too long or a link to itself."""
    return ConfigError(f"{os.fsdecode(error.filename)}: {error.strerror}")


def _application(
    arguments: Sequence[str], commands: Sequence[CliCommand], environment: Mapping[str, str]
) -> typer.Typer:
    """The application with all commands named, and the one that the arguments name loaded."""
    app = typer.Typer(
        name="oobleck",
        help="Resilient distributed training of large models: nodes fail, training continues.",
        epilog=f"{_listed(_EXAMPLES)}\n\n{EXIT_CODES_TEXT}",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )
    app.callback()(_oobleck)
    # A shell that completes a command line passes it in this variable instead of the arguments.
    _add_commands(app, commands, arguments or environment.get("COMP_WORDS", "").split()[1:])
    return app


def _add_commands(app: typer.Typer, commands: Sequence[CliCommand], words: Sequence[str]) -> None:
    """Add commands to an application, and load the one that the first of the words names."""
    asked = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    for command in commands:
        is_asked = asked < len(words) and words[asked] == command.name
        if command.subcommands:
            group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, context_settings=_CONTEXT)
            _add_commands(group, command.subcommands, words[asked + 1 :] if is_asked else ())
            app.add_typer(group, name=command.name, help=command.help, epilog=_epilog(command))
        else:
            settings = dict(_PASS_THROUGH) if command.pass_through else None
            app.command(
                command.name,
                help=None if is_asked else command.help,
                short_help=command.help,
                epilog=_epilog(command),
                context_settings=settings,
            )(command.load() if is_asked else _not_loaded)


def _epilog(command: CliCommand) -> str | None:
    return _listed(command.examples) if command.examples else None


def _listed(examples: Examples) -> str:
    """Examples one below the other; the leading mark keeps the help from filling them into a paragraph."""
    width = max(len(line) for line, _ in examples)
    return "\n".join(("\b", "Examples:", *(f"  {line.ljust(width)}  {purpose}" for line, purpose in examples)))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"oobleck {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
]


def _oobleck(*, version: VersionOption = False) -> None:
    """Options that stand before any command; `--version` is handled while they are read."""


def _not_loaded() -> None:
    raise AssertionError("a command was run that the command line does not name")


def _report(error: OobleckError) -> ExitCode:
    print(f"oobleck: {error}", file=sys.stderr)  # noqa: T201 - the one place that tells people of errors
    return exit_code_of(error)


def _report_group(group: BaseExceptionGroup[BaseException]) -> ExitCode:
    """Report what came out of concurrent tasks: our errors as messages, each once; bugs as they are."""
    leaves = list(_leaves(group))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return ExitCode.INTERRUPTED
    reported = [_of_file(leaf) if isinstance(leaf, OSError) and leaf.filename is not None else leaf for leaf in leaves]
    ours = {str(leaf): leaf for leaf in reported if isinstance(leaf, OobleckError)}
    if not ours or any(not isinstance(leaf, OobleckError) for leaf in reported):
        raise group
    codes = [_report(error) for error in ours.values()]
    return codes[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
