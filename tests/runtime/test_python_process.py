"""Neither the files of the current directory nor the variables of another launcher reach processes of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.runtime.processes import describe_script
from oobleck.runtime.python_process import as_no_rank, module_command, why_it_ended

SOURCES = Path(__file__).parents[2] / "oobleck"

RANKS_OF_OTHERS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "PMI_RANK": "0",
    "PMI_SIZE": "2",
    "PMIX_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "MPI_LOCALRANKID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""What torchrun, mpirun and srun say to a rank."""

SHADOWS = ("random.py", "json.py", "yaml.py", "trio.py", "oobleck.py")


def test_a_process_that_is_no_rank_keeps_all_other_variables() -> None:
    others = {"PATH": "/bin", "SLURM_JOB_ID": "7", "OMPI_MCA_btl": "tcp", "HF_HOME": "/data", "RANKING": "1"}
    assert as_no_rank({**RANKS_OF_OTHERS, **others}) == others


def test_modules_in_the_current_directory_are_not_ours(tmp_path: Path) -> None:
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('taken from the current directory')\n")
    done = subprocess.run(
        module_command("oobleck", "--help"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_module_is_started_that_way() -> None:
    """A start by `-m` alone would look into the current directory first."""
    starts = re.compile(r"""["']-m["']|executable.* -m |python\)\} -m """)
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        for line in path.read_text().splitlines()
        if starts.search(line)
    }
    read_a_scripts_own = {"cli/run/options.py", "runtime/files/run_dir.py"}
    show_how_it_was_started = {"training/process/rank.py", "training/process/rank_server.py"}
    assert found == read_a_scripts_own | show_how_it_was_started


def test_a_script_is_told_of_no_rank_that_the_surroundings_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in RANKS_OF_OTHERS.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom oobleck import Job\n"
        f"def job():\n    return Job(seed=len(set(os.environ) & {set(RANKS_OF_OTHERS)!r}))\n"
    )
    assert describe_script(script, ()).settings == '{"seed": 0}'


def test_a_script_finds_what_lies_beside_it_and_not_what_lies_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, current = tmp_path / "scripts", tmp_path / "current"
    for directory in (scripts, current):
        directory.mkdir()
        (directory / "helpers.py").write_text(f"SEED = {len(directory.name)}\n")
        (directory / "train.py").write_text(
            "from oobleck import Job\nfrom helpers import SEED\ndef job():\n    return Job(seed=SEED)\n"
        )
    (current / "random.py").write_text("raise SystemExit('taken from the current directory')\n")
    monkeypatch.chdir(current)
    assert describe_script(scripts / "train.py", ()).settings == '{"seed": 7}'


@pytest.mark.parametrize(
    ("command", "environment", "why"),
    [
        ("exec /no/python -P -m oobleck", {}, "there is no PYTHON; name the interpreter there with --python"),
        ("exec {python} -P -m oobleck", {"PYTHONHOME": "/nonexistent"}, "look at the variables there that begin with"),
        ("exec {python} -P -m oobleck", {"PYTHONMALLOC": "none"}, "PYTHONMALLOC: unknown allocator"),
        ("exec {python} -I -P -m nosuchmodule", {}, "has no module nosuchmodule; install oobleck-train"),
        ("echo 'Unknown option: -P' >&2; exit 2", {}, "is older than Python 3.11"),
        ("echo 'no room' >&2; exit 3", {}, "no room"),
        ("exit 3", {}, "exit status 3"),
    ],
)
def test_why_a_process_did_not_start_is_told_with_what_to_change(
    command: str, environment: dict[str, str], why: str
) -> None:
    words = ["/bin/sh", "-c", command.format(python=sys.executable)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert why in why_it_ended("PYTHON", done.stderr, done.returncode)
