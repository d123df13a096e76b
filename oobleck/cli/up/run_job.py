"""Wires a run that trains together: coordinator, master, cluster, journal, control socket and output.

This is the composition root of `oobleck up`: the only place that knows both the roles and the real world.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import trio

from oobleck.cli import wiring
from oobleck.cli.common_options import base_dir_of
from oobleck.cli.inputs import DialIn, NodeSource, VirtualOnes, changed_keys
from oobleck.control.events import End, Remark, ScriptEnded, StopRequested
from oobleck.control.journal import Summary, prometheus_text
from oobleck.control.replay import FinishedRun, RunBooks
from oobleck.control.training import CONTINUING, Coordinator, ReplayedRun, finished_text
from oobleck.errors import CorruptCheckpoint, ExitCode, OobleckError, UsageError, leaves_of
from oobleck.host.places import place_of
from oobleck.host.script import SCRIPT_ANSWERS, SCRIPT_WAITS
from oobleck.host.streams import Output, lasting
from oobleck.host.writing import write_in_place
from oobleck.job import JobSpec, NodeSpec
from oobleck.job.secrets import Hiding, public_job
from oobleck.roles.master import Master
from oobleck.roles.master_ports import LiveCluster
from oobleck.runtime.control_socket import serve_control
from oobleck.runtime.descriptors import raise_descriptor_limit, require_descriptors
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import JournalWriter, aside_of, put_back, read_losses, set_aside
from oobleck.runtime.launchers import Launcher
from oobleck.runtime.metrics_output import MetricsAddress, MetricsOutput, serve_metrics
from oobleck.runtime.patient_clock import PatientClock
from oobleck.runtime.processes import CallbackProcess, TrainerProcess
from oobleck.runtime.traces import open_traces
from oobleck.runtime.webhook import Webhook
from oobleck.runtime.workdir import VARIABLE, Workdir
from oobleck.storage import CheckpointDirectory
from oobleck.ui.live import console_on, say
from oobleck.ui.summary_table import summary_table

from .detached import take_output
from .options import UpOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that `oobleck up` has read and checked."""

    options: UpOptions
    job: JobSpec
    """The job with the options applied."""
    source: NodeSource
    kills: tuple[tuple[str, int], ...]
    """(node, step): kill the node once the step is committed."""
    ssh_config: Path | None
    resume: str
    """`auto` takes over a run that lives without its master, or continues from the newest checkpoint; `never` starts
    from scratch; a path names the checkpoint to begin from."""
    metrics: MetricsAddress | None
    trainer: TrainerProcess | None
    """A script that waits in its `train()`."""
    workdir: Workdir | None
    arguments: tuple[str, ...]
    """The script's own."""
    owner: str
    """The path of the script or job file, if it belongs to a user."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(base_dir=base_dir_of(self.options.base_dir), tag=self.job.tag)


def run_job(run: Run) -> int:
    """Run the job to its end, and then the script that waits for it; return the exit code."""
    code = _run_job(run)
    return code if run.trainer is None else run.trainer.end(code, _checkpoints(run, run.directory).path)


def _run_job(run: Run) -> int:
    limit = raise_descriptor_limit()  # virtual nodes inherit it
    num_nodes = len(run.source.names)
    require_descriptors(limit, num_nodes, are_virtual=isinstance(run.source, VirtualOnes))
    directory = run.directory
    directory.create()
    # A run of days continues without its output.
    stdout = lasting(sys.stdout)
    output = lasting(sys.stderr) if run.options.as_json else stdout
    if run.options.plain or not console_on(output).is_terminal:
        say(output, f"oobleck up: {run.job.tag}, {num_nodes} nodes, logs in {directory.path}")
    with directory.lock():
        if run.owner:
            directory.note_owner(run.owner)
        # A living master would still write the journal, so it is read only with the lock.
        books, place = wiring.read_past(directory.journal) if run.resume in CONTINUING else (RunBooks(), 0)
        if (finished := _finished(run, directory, books)) is not None:
            say(output, f"oobleck up: {finished_text(finished.name, finished.step)}")
            summary = books.account.summary(read_losses(directory.journal))
            return ExitCode.DONE if _hand_out(run, summary, stdout) else ExitCode.FAILED
        take_output(directory)
        files = (directory.journal, directory.metrics)
        before = {path: aside_of(path) for path in files}
        with wiring.background_logging(Hiding(run.job, os.environ)):
            clock = PatientClock()
            try:
                past = _Past(books=books, place=place)
                end, summary = trio.run(_run, run, directory, output, clock, past, clock=clock)
            except BaseException as error:
                if all(isinstance(leaf, wiring.MasterLeaves) for leaf in leaves_of(error)):
                    say(output, "oobleck up: SIGTERM: training continues without this master, and the next takes over")
                    return ExitCode.RESUMABLE
                _tell_of_crash(run, error)
                raise
        if end.exit_code == ExitCode.DONE and not summary.generations:
            say(output, f"oobleck up: {end.reason}")
            for path in files:  # nothing happened, so the previous run stays the newest
                put_back(path, before[path])
            summary = wiring.read_past(directory.journal)[0].account.summary(read_losses(directory.journal))
    if summary.generations:  # otherwise nothing was trained
        console_on(output).print(summary_table(summary))
    is_written = _hand_out(run, summary, stdout)
    if end.exit_code != ExitCode.DONE:
        wiring.complain(end.reason, style="red")
        is_unsaved = run.job.checkpoint.enabled and summary.saved_step != summary.last_step
        if end.exit_code not in wiring.ENDS_WELL and summary.generations and is_unsaved:
            wiring.complain(
                f"states that are on no disk stay in the nodes' shared memory, as {directory.run_id}, for the next run "
                "of this tag"
            )
    # A summary that is not written fails a run that has ended well.
    return end.exit_code if is_written else end.exit_code or ExitCode.FAILED


def _tell_of_crash(run: Run, error: BaseException) -> None:
    """Tell the user what survives when the master crashes."""
    # Errors that it reports on purpose are printed elsewhere.
    if all(isinstance(leaf, (OobleckError, KeyboardInterrupt, SystemExit)) for leaf in leaves_of(error)):
        return
    minutes = run.job.control.orphan_timeout_s / 60
    with suppress(OSError):  # standard error itself may be what broke
        sys.stderr.write(
            f"oobleck: the master has crashed. Its agents train on for up to {minutes:g} minutes without it: the same "
            "command takes the run over until then, and continues from its newest state after that\n"
        )


def _finished(run: Run, directory: RunDirectory, books: RunBooks) -> FinishedRun | None:
    """Return the previous run if it has done all of this job and this machine has its whole model."""
    found = books.finished
    if found is None or not found.is_all_of(run.job):
        return None
    checkpoints = _checkpoints(run, directory)
    try:
        manifest = checkpoints.manifest(found.name)
    except CorruptCheckpoint:
        return None
    # If the checkpoints are on other machines, their workers find out.
    return found if len(checkpoints.layers_here(manifest)) == len(manifest.layer_names) else None


def _checkpoints(run: Run, directory: RunDirectory) -> CheckpointDirectory:
    named = run.job.checkpoint.directory
    return CheckpointDirectory(place_of(named, "checkpoint.directory") if named else directory.path / "checkpoints")


def _hand_out(run: Run, summary: Summary, stdout: Output) -> bool:
    """Write the summary to where the options name; return False, after a message, if its file cannot be written."""
    if run.options.as_json:
        stdout.write(f"{summary.to_json()}\n")
    try:
        if run.options.summary is not None:
            write_in_place(run.options.summary, summary.to_json() + "\n")
    except OSError as error:
        print(f"oobleck: --summary: {run.options.summary}: {error.strerror}", file=sys.stderr)  # noqa: T201  the run is over
        return False
    return True


async def _run(
    run: Run, directory: RunDirectory, output: Output, clock: PatientClock, past: _Past
) -> tuple[End, Summary]:
    opened = wiring.open_nodes(
        run.source,
        directory,
        run.job.control,
        python=run.options.reach.python,
        ssh_config=run.ssh_config,
        checks=not run.options.no_check,
        tell=lambda text: say(output, f"oobleck up: {text}"),
        renew_keys=run.resume == "never",
        num_devices=run.job.devices_per_stage,
        variables=run.job.env,
        workdir=run.workdir,
    )
    async with opened as nodes, trio.open_nursery() as nursery:
        launcher, cluster = nodes.launcher, nodes.cluster
        past = await _find_past(run, directory, cluster, launcher, past)
        # A command that is refused must not be taken for that of the run that lives here: `oobleck resume` gives it.
        directory.note_command(["oobleck", *sys.argv[1:]], run.arguments)
        _, chosen, remarks = await nodes.begin(
            lambda text: say(output, f"oobleck up: {text} (--no-check leaves this out)"),
            waits=past.replayed is None,
            is_check_due=past.replayed is None,
        )
        # `session` exists before the first entry is written, and so before any gap.
        with JournalWriter(directory.journal, tell=lambda gap: session.tell_of_gap(gap)) as journal:
            master = _make_master(run, directory, cluster, journal, past, chosen, clock)
            is_replaced = isinstance(run.source, DialIn) and run.source.pods is not None
            session = wiring.Session(
                master, cluster, launcher, nursery, kills=run.kills, past=past.books, is_replaced=is_replaced
            )
            await session.serve(directory.control_socket, remarks)
            if past.remark is not None:
                session.remark("warning", past.remark)
            metrics = _start_metrics(directory, master, past)
            _keep_files(directory, journal, metrics, session, nursery, place=past.place)
            if run.metrics is not None:
                await nursery.start(
                    serve_metrics,
                    run.metrics,
                    lambda: prometheus_text(metrics.metrics.sample(master.now_s), run.job.tag),
                )
            try:
                async with trio.open_nursery() as watching:
                    session.show(output, watching, plain=run.options.plain)
                    callbacks = _start_callbacks(run, master, directory, watching)
                    end = await master.run()
                    # The callbacks get the last entries before their task is cancelled.
                    if callbacks is not None:
                        await callbacks.finish()
                    watching.cancel_scope.cancel()
                # After any other end, memory may hold the only copy of the newest state.
                if end.exit_code in wiring.ENDS_WELL:
                    await wiring.give_memory_back(cluster, master.nodes)
            finally:
                metrics.close()
        nursery.cancel_scope.cancel()
    return _with_journal(end, journal), session.account.summary(read_losses(directory.journal))


def _keep_files(
    directory: RunDirectory,
    journal: JournalWriter,
    metrics: MetricsOutput,
    session: wiring.Session,
    nursery: trio.Nursery,
    *,
    place: int,
) -> None:
    """Keep the journal's image up to date, and restore the run's directory if it is removed."""
    nursery.start_soon(partial(wiring.keep_image, directory.journal, lambda: journal.size_bytes, place=place))
    watch = partial(
        wiring.watch_run_directory,
        directory,
        journal,
        metrics,
        say=partial(session.remark, "error"),
        listen=partial(nursery.start_soon, serve_control, directory.control_socket, session.answer),
    )
    nursery.start_soon(watch)


def _with_journal(end: End, journal: JournalWriter) -> End:
    """Return the end of a run; one whose journal lacks entries is no success."""
    if not journal.num_missing or end.exit_code not in (*wiring.ENDS_WELL, ExitCode.NOT_SAVED):
        return end
    problem = "too many entries came while no write succeeded" if journal.problem is None else journal.problem.strerror
    lacking = f"{journal.num_missing} entries are MISSING from {journal.path}: {problem}"
    return End(exit_code=ExitCode.NOT_SAVED, reason=f"{end.reason}; {lacking}")


def _start_metrics(directory: RunDirectory, master: Master, past: _Past) -> MetricsOutput:
    if past.replayed is None:
        set_aside(directory.metrics)
    output = MetricsOutput(directory.metrics, past=past.books.metrics)
    master.observe(output.apply)
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    books: RunBooks = field(default_factory=RunBooks)
    place: int = 0
    """The books cover this many bytes of the journal."""
    replayed: ReplayedRun | None = None
    remark: str | None = None


async def _find_past(run: Run, directory: RunDirectory, cluster: LiveCluster, launcher: Launcher, past: _Past) -> _Past:
    """Look for a run that continues without its master, and set the journal of any other run aside.

    Raises UsageError for one that trains another job.
    """
    ranks = past.books.ranks
    await wiring.refuse_to_end(cluster, launcher, None if ranks is None else ranks.members, run.job.tag, "run")
    replayed = past.books.finish()
    if replayed is not None:
        # Virtual nodes have other ports with each master, and a hostfile may have changed.
        replayed.relocate({spec.name: spec for spec in launcher.nodes})
        if await wiring.is_any_alive(cluster, launcher, replayed.nodes):
            # The journal does not tell what happened in the gap, so no master can continue from it.
            if replayed.gap is not None:
                set_aside(directory.journal)
                text = f"the run continues without its master, and cannot be taken over: {replayed.gap.sentence}"
                return _Past(remark=f"{text}; its processes are ended, and this run begins from its newest state")
            if replayed.job != (job := public_job(run.job)):
                keys = changed_keys(replayed.job, job)
                changed = ", ".join("the files of --workdir" if key == f"env.{VARIABLE}" else key for key in keys)
                raise UsageError(
                    f"the run {run.job.tag} continues without its master, and its job differs from this one in "
                    f"{changed}; give the same job to take it over, or --resume never to end it and start from scratch"
                )
            if isinstance(run.source, VirtualOnes):
                _check_virtual(run, replayed, launcher.nodes[: run.source.count])
            return replace(past, replayed=replayed)
    if known := launcher.nodes[: len(run.source.names)]:  # otherwise they dial in later
        await wiring.end_left(cluster, launcher, directory.journal, known)
    set_aside(directory.journal)
    if replayed is None or not replayed.furthest_step:
        return _Past()
    return _Past(remark=_lost_run(replayed, launcher.nodes))


def _lost_run(replayed: ReplayedRun, known: Sequence[NodeSpec]) -> str:
    """Say what becomes of a run whose master is gone, and none of whose agents answers."""
    others = {member.spec.name for member in replayed.members.living} - {spec.name for spec in known}
    text = (
        f"the run before this one has committed step {replayed.furthest_step:,}, and none of its agents answers: what "
        "is newer than its newest state that nodes find is trained again"
    )
    if not others:
        return text
    limit_s = replayed.job.control.orphan_timeout_s
    return f"{text}; {', '.join(sorted(others))} may train on without a master, for {limit_s:g} s at most"


def _check_virtual(run: Run, replayed: ReplayedRun, asked: Sequence[NodeSpec]) -> None:
    """Raise UsageError if a run began on other virtual nodes than these."""
    began, named = (
        [(each.name, each.device, each.devices) for each in nodes] for nodes in (replayed.started.nodes, asked)
    )
    # The run would continue with the nodes that it began with.
    if began != named:
        raise UsageError(
            f"--local: the run {run.job.tag} continues without its master, on the {len(began)} virtual nodes that it "
            f"began with, and this asks for {len(named)} or for others; give the same to take it over (`oobleck add` "
            "and `oobleck drain` change them then), or --resume never to end it and start from scratch"
        )


def _make_master(
    run: Run,
    directory: RunDirectory,
    cluster: LiveCluster,
    journal: JournalWriter,
    past: _Past,
    known: tuple[NodeSpec, ...],
    clock: PatientClock,
) -> Master:
    coordinator = Coordinator(
        run.job,
        known,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        python_version=platform.python_version(),
        replayed=past.replayed,
        resume=run.resume,
    )
    return wiring.make_master(
        coordinator,
        run.job,
        directory=directory,
        cluster=cluster,
        journal=journal,
        clock=clock,
        hide=Hiding(run.job, os.environ),
        replayed=past.replayed,
    )


def _start_callbacks(
    run: Run, master: Master, directory: RunDirectory, nursery: trio.Nursery
) -> CallbackProcess | TrainerProcess | None:
    stop = StopRequested(now=False, exit_code=ExitCode.DONE, reason="a callback wanted training to stop")
    if run.job.control.webhook_url is not None:
        webhook = Webhook(run.job.control.webhook_url, run.job.tag)
        master.observe(webhook.tell)
        nursery.start_soon(webhook.run)
    if (traces := open_traces(run.job.tag)) is not None:
        master.observe(traces.tell)
        nursery.start_soon(traces.run)
    log, script = directory.path / "script.log", run.job.script
    process: CallbackProcess | TrainerProcess | None
    if run.trainer is not None:
        process = run.trainer
        process.begin(log, _checkpoints(run, directory).path, on_stop=lambda: master.submit(stop), answer=master.submit)
    elif run.job.report_to or (
        script is not None and "callbacks" in script.provides and SCRIPT_WAITS not in os.environ
    ):
        process = CallbackProcess(
            run.job,
            log=log,
            on_stop=lambda: master.submit(stop),
            report=lambda text: master.submit(Remark(level="warning", text=text)),
        )
    else:
        process = None
    # `oobleck verify` has the script's workers alone.
    if run.trainer is None and run.job.control.waits_for_script and os.environ.get(SCRIPT_WAITS) != SCRIPT_ANSWERS:
        master.submit(ScriptEnded())
    if process is None:
        return None
    master.observe(process.tell)
    nursery.start_soon(process.run)
    return process
