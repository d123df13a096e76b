"""The `oobleck` command: finds the command that the words name, loads only that, and reports its errors.

A command is a function with typer's annotations in a module of its own. `COMMANDS` names it and gives its
one line of help, so that `oobleck --help` imports none of them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Annotated

import typer

from oobleck import __version__, errors
from oobleck.host.streams import Output, as_output, open_standard_streams, settle

from .option_fields import GroupedCommand

Example = tuple[str, str]
"""A command line, and what it is for."""


class CliCommand:
    """A command, whose function's docstring is its long help."""

    def __init__(
        self,
        name: str,
        help: str,  # noqa: A002  as typer has it
        *examples: Example,
        target: str = "",
        subcommands: tuple[CliCommand, ...] = (),
        pass_through: bool = False,
    ) -> None:
        """`target` is `module:function`; by default, the function of the command's name in the module of its name.

        A command with `subcommands` is only their group. With `pass_through`, the command itself reads all words after
        its name, `--help` included.
        """
        self.name, self.help, self.examples = name, help, examples
        self.subcommands, self.pass_through = subcommands, pass_through
        self._target = target or f"oobleck.cli.{name}:{name}"

    def load(self) -> Callable[..., None]:
        module, _, function = self._target.partition(":")
        loaded: Callable[..., None] = getattr(import_module(module), function)
        return loaded


COMMANDS: tuple[CliCommand, ...] = (
    CliCommand(
        "up",
        "Train a job on the nodes of a hostfile, or on this machine.",
        ("oobleck up --local 4", "train the default job on four virtual nodes of this machine"),
        ("oobleck up hosts.txt --job job.yaml", "train on the nodes of a hostfile"),
        ("oobleck up hosts.txt train.py -- --its-args", "train the job of a Python script"),
        ("oobleck up --hosts-from ./hosts.sh", "train on the nodes that a command prints, now and later"),
        ("oobleck up hosts.txt --dry-run", "show the plan and start nothing"),
    ),
    CliCommand(
        "run",
        "Run a script that was written for torchrun, and start it again when a process or a node fails.",
        ("oobleck run --nproc-per-node 8 train.py", "on this machine, as torchrun does"),
        ("oobleck run --nproc-per-node 8 hosts.txt train.py", "on all nodes of a hostfile"),
        ("oobleck run --nnodes 2:4 --max-restarts 3 hosts.txt train.py", "on at least two of them, at most four"),
        ("oobleck run --local 4 -m package.train", "a module, on four virtual nodes of this machine"),
        pass_through=True,
    ),
    CliCommand(
        "node",
        "Offer this machine to a run that cannot log in to it.",
        ("oobleck node node.json", "dial in to the master of a run that was started with --dial-in"),
        ("oobleck node node.json 'worker3 slots=8'", "by another name, with eight devices"),
    ),
    CliCommand(
        "keys",
        "Make the keys of a run and its nodes beforehand.",
        ("oobleck keys keys --master oobleck-master:7077", "two files, as for Kubernetes' Secrets"),
        target="oobleck.cli.node:keys",
    ),
    CliCommand(
        "check",
        "Test nodes before a job, and name the faulty and the slow ones.",
        ("oobleck check hosts.txt", "every node alone, then in pairs"),
        ("oobleck check hosts.txt --json", "machine-readable; the exit status is 0 only if all are healthy"),
    ),
    CliCommand(
        "verify",
        "Compare a job on virtual nodes with the script by itself, step by step.",
        ("oobleck verify train.py -- --its-args", "a script: eight steps by itself, and on four virtual nodes"),
        ("oobleck verify --job job.yaml --steps 20", "a job file, with the uncut model in one process"),
        ("oobleck verify train.py --json", "machine-readable; the exit status is 0 only if all is equal"),
    ),
    CliCommand(
        "plan",
        "Show the pipelines that a job would use, and what failures would do to them.",
        ("oobleck plan --profile gpt2.json --nodes 13 --global-batch 128", "the plan on 13 nodes"),
        ("oobleck plan … --after-losing node3,node7", "and what follows the loss of two of them"),
    ),
    CliCommand(
        "sim",
        "Play a failure trace: what a job would do on a cluster that fails like that.",
        ("oobleck sim --failures trace.json --model gpt3-6.7b --device A100 …", "with estimated step times"),
        ("oobleck sim --failures trace.json --policy oobleck,varuna,restart …", "compared with other systems"),
    ),
    CliCommand(
        "trace",
        "Make, convert and describe failure traces.",
        ("oobleck trace generate --nodes 64 --duration 7d --preset spot-p3 -o t.json", "from published rates"),
        ("oobleck trace convert p3-trace.csv -o t.json", "from a public trace"),
        ("oobleck trace info t.json", "its contents"),
        subcommands=(
            CliCommand(
                "generate",
                "Generate a trace from published rates, or from your own.",
                ("oobleck trace generate --nodes 2048 --duration 54d --preset llama3", "hardware failures"),
                ("oobleck trace generate --nodes 64 --duration 1d --mtbf 10m --repair 1h", "one in ten minutes"),
                target="oobleck.cli.trace:generate_trace",
            ),
            CliCommand(
                "convert",
                "Read a public trace of another format.",
                ("oobleck trace convert fault_trace.json --nodes 400", "the format is detected"),
                target="oobleck.cli.trace:convert_trace",
            ),
            CliCommand(
                "info",
                "Show the contents of a trace.",
                ("oobleck trace info trace.json", "nodes, rates, nodes that are up over time"),
                target="oobleck.cli.trace:trace_info",
            ),
        ),
    ),
    CliCommand(
        "checkpoint",
        "Show, verify and convert what runs have saved.",
        ("oobleck checkpoint list", "the checkpoints of all runs"),
        ("oobleck checkpoint verify gpt2-demo", "read every byte of a run's newest one"),
        ("oobleck checkpoint export gpt2-demo model/", "for transformers' from_pretrained"),
        subcommands=(
            CliCommand(
                "list",
                "Show the checkpoints of a run, or of all runs.",
                ("oobleck checkpoint list gpt2-demo", "of one run"),
                target="oobleck.cli.checkpoint:list_checkpoints",
            ),
            CliCommand(
                "inspect",
                "Show the contents of a checkpoint.",
                ("oobleck checkpoint inspect gpt2-demo", "a run's newest one"),
                target="oobleck.cli.checkpoint:inspect_checkpoint",
            ),
            CliCommand(
                "verify",
                "Compare every byte of a checkpoint with its checksums.",
                ("oobleck checkpoint verify gpt2-demo", "the exit code is 1 if anything is wrong"),
                target="oobleck.cli.checkpoint:verify_checkpoint",
            ),
            CliCommand(
                "export",
                "Write a checkpoint for transformers, PEFT or torch.",
                ("oobleck checkpoint export gpt2-demo model/ --format hf", "as save_pretrained does"),
                target="oobleck.cli.checkpoint:export_checkpoint",
            ),
            CliCommand(
                "import",
                "Make a checkpoint from a model or a state of torch's DCP.",
                ("oobleck checkpoint import model/ imported/", "then `oobleck up … --resume imported/`"),
                target="oobleck.cli.checkpoint:import_checkpoint",
            ),
        ),
    ),
    CliCommand(
        "profile",
        "Measure what a job's layers cost on this machine.",
        ("oobleck profile job.yaml --output gpt2.json", "measure a job's model, for `oobleck plan --profile`"),
        ("oobleck profile train.py --device cuda -- --its-args", "a script's, on this machine's GPU"),
    ),
    CliCommand(
        "status",
        "Show what a run is doing.",
        ("oobleck status", "the only active run"),
        ("oobleck status gpt2-demo --json", "a run by its tag, machine-readable"),
        ("oobleck status --watch", "until it ends, or until Ctrl-C"),
        target="oobleck.cli.control:status",
    ),
    CliCommand(
        "list",
        "Show all runs, active and ended ones.",
        ("oobleck list", "what became of each, and the disk space that it takes"),
        target="oobleck.cli.runs:list_runs",
    ),
    CliCommand(
        "attach",
        "Follow a run until it ends.",
        ("oobleck attach my-llama", "its dashboard; Ctrl-C leaves, and the run goes on"),
        target="oobleck.cli.runs:attach",
    ),
    CliCommand(
        "resume",
        "Start a run again by the command that it was started with.",
        ("oobleck resume my-llama", "it continues, or is taken over from a master that has died"),
        target="oobleck.cli.runs:resume",
    ),
    CliCommand(
        "logs",
        "Show what agents and workers write on the nodes.",
        ("oobleck logs", "of all nodes of the only active run, or of the newest"),
        ("oobleck logs -f node2", "one node's, until the run ends"),
        ("oobleck logs --tag gpt2-demo -n 20", "the last lines of each node"),
        target="oobleck.cli.following.logs:logs",
    ),
    CliCommand(
        "events",
        "Explain what went wrong in a run.",
        ("oobleck events", "the newest run: each failure with its cause, response and cost"),
        ("oobleck events gpt2-demo --follow", "report failures as they happen"),
    ),
    CliCommand(
        "report",
        "Write one HTML page about a run.",
        ("oobleck report", "the newest run; the page goes next to its journal"),
        ("oobleck report gpt2-demo -o report.html", "a run by its tag"),
    ),
    CliCommand(
        "ui",
        "Show the report of a run in a browser, and keep it up to date.",
        ("oobleck ui", "the newest run; prints the address of the page"),
        ("oobleck ui gpt2-demo --port 7070", "a run by its tag, at a port that a tunnel leads to"),
        target="oobleck.cli.following.page:ui",
    ),
    CliCommand(
        "kill",
        "Kill a node of a run, to see it recover.",
        ("oobleck kill node2", "a node of the only active run"),
        ("oobleck kill node2 --tag gpt2-demo", "a node of a run by its tag"),
        target="oobleck.cli.control:kill",
    ),
    CliCommand(
        "add",
        "Take nodes into a run, or lost ones back.",
        ("oobleck add node2", "take a lost node back"),
        ("oobleck add 'node7 slots=1 port=2222'", "a new node, written as in a hostfile"),
        target="oobleck.cli.control:add",
    ),
    CliCommand(
        "drain",
        "Take a node out of a run.",
        ("oobleck drain node2", "it finishes the step, and gives away what only it holds"),
        target="oobleck.cli.control:drain",
    ),
    CliCommand(
        "chaos",
        "Play a failure trace on a run.",
        ("oobleck chaos examples/chaos.json --local 4", "on a new run of the default job"),
        ("oobleck chaos trace.json --tag gpt2-demo --speedup 60", "on an active run, one minute per second"),
    ),
    CliCommand(
        "stop",
        "Finish the step and end a run.",
        ("oobleck stop", "finish the step in flight, then end"),
        ("oobleck stop gpt2-demo --now", "end at once"),
        target="oobleck.cli.control:stop",
    ),
    CliCommand(
        "rm",
        "Remove runs: journals, logs and checkpoints.",
        ("oobleck rm gpt2-demo", "all that it has left on this machine"),
        target="oobleck.cli.runs:rm",
    ),
    CliCommand(
        "clean",
        "Remove runs that ended long ago.",
        ("oobleck clean --older-than 30d", "show them; with --yes they are removed"),
        target="oobleck.cli.runs:clean",
    ),
    CliCommand(
        "init",
        "Write a job file to start from.",
        ("oobleck init", "job.yaml, and a schema by which editors complete and check it"),
        target="oobleck.cli.starter:init",
    ),
    CliCommand(
        "schema",
        "Print the JSON schema of job files.",
        ("oobleck schema", "for an editor's settings"),
        target="oobleck.cli.starter:schema",
    ),
    CliCommand(
        "version",
        "Show the versions of Oobleck and of what it runs on.",
    ),
)

_CONTEXT: dict[str, object] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

# `oobleck run` reads all words itself, because `--help` after the script is the script's own.
_PASS_THROUGH: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

_EXAMPLES = (
    ("oobleck up --local 4", "train the default job on four virtual nodes of this machine"),
    ("oobleck up hosts.txt --job job.yaml", "train on the nodes of a hostfile"),
    ("oobleck status", "see what the run is doing, from another terminal"),
    ("oobleck kill node2", "lose a node, and watch the run continue without it"),
)


def main(arguments: Sequence[str] | None = None, *, commands: Sequence[CliCommand] = COMMANDS) -> int:
    """Run a command line, by default this process's, and return its exit status.

    An OobleckError becomes a message on stderr. Anything else is a bug and keeps its traceback.
    """
    open_standard_streams()
    stdout = as_output(sys.stdout)
    status = _run(list(sys.argv[1:] if arguments is None else arguments), commands, stdout)
    failure = settle(stdout)
    # A command whose answer is lost has failed; a run lasts without its output, and another error tells more.
    if failure is None or status != errors.ExitCode.DONE or stdout.lasting:
        return status
    if failure.errno != errno.EPIPE:  # otherwise the reader is gone, as with `| head`
        print(f"oobleck: standard output: {failure.strerror}", file=sys.stderr)  # noqa: T201 - as below
    return errors.ExitCode.FAILED


_FORMER = {"get_agent_list": "status", "kill_agent": "kill NODE", "run_singlenode": "up --local N", "ls": "list"}
"""Commands of Oobleck 0.1 and of other tools, and what they are called here."""


def _run(words: list[str], commands: Sequence[CliCommand], stdout: Output) -> int:
    try:
        if words and words[0] in _FORMER:
            raise errors.UsageError(f"{words[0]}: there is no such command; it is `oobleck {_FORMER[words[0]]}`")
        _application(words, commands, os.environ)(args=words, prog_name="oobleck")
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return errors.ExitCode.DONE if end.code is None else errors.ExitCode.FAILED
    except KeyboardInterrupt:
        return errors.ExitCode.INTERRUPTED
    except errors.OobleckError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        return _report_group(group)
    except OSError as error:
        if error is stdout.failure:
            return errors.ExitCode.DONE  # `main` reports it
        # An error that names no file is a bug of ours, and keeps its traceback.
        if error.filename is None:
            raise
        return _report(_of_file(error))
    return errors.ExitCode.DONE


def _of_file(error: OSError) -> errors.ConfigError:
    """Turn a path's OSError into a message: a full disk, a name that is too long, a link to itself."""
    return errors.ConfigError(f"{os.fsdecode(error.filename)}: {error.strerror}")


def _application(
    arguments: Sequence[str], commands: Sequence[CliCommand], environment: Mapping[str, str]
) -> typer.Typer:
    """Return the application that lists all commands and has loaded the one that the arguments name."""
    app = typer.Typer(
        name="oobleck",
        help="Resilient distributed training of large models: nodes fail, training continues.",
        epilog=f"{_epilog(_EXAMPLES)}\n\n{errors.EXIT_CODES_TEXT}",
        no_args_is_help=True,
        rich_markup_mode=None,
        # A bug keeps Python's own traceback.
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )
    app.callback()(_oobleck)
    # A shell that completes a command line passes it in this variable instead of the arguments.
    _add_commands(app, commands, arguments or environment.get("COMP_WORDS", "").split()[1:])
    return app


def _add_commands(app: typer.Typer, commands: Sequence[CliCommand], words: Sequence[str]) -> None:
    # No option before the command takes a value, so the first other word is the command.
    asked = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    for command in commands:
        is_asked = asked < len(words) and words[asked] == command.name
        if command.subcommands:
            group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, context_settings=_CONTEXT)
            _add_commands(group, command.subcommands, words[asked + 1 :] if is_asked else ())
            app.add_typer(group, name=command.name, help=command.help, epilog=_epilog(command.examples))
        else:
            app.command(
                command.name,
                cls=GroupedCommand,
                # Without a `help`, typer takes the function's docstring, which is the long one.
                help=None if is_asked else command.help,
                short_help=command.help,
                epilog=_epilog(command.examples),
                context_settings=dict(_PASS_THROUGH) if command.pass_through else None,
            )(command.load() if is_asked else _not_loaded)


def _epilog(examples: Sequence[Example]) -> str | None:
    width = max((len(line) for line, _ in examples), default=0)
    rows = (f"  {line.ljust(width)}  {purpose}" for line, purpose in examples)
    # The leading mark keeps click from filling the examples into a paragraph.
    return "\n".join(("\b", "Examples:", *rows)) if examples else None


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"oobleck {__version__}")
        raise typer.Exit


def _oobleck(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before any command; the callback handles `--version` while they are read."""


def _not_loaded() -> None:
    raise AssertionError("a command was run that the command line does not name")


def _report(error: errors.OobleckError) -> errors.ExitCode:
    print(f"oobleck: {error}", file=sys.stderr)  # noqa: T201 - the one place that prints errors
    return errors.exit_code_of(error)


def _report_group(group: BaseExceptionGroup[BaseException]) -> errors.ExitCode:
    """Report the errors of concurrent tasks: ours as messages, each once; a bug is raised as it is."""
    leaves = errors.leaves_of(group)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return errors.ExitCode.INTERRUPTED
    reported = [_of_file(leaf) if isinstance(leaf, OSError) and leaf.filename is not None else leaf for leaf in leaves]
    ours = {str(leaf): leaf for leaf in reported if isinstance(leaf, errors.OobleckError)}
    if not all(isinstance(leaf, errors.OobleckError) for leaf in reported):
        raise group
    codes = [_report(error) for error in ours.values()]
    return codes[0]
