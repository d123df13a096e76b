"""A script that trains runs once from its first line to its last, in a process of its own that waits in its train()."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from oobleck.control.events import ScriptAnswered, ScriptEnded
from oobleck.control.journal import JobEnded
from oobleck.errors import ConfigError, UsageError
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.processes import TrainerProcess

TRAINER = """
import sys
from oobleck import Job
from oobleck.errors import ConfigError
from oobleck.host.handover import take_over

class Trainer:
    wants_stop = False
    def job(self): return Job(max_steps=int(sys.argv[1]))
    def resume(self, job): return "there"
    def follow(self, job): return self
    def saves_in(self, checkpoints): pass
    def take(self, entry): print("hears", entry.reason); self.wants_stop = entry.reason == "enough"
    def take_allowed(self): return (1, 2) if sys.argv[1] == '8' else None
    def finish(self, checkpoints): return checkpoints.name
"""
"""A trainer that takes no time to import."""
TRAINS = f"{TRAINER}\nprint('before', __name__)\nprint('after', take_over(Trainer()))"


def script(source: str, *arguments: str) -> ScriptSpec:
    return ScriptSpec(name="train.py", source=source, arguments=arguments, directory="/nowhere")


PLAIN = """
import transformers

class Mine(transformers.Trainer):
    "As a library has it that has imported the Trainer before a script puts another one in its place."

    def __init__(self):
        pass

Mine().train()
"""


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  another process makes it true
        await trio.sleep(0.01)


async def followed(
    process: TrainerProcess, log: Path, *reasons: str, answers: list[ScriptAnswered | ScriptEnded] | None = None
) -> int:
    """Tell a process of some ends; returns how often it wanted a stop."""
    stops: list[int] = []
    taken = [] if answers is None else answers
    process.begin(log, Path("/nowhere"), on_stop=lambda: stops.append(1), answer=taken.append)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.run)
            for reason in reasons:
                process.tell(JobEnded(t_s=1.0, exit_code=0, reason=reason))
            await until(lambda: log.exists() and log.read_text().count("hears") == len(reasons))
            await until(lambda: bool(stops) or "enough" not in reasons)
            await until(lambda: bool(taken) or answers is None)
            await process.finish()
    return len(stops)


async def test_the_lines_after_train_run_once_the_run_has_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    process = TrainerProcess(script(TRAINS, "7"))
    assert process.described.settings == '{"max_steps": 7}'
    assert process.resume == "there"
    assert await followed(process, tmp_path / "script.log", "one", "enough") == 1
    assert "after" not in capfd.readouterr().out
    assert process.end(0, tmp_path / "checkpoints") == 0
    assert capfd.readouterr().out == "after checkpoints\n"
    assert (tmp_path / "script.log").read_text().splitlines() == ["hears one", "hears enough"]


async def test_what_a_script_allows_reaches_the_master(tmp_path: Path):
    process, answers = TrainerProcess(script(TRAINS, "8")), list[ScriptAnswered | ScriptEnded]()
    assert await followed(process, tmp_path / "script.log", "one", answers=answers) == 0
    assert answers[0] == ScriptAnswered(step=1, through=2)
    assert process.end(0, tmp_path / "checkpoints") == 0


@pytest.mark.slow
def test_what_a_job_asks_for_beside_its_script_is_checked_before_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    checks = """
class Sized(Job):
    def check_for(self, job):
        print("tries", job.microbatch_size, job.sharding)
        if job.microbatch_size > 2: raise ConfigError(f"not {job.microbatch_size}")

class Cut(Trainer):
    def job(self): return Sized(max_steps=7, microbatch_size=1)

take_over(Cut())
"""
    process = TrainerProcess(script(f"{TRAINER}{checks}"))
    process.check_for(JobSpec(microbatch_size=1))
    process.check_for(JobSpec(microbatch_size=2))
    assert process.end(0, tmp_path) == 0
    assert capfd.readouterr().out == "tries 2 none\n"
    process = TrainerProcess(script(f"{TRAINER}{checks}"))
    process.check_for(JobSpec(microbatch_size=1, sharding="all", sharding_devices=2))
    assert process.end(0, tmp_path) == 0
    assert capfd.readouterr().out == "tries 1 all\n"
    process = TrainerProcess(script(f"{TRAINER}{checks}"))
    with pytest.raises(ConfigError, match="not 3"):
        process.check_for(JobSpec(microbatch_size=3, global_batch_size=12))


def test_a_run_that_fails_ends_the_script_in_train(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source = TRAINS.replace("print('after', take_over(Trainer()))", "try: take_over(Trainer())\nfinally: print('last')")
    process = TrainerProcess(script(f"{source}\nprint('after')", "7"))
    assert process.end(75, tmp_path) == 75
    assert capfd.readouterr().out == "before __main__\nlast\n"


@pytest.mark.slow
def test_what_fails_after_train_is_the_exit_status(tmp_path: Path):
    process = TrainerProcess(script(f"{TRAINS}\nsys.exit(9)", "7"))
    assert process.end(0, tmp_path) == 9


@pytest.mark.parametrize(
    ("source", "kind", "problem"),
    [
        ("x = 1", ConfigError, r"train\.py has reached its end without a call of `train\(\)`.*no function job\(\)"),
        pytest.param("x = 1\ny = x / 0", ConfigError, r"train\.py:2: ZeroDivisionError", marks=pytest.mark.slow),
        pytest.param(
            f"{TRAINER}\ntake_over(Trainer())", ConfigError, r"train\.py:\d+: IndexError", marks=pytest.mark.slow
        ),
        (
            f"{TRAINER}\nclass Bad(Trainer):\n    def job(self): raise ConfigError('leave fsdp out')\ntake_over(Bad())",
            ConfigError,
            "leave fsdp out",
        ),
        pytest.param(
            PLAIN,
            ConfigError,
            r"Mine.train\(\): its class is one of transformers' own Trainer, and would train in the",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_before_is_said(source: str, kind: type[UsageError], problem: str):
    with pytest.raises(kind, match=problem):
        TrainerProcess(script(source))


@pytest.mark.slow
def test_a_script_that_exits_by_itself_has_said_why(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exited:
        TrainerProcess(script("import argparse\nargparse.ArgumentParser().parse_args()", "--what"))
    assert exited.value.code == 2
    assert "unrecognized arguments: --what" in capfd.readouterr().err
