"""Runs are started anywhere: from directories with files of any name, from shells in which torchrun or mpirun was."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.runtime.python_process import module_command

from .harness import Runner
from .ranks import Ranks

RANK_OF_ANOTHER = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


@pytest.fixture
def anywhere(tmp_path: Path) -> Path:
    """A directory with files that would stand in for what processes of ours import."""
    directory = tmp_path / "anywhere"
    directory.mkdir()
    for name in ("random.py", "yaml.py", "json.py", "trio.py"):
        (directory / name).write_text("raise SystemExit('taken from the current directory')\n")
    return directory


def test_a_script_finds_what_is_meant_to_reach_it_and_nothing_that_is_not(
    ranks: Ranks, anywhere: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = tmp_path / "scripts" / "show.py"
    script.parent.mkdir()
    (script.parent / "helpers.py").write_text("NAME = 'beside the script'\n")
    script.write_text(
        "import json, os, random, sys\nimport helpers, oobleck\n"
        "names = ('RANK', 'WORLD_SIZE', 'MEANT', 'HERE')\n"
        "found = [os.getcwd(), helpers.NAME, *map(os.environ.get, names)]\n"
        f"file = open({str(ranks.out)!r} + '/' + os.environ['RANK'], 'w')\n"
        "file.write(json.dumps(found))\n"
        # It ends with a file that was open before its attempts, and is not flushed yet.
        "for attempt in oobleck.attempts():\n    with attempt:\n        sys.exit()\n"
    )
    options = ["--local", "2", "--env", "MEANT=yes", "--env", "HERE", "--directory", str(work)]
    command = module_command("oobleck", "run", *options, "--base-dir", str(ranks.base_dir), str(script))
    environment = {**ranks.environment, **RANK_OF_ANOTHER, "HERE": "from here"}
    done = subprocess.run(command, cwd=anywhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {path.name: json.loads(path.read_text()) for path in ranks.out.iterdir()}
    assert found == {rank: [str(work), "beside the script", rank, "2", "yes", "from here"] for rank in ("0", "1")}


@pytest.mark.slow  # tests/runtime/test_python_process.py has the parts of it
def test_a_trainer_script_trains_where_another_launcher_was(runner: Runner, anywhere: Path, tmp_path: Path) -> None:
    output, script = tmp_path / "ours.json", Path(__file__).with_name("trainer_script.py")
    options = ("--local", "2", "--plain", "--no-check", "--base-dir", str(runner.base_dir), "--resume", "never")
    command = module_command("oobleck", "up", *options, str(script), "--", "padded", "gpt2", str(output))
    environment = {**runner.environment, **RANK_OF_ANOTHER}
    done = subprocess.run(
        command, cwd=anywhere, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(output.read_text())["global_step"] == 24
