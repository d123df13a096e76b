"""`--workdir` on nodes that share no directory: real OpenSSH servers, each with a home of its own."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.openssh import needs_openssh, serve_openssh

from .harness import oobleck

pytestmark = needs_openssh

NODES = ("alpha", "beta")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The directory with the nodes' homes, and the command line's part that names them."""
    directory = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        servers = []
        for name in NODES:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="ob"))  # short, for sockets' paths are
            servers.append(stack.enter_context(serve_openssh(directory / name, environment={"TMPDIR": temporary})))
        hostfile, config = directory / "hosts.txt", directory / "ssh_config"
        hostfile.write_text("\n".join(NODES))
        config.write_text("".join(one.host_config([name]) for name, one in zip(NODES, servers, strict=True)))
        yield directory, ("--ssh-config", str(config), str(hostfile))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script in a folder of a project, whose module and text are elsewhere in it."""
    files = {
        "shared.py": "NAME = 'of the project'\n",
        "jobs/beside.py": "NUMBER = 7\n",
        "text.txt": "a few words of the project's own text\n" * 500,
        ".gitignore": "secret\n",
        "jobs/note.py": (
            "import json, os, shared\n"
            "with open(os.path.expanduser(f'~/noted.{os.environ[\"RANK\"]}'), 'w') as file:\n"
            "    json.dump([os.getcwd(), shared.NAME, sorted(os.listdir())], file)\n"
        ),
        "jobs/train.py": (
            "import beside, os, shared\nfrom oobleck import Job\n\n"
            "if 'OOBLECK_NODE' in os.environ:\n"
            "    with open(os.path.expanduser('~/noted'), 'w') as file:\n"
            "        file.write(f'{os.getcwd()} {shared.NAME} {beside.NUMBER}')\n\n\n"
            "def lr_lambda(step):\n    return 1.0\n\n\n"
            "def job():\n"
            "    model = {'type': 'gpt2', 'n_embd': 16, 'n_layer': 2, 'n_head': 2}\n"
            "    data = {'paths': ['text.txt'], 'sequence_length': 16, 'vocab_size': 260}\n"
            "    return Job(model=model, data=data, max_steps=2, global_batch_size=2, torch_threads=1,\n"
            "               lr_lambda=lr_lambda)\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "project" / "secret").write_text("s3cret")
    return tmp_path / "project"


def copies(home: Path, tag: str) -> list[str]:
    return sorted(path.name for path in (home / ".oobleck" / tag / ".workdir").iterdir())


@pytest.mark.slow
def test_the_ranks_of_a_script_run_in_their_node_s_copy(
    hosts: tuple[Path, tuple[str, ...]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes, words = hosts
    monkeypatch.chdir(project)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    own = ("--workdir", ".", "--no-warm", "--base-dir", str(project.parent / "base"), "--tag", "ranks")
    for _ in range(2):
        done = oobleck("run", *own, "--env", "PYTHONPATH=.", *words, "jobs/note.py")
        assert done.returncode == 0, done.stderr
        for rank, name in enumerate(NODES):
            place, shared, names = json.loads((homes / name / f"noted.{rank}").read_text())
            assert Path(place).parent == homes / name / ".oobleck" / "ranks" / ".workdir"
            assert shared == "of the project"
            assert {"jobs", "shared.py", "text.txt"} <= set(names)
        assert len(copies(homes / NODES[0], "ranks")) == 1


@pytest.mark.slow
def test_a_job_trains_on_the_text_and_the_modules_that_travelled(
    hosts: tuple[Path, tuple[str, ...]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes, (option, config, hostfile) = hosts
    monkeypatch.chdir(project)
    own = ("--workdir", ".", "--no-check", "--base-dir", str(project.parent / "base"), "--tag", "job", "--plain")
    done = oobleck("up", *own, option, config, hostfile, "jobs/train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NODES:
        (copy,) = copies(homes / name, "job")
        said = (homes / name / "noted").read_text()
        assert said == f"{homes / name / '.oobleck/job/.workdir' / copy} of the project 7"


@pytest.mark.slow
def test_other_files_take_no_run_over(
    hosts: tuple[Path, tuple[str, ...]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, words = hosts
    monkeypatch.chdir(project)
    base = ("--base-dir", str(project.parent / "base"))
    up = ("up", "--workdir", ".", "--no-check", "--tag", "taken", *base, *words, "jobs/train.py")
    try:
        assert oobleck(*up, "--detach", "--steps", "1000000").returncode == 0
        os.kill(wait_for_step(base, "taken"), signal.SIGKILL)
        (project / "shared.py").write_text("NAME = 'changed'\n")
        refused = oobleck(*up, "--steps", "1000000")
        assert refused.returncode == 2
        assert "its job differs from this one in the files of --workdir; give the same" in refused.stderr
    finally:
        assert oobleck(*up, "--resume", "never", "--steps", "1").returncode == 0  # it ends the other


def wait_for_step(base: tuple[str, str], tag: str) -> int:
    """The run's process, once it has committed a step."""
    for _ in range(600):
        status = oobleck("status", tag, "--json", *base)
        if status.returncode == 0 and json.loads(status.stdout)["step"]:
            return int((Path(base[1]) / tag / "lock").read_text().split()[0])
        time.sleep(0.5)
    raise AssertionError("no step is committed")
