"""Input that cannot be used: an exit code that programs understand, words that people do, and nothing left behind."""

from __future__ import annotations

import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleck import __version__
from oobleck.cli.main import main
from tests.openssh import free_port, make_key, needs_openssh, serve_openssh

from .harness import Outcome, Runner

Refuse = Callable[..., tuple[int, str]]

# --- what is refused before anything is started: in this process --------------------------------------------------


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Give `oobleck up` a command line, in a directory with some files; returns its exit code and what it says."""
    monkeypatch.chdir(tmp_path)
    files = {
        "hosts": "node1\nnode2\n",
        "typo": "node1\nnode2 slotz=4\n",
        "empty": "# nobody\n",
        "good.yaml": "max_steps: 10\n",
        "unknown.yaml": "max_steps: 10\noptimiser:\n  learning_rate: 0.1\n",
        "type.yaml": "max_steps: many\n",
        "value.yaml": "microbatch_size: 2\nglobal_batch_size: 15\n",
        "broken.yaml": "model: {type: gpt2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["up", *arguments, "--base-dir", "base", "--plain"])
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert not (tmp_path / "base").exists(), "nothing was begun"
        return code, err

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 2, ["hostfile nowhere", "No such file"]),
        (["typo"], 78, ["typo:2:", "unknown key 'slotz'", "slots"]),
        (["empty"], 78, ["empty: names no node", "write one host per line"]),
        ([], 2, ["hostfile", "--local"]),
        (
            ["--local", "2", "--set", "data.paths=[/nowhere]"],
            78,
            ["data.paths: /nowhere does not exist on this machine"],
        ),
        (["--local", "2", "mine.yaml"], 2, ["mine.yaml: a job file is named by an option: --job mine.yaml"]),
        (["hosts", "--local", "2"], 2, ["in one way: a hostfile, --hosts-from COMMAND"]),
        (["hosts", "--hosts-from", "cat hosts"], 2, ["in one way: a hostfile, --hosts-from COMMAND"]),
        (["--hosts-from", "cat nowhere"], 78, ["--hosts-from 'cat nowhere' failed", "status 1", "No such file"]),
        (["--hosts-from", "cat typo"], 78, ["--hosts-from 'cat typo':2:", "unknown key 'slotz'", "slots"]),
        (["--hosts-from", "cat empty"], 78, ["--hosts-from 'cat empty': names no node"]),
        (["--slurm"], 2, ["--slurm: this is not inside a Slurm allocation", "SLURM_JOB_ID"]),
        (["hosts", "--slurm"], 2, ["--slurm", "leave the others out"]),
        (["--slurm", "--slurm-job", "mine"], 2, ["--slurm", "leave the others out"]),
        (["--dial-in", "7077"], 2, ["--dial-in and --nodes belong together"]),
        (["hosts", "--nodes", "2"], 2, ["--dial-in and --nodes belong together"]),
        (["hosts", "--keys", "keys"], 2, ["--keys: these are for nodes that dial in"]),
        (["--dial-in", "7077", "--nodes", "2", "--keys", "no"], 78, ["no/master.json: not the keys of a run"]),
        (["--kubernetes", "app=oobleck"], 2, ["--kubernetes needs --nodes"]),
        (["--kubernetes", "two words", "--nodes", "2"], 2, ["'two words' is not a selector of labels"]),
        (["--kubernetes", "app=oobleck", "--nodes", "2"], 2, ["--kubernetes: this is no pod of Kubernetes"]),
        (["hosts", "--ray"], 2, ["--ray names all nodes"]),
        (["--dial-in", "host:many", "--nodes", "2"], 2, ["'host:many' is not PORT or HOST:PORT"]),
        (["--dial-in", "7077", "--nodes", "0"], 2, ["--nodes: 0 nodes", "1 to"]),
        (["--dial-in", "7077", "--nodes", "2", "--kill", "worker3"], 2, ["--kill", "NODE@STEP"]),
        (["--hosts-from", "cat hosts", "--hosts-every", "0"], 2, ["--hosts-every: 0 s", "at least 100ms"]),
        (["--hosts-from", "cat hosts", "--hosts-every", "often"], 2, ["'often' is not a duration"]),
        (["--local", "0"], 2, ["--local: 0 nodes", "1 to"]),
        (["hosts", "--job", "nowhere.yaml"], 2, ["job file nowhere.yaml", "No such file"]),
        (["hosts", "--job", "."], 78, ["job file .", "directory"]),
        (["hosts", "--job", "unknown.yaml"], 78, ["unknown.yaml:2:", "'optimiser'", "did you mean", "optimizer"]),
        (["hosts", "--job", "type.yaml"], 78, ["type.yaml:1:", "max_steps: expected a whole number", "'many'"]),
        (["hosts", "--job", "value.yaml"], 78, ["value.yaml:2:", "15", "a multiple of microbatch_size (2)"]),
        (["hosts", "--job", "broken.yaml"], 78, ["broken.yaml:"]),
        (["hosts", "--set", "max_step=3"], 2, ["--set max_step=3", "max_steps"]),
        (["hosts", "--set", "optimizer.learning_rate=fast"], 2, ["--set", "expected a number", "'fast'"]),
        (["hosts", "--dtype", "float8"], 2, ["--dtype", "float32, float64, bfloat16, float16"]),
        (["hosts", "--pipelines", "3"], 2, ["num_pipelines: 3", "2 nodes", "at least one node"]),
        (["hosts", "--kill", "node9@5"], 2, ["--kill", "'node9'", "node1, node2"]),
        (["hosts", "--kill", "node1"], 2, ["--kill", "NODE@STEP", "node2@20"]),
        (["hosts", "--kill", "node1@5000"], 2, ["--kill", "between 1 and"]),
        (["hosts", "--summary", "no/such/place.json"], 2, ["--summary", "no/such/place.json", "directory"]),
        (["hosts", "--ssh-config", "nowhere"], 2, ["ssh config nowhere", "No such file"]),
        (["--local", "2", "--ssh-config", "hosts"], 2, ["--ssh-config", "virtual nodes need none"]),
        (["hosts", "--tag", "../up"], 2, ["tag", "'../up'", "letters, digits"]),
        (["hosts", "--steps", "0"], 2, ["--steps: max_steps: 0", "from 1 to"]),
        (["hosts", "--steps", "9" * 23], 2, ["--steps: max_steps: 9999", "from 1 to"]),
        (["hosts", "--steps", "9" * 5000], 2, ["--steps", "integer"]),
        (["hosts", "--seed", "9" * 20], 2, ["--seed: seed: 9999"]),
        (["hosts", "-f", "-1"], 2, ["-f: fault_threshold: -1"]),
        (["hosts", "--keep", "0"], 2, ["--keep: checkpoint.save_total_limit: 0"]),
        (["hosts", "--tp", "0"], 2, ["--tp: tensor_parallel: 0"]),
        (["hosts", "--tp", "3"], 2, ["--tp: tensor_parallel: 3", "a power of two"]),
        (["hosts", "--pipelines", "0"], 2, ["--pipelines: num_pipelines: 0"]),
        (["hosts", "--save-every", "9" * 14], 2, ["--save-every: checkpoint.save_steps: 9999"]),
        (["--local", "2", "--python", "/nonexistent"], 2, ["--python: there is no /nonexistent"]),
        (["hosts", "--metrics", "8.8.8.8:80"], 2, ["--metrics: '8.8.8.8'", "0.0.0.0:80"]),
        (["hosts", "--no-such-option"], 2, ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_it_is_refused_at_once(refuse: Refuse, arguments: list[str], code: int, words: list[str]) -> None:
    exit_code, said = refuse(*arguments)
    assert exit_code == code, said
    said_in_one_line = " ".join(said.split())
    for word in words:
        assert word in said_in_one_line


def test_a_base_directory_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").touch()
    code = main(["up", "--local", "2", "--base-dir", str(tmp_path / "base" / "deep"), "--plain"])
    assert code == 78
    assert f"{tmp_path}/base" in capsys.readouterr().err


# --- what only the nodes can tell: real runs -----------------------------------------------------------------------


def assert_refused(runner: Runner, outcome: Outcome, code: int, *words: str) -> None:
    """The run ended with this code and these words, and left nothing."""
    assert outcome.exit_code == code, outcome.output
    assert "Traceback" not in outcome.output, outcome.output
    for word in words:
        assert word in outcome.output, outcome.output
    assert outcome.summary["steps_committed"] == 0
    assert runner.left_over() == []


_PARTS_ELSEWHERE = pytest.mark.slow
"""What a worker says of these has tests in tests/training and tests/cli; how it is passed on is the same for all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param("model.type=gtp2", ["model.type: 'gtp2'", "did you mean 'gpt2'?"], marks=_PARTS_ELSEWHERE),
        pytest.param(
            "model.n_layers=3",
            ["model.config.n_layers: gpt2 has no such key", "did you mean 'n_layer'?"],
            marks=_PARTS_ELSEWHERE,
        ),
        ("model.n_head=3", ["model.config: gpt2 cannot be built", "must be divisible"]),
        pytest.param("data.sequence_length=1000000", ["data.sequence_length"], marks=_PARTS_ELSEWHERE),
    ],
)
def test_a_job_that_no_worker_can_take_is_told_once(
    runner: Runner, undisturbed: Outcome, setting: str, words: list[str]
) -> None:
    outcome = runner.run("--job", str(runner.job_file()), "--set", setting, nodes=("--local", "2"))
    assert_refused(runner, outcome, 78, *words)
    _, _, last_words = outcome.output.partition("oobleck: cannot start:\n")
    assert last_words.count(words[0]) == 1


def test_a_model_that_fits_on_no_number_of_nodes_names_the_layer(runner: Runner, undisturbed: Outcome) -> None:
    job = str(runner.job_file())
    outcome = runner.run("--job", job, "--set", "device_memory_bytes=1000", nodes=("--local", "2"))
    assert_refused(runner, outcome, 78, "layer 0 (embedding)", "fits on no number of nodes", "1000 bytes")


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_interpreter_without_the_package_is_told_what_to_install(runner: Runner, tmp_path: Path) -> None:
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    alone = script(tmp_path / "python", "cd /", f'exec {python} -I "$@"')
    outcome = runner.run("--job", str(runner.job_file()), "--python", alone, nodes=("--local", "2"))
    assert_refused(runner, outcome, 1, f"{alone} has no module", f"install oobleck-train {__version__} there")


@pytest.mark.slow  # tests/runtime/test_python_process.py has the reasons
def test_another_version_there_is_told_apart(runner: Runner, tmp_path: Path) -> None:
    """A package of the same shape that says it is another version."""
    shutil.copytree(Path(__file__).parents[2] / "oobleck", tmp_path / "oobleck", ignore=shutil.ignore_patterns("*.pyc"))
    init = tmp_path / "oobleck" / "__init__.py"
    init.write_text(init.read_text().replace(__version__, "99.0"))
    other = script(tmp_path / "python", f"cd {tmp_path}", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    outcome = runner.run("--job", str(runner.job_file()), "--python", other, nodes=("--local", "2"))
    assert_refused(runner, outcome, 1, f"oobleck 99.0 is installed there, {__version__} here")


@pytest.mark.slow  # tests/runtime/test_python_process.py has the reasons
def test_a_program_that_is_no_interpreter_is_quoted(runner: Runner, tmp_path: Path) -> None:
    nonsense = script(tmp_path / "python", "echo hello", "echo what is this >&2")
    outcome = runner.run("--job", str(runner.job_file()), "--python", nonsense, nodes=("--local", "2"))
    assert_refused(runner, outcome, 1, "its agent did not start", "what is this")


@pytest.mark.slow
def test_hosts_that_cannot_be_reached_are_all_named(runner: Runner, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "hosts").write_text(f"127.0.0.1 port={port}\nno-such-host.invalid\n")
    outcome = runner.run("--job", str(runner.job_file()), nodes=(str(tmp_path / "hosts"), "--no-check"))
    assert_refused(
        runner,
        outcome,
        1,
        f"127.0.0.1:{port} refused the connection",
        "'no-such-host.invalid' cannot be resolved",
        "check the hostfile",
    )


@needs_openssh
def test_hosts_that_cannot_be_reached_are_all_named_and_what_to_do_about_keys_is_said(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    make_key(tmp_path / "other")
    port = free_port()
    with serve_openssh(tmp_path / "openssh") as openssh:
        wrong = openssh.host_config(["wrong"]).replace(str(openssh.client_key), str(tmp_path / "other"))
        unknown = openssh.host_config(["unknown"]).replace(str(openssh.known_hosts), str(tmp_path / "none"))
        (tmp_path / "config").write_text(wrong + unknown)
        (tmp_path / "hosts").write_text(f"wrong\nunknown\n127.0.0.1 port={port}\nno-such-host.invalid\n")
        nodes = (str(tmp_path / "hosts"), "--ssh-config", str(tmp_path / "config"))
        outcome = runner.run("--job", str(runner.job_file()), nodes=nodes)
    assert "checking 4 nodes" in outcome.output
    assert_refused(runner, outcome, 1, "wrong: wrong lets your user in with none of the keys", "authorized_keys")
    assert f"connect once by `ssh -F {tmp_path}/config unknown`" in outcome.output
    assert f"127.0.0.1:{port} refused the connection" in outcome.output
    assert "'no-such-host.invalid' cannot be resolved" in outcome.output


@needs_openssh
def test_an_address_that_is_not_the_nodes_is_named(runner: Runner, undisturbed: Outcome, tmp_path: Path) -> None:
    """In the hostfile of an otherwise good run."""
    with serve_openssh(tmp_path / "openssh", environment={"TMPDIR": str(runner.temporary)}) as openssh:
        (tmp_path / "config").write_text(openssh.host_config(["alpha", "beta"]))
        (tmp_path / "hosts").write_text("alpha\nbeta address=192.0.2.1\n")
        nodes = (str(tmp_path / "hosts"), "--ssh-config", str(tmp_path / "config"))
        outcome = runner.run("--job", str(runner.job_file()), nodes=(*nodes, "--no-check"))
    assert_refused(runner, outcome, 78, "beta: process groups cannot listen at 192.0.2.1", "address= in the hostfile")
