"""`oobleck run` reads torchrun's command line: every option of the installed torchrun is used, unused or refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.cli.run.options import REFUSED, UNUSED, CommandLine, options_text, parse_command_line
from oobleck.control.node_ranks import OWN_VARIABLES
from oobleck.errors import ExitCode, UsageError
from oobleck.job.ranks import RankStreams, Redirection
from oobleck.storage.scripts import MEMORY_VARIABLE, START_VARIABLE


def parsed(*words: str, **environment: str) -> CommandLine:
    return parse_command_line(words, environment)


def torchruns_options() -> list[list[tuple[str, bool]]]:
    """(name, whether a value follows) of every option of the installed torchrun, each with its other spellings."""
    from torch.distributed.run import get_args_parser

    lines = re.findall(r"^  (-.*?)(?:  .*)?$", get_args_parser().format_help(), re.MULTILINE)
    options = [[(part.split()[0], " " in part) for part in line.split(", ") if part[:1] == "-"] for line in lines]
    return [names for names in options if ("--help", False) not in names]


def test_every_option_of_torchrun_is_known_in_both_spellings():
    known, options = options_text(), torchruns_options()
    assert len(options) >= 30
    for names in options:
        long = [name for name, _ in names if name.startswith("--")]
        assert any(name in known or name in REFUSED for name in long), f"{long} is an option that `oobleck run` lacks"
        for name, has_value in names:
            value = (["0:1"] if name in ("-r", "-t", "--redirects", "--tee") else ["1"]) if has_value else []
            try:
                parsed(name, *value, "train.py")
            except UsageError as error:
                assert any(long_name in str(error) for long_name in long)  # noqa: PT017  refused, by its own name
                assert any(long_name in REFUSED for long_name in long)


def test_a_command_line_of_torchrun():
    line = parsed(
        "--nnodes=2:4", "--nproc_per_node", "8", "--max-restarts=3", "-r", "0:3,1:1", "train.py", "--lr", "1", "-m"
    )
    assert (line.nodes, line.spec.ranks_per_node, line.spec.max_restarts) == ((2, 4), "8", 3)
    assert line.spec.redirects.single == ((0, Redirection(stdout=True, stderr=True)), (1, Redirection(stdout=True)))
    assert (line.spec.entry, line.spec.command) == ("script", ("train.py", "--lr", "1", "-m"))


def test_a_hostfile_stands_before_the_script():
    assert parsed("hosts.txt", "train.py", "a.py").hostfile == "hosts.txt"
    assert parsed("train.py", "a.py").hostfile is None
    assert parsed("--hostfile", "hosts.txt", "-m", "package.train", "x.py").hostfile is None
    assert parsed("--hostfile", "hosts.txt", "-m", "package.train").own == {"--hostfile": "hosts.txt"}


def test_torchruns_variables_count_and_options_count_more():
    line = parsed("--nnodes", "3", "train.py", PET_NNODES="1:2", PET_NPROC_PER_NODE="4", PET_TEE="3", PET_MODULE="0")
    assert (line.nodes, line.spec.ranks_per_node, line.spec.entry) == ((3, 3), "4", "script")
    assert line.spec.tee == RankStreams(all=Redirection(stdout=True, stderr=True))


def test_copies_and_their_rate_are_read_and_wrong_ones_refused_by_name(capsys: pytest.CaptureFixture[str]):
    assert (parsed("train.py").spec.copies, parsed("train.py").spec.copy_rate) == (1, 256e6)
    spec = parsed("--copies", "2", "--copy-rate", "1.5GB/s", "train.py").spec
    assert (spec.copies, spec.copy_rate) == (2, 1.5e9)
    assert (spec.parity_nodes, spec.room_for_copies) == (0, 2)
    spec = parsed("--copies", "xor:8", "train.py").spec
    assert (spec.copies, spec.parity_nodes, spec.room_for_copies) == (1, 8, 0.25)
    wrong = [("--copies", text) for text in ("9", "-1", "xor:1", "xor:x", "xor:33", "xor:", "and:2")]
    for words in (*wrong, ("--copy-rate", "fast"), ("--copy-rate", "0MB/s")):
        assert main(["run", *words, "train.py"]) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert words[0] in said
        assert words[1] in said or "0.0" in said or "33" in said


def test_what_has_no_meaning_is_said_to_be_unused():
    line = parsed("--rdzv_backend=c10d", "--rdzv-endpoint", "host:29400", "--node_rank=1", "train.py")
    assert [text.split(" is not used")[0] for text in line.unused] == [
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--node-rank",
    ]
    assert set(UNUSED).isdisjoint(REFUSED)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--numa-binding=node", "train.py"], "--numa-binding: `oobleck run` has no such option; start the script"),
        (["--comm-perf-test", "train.py"], "--comm-perf-test: `oobleck run` has no such option; `oobleck check`"),
        (["--nprocs", "2", "train.py"], "--nprocs: there is no such option"),
        (["--nnodes", "4:2", "train.py"], "--nnodes: 4:2 is not possible"),
        (["--nnodes", "all", "train.py"], "--nnodes: 'all' is not N or MIN:MAX"),
        (["--max-restarts", "few", "train.py"], "--max-restarts: 'few' is not a whole number"),
        (["--tee", "5", "train.py"], "--tee: '5' is not 0, 1, 2, 3"),
        (["--env", "A-B=1", "train.py"], "--env: 'A-B' is no name of a variable; write NAME or NAME=VALUE"),
        (["--env", "MISSING", "train.py"], "--env: MISSING is not set here"),
        (["-m", "--no-python", "x"], "--module and --no-python"),
        (["--nnodes", "2"], "name a script to run"),
        (["--hostfile", "a", "b", "train.py"], "b: --hostfile names the nodes already"),
    ],
)
def test_a_mistake_is_named(words: list[str], said: str):
    with pytest.raises(UsageError) as caught:
        parsed(*words)
    assert said in str(caught.value)


def test_variables_are_given_to_ranks():
    assert parsed("--env", "A=1", "--env", "B", "train.py", B="x").spec.environment == {"A": "1", "B": "x"}


@pytest.mark.parametrize("name", [*OWN_VARIABLES, MEMORY_VARIABLE, START_VARIABLE])
def test_a_variable_that_ranks_get_from_the_run_is_refused_with_what_there_is_instead(name: str):
    with pytest.raises(UsageError, match=f"--env: {name} is set for each rank by the run itself; .+"):
        parsed("--env", f"{name}=7", "train.py")


def test_options_of_dlrover_run_are_taken():
    line = parsed("--network-check", "--exclude_straggler", "--save_at_breakpoint", "--node_unit=2", "train.py")
    assert line.flags == {"--network-check", "--exclude-straggler", "--save-at-breakpoint"}
    assert line.own == {"--node-unit": "2"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--exclude-straggler"], "--exclude-straggler: slow nodes are found by --network-check; give both"),
        (["--local", "3", "--nnodes", "3", "--node-unit", "2"], "--node-unit"),
        (["--local", "1", "--node-unit", "2"], "--node-unit"),
        (["--hang-timeout", "long"], "--hang-timeout: 'long' is not a number of seconds"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(words: list[str], said: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    command = [sys.executable, "-m", "oobleck", "run", "--base-dir", str(tmp_path), *words, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (2, 78)
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        (("--nnode=1:2",), ("--nnodes", "1:2")),
        (("--nproc", "2"), ("--nproc-per-node", "2")),
        (("--max-res", "2"), ("--max-restarts", "2")),
        (("--modu",), ("--module",)),
    ],
)
def test_an_option_of_torchrun_may_be_shortened_as_far_as_it_is_like_no_other(
    short: tuple[str, ...], whole: tuple[str, ...]
):
    assert parsed(*short, "train.py", "--nnode=9") == parsed(*whole, "train.py", "--nnode=9")


def test_an_option_that_may_be_several_is_refused_with_their_names():
    with pytest.raises(UsageError, match="--n: this may be --nnodes or --nproc-per-node"):
        parsed("--n", "3", "train.py")


@pytest.mark.parametrize(
    "words",
    [
        ("--node-unit", "0"),
        ("--tag=",),
        ("--tag", "a/b"),
        ("--lease", "-1"),
        ("--lease", "nan"),
        ("--hang-timeout", "-1"),
        ("--join-timeout", "nan"),
        ("--max-restarts", "99999999"),
        ("--max-restarts", "-1"),
        ("--max-restarts", "9" * 30),
        ("--master-port", "0"),
        ("--master-port=-1",),
        ("--local", "-1"),
        ("--local", "0"),
        ("--dial-in", "7077", "--nodes", "-1"),
        ("--nproc-per-node", "0"),
        ("--shutdown-timeout", "1e9"),
        ("--nnodes", "1:2", "--node-unit", "3"),
    ],
)
def test_what_an_option_cannot_be_is_said_of_that_option_as_a_usage_error(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    option = [word for word in words if word.startswith("--")][-1].partition("=")[0]
    assert main(["run", "--base-dir", str(tmp_path), *words, "train.py"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert f"oobleck: {option}: " in said
    assert "is not a whole number" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing was begun"


@pytest.mark.parametrize(
    "source",
    [
        ("--local", "2"),
        ("--hosts-from", "cat hosts"),
        ("--dial-in", "7077"),
        ("--slurm",),
        ("--slurm-job", "mine"),
        ("--ray",),
        ("--kubernetes", "app=mine"),
    ],
    ids=lambda source: source[0],
)
def test_standalone_is_refused_with_every_source_of_nodes(
    source: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--standalone", *source, str(script)]) == ExitCode.USAGE
    assert "--standalone runs on this machine alone" in capsys.readouterr().err
