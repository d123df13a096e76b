"""The runs of a base directory: listed, removed, resumed and followed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from oobleck.cli.common_options import complete_tags, continuing
from oobleck.cli.main import main
from oobleck.control.journal import CheckpointSaved, JobEnded
from oobleck.control.journal.view import RunView
from oobleck.runtime.control_client import StatusRequest
from oobleck.runtime.control_socket import serve_control
from oobleck.runtime.files import BASE_DIR_VARIABLE, AgentDir, RunDirectory
from oobleck.wire import encode_json
from tests.control.journals import run_with_a_loss

LONG_AGO_S = 30 * 86_400.0


def left(base_dir: Path, tag: str, *, ends: bool = True, age_s: float = 0.0) -> RunDirectory:
    """What a run leaves, with or without an end."""
    run = RunDirectory(base_dir=base_dir, tag=tag)
    run.create()
    run.path.joinpath("lock").write_text("1 1 elsewhere\n")
    run.journal.write_bytes(b"".join(map(encode_json, run_with_a_loss(ends=ends))))
    when_s = run.journal.stat().st_mtime - age_s
    os.utime(run.journal, (when_s, when_s))
    return run


def listed(base_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["list", "--json", "--base-dir", str(base_dir)]) == 0
    return {row["tag"]: row for row in json.loads(capsys.readouterr().out)}


def test_runs_are_listed_with_their_state_their_step_and_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, masterless = left(tmp_path, "done", age_s=60), left(tmp_path, "masterless", ends=False)
    (tmp_path / "cache").mkdir()
    done.path.joinpath("checkpoint").write_bytes(b"x" * 1_000_000)
    rows = listed(tmp_path, capsys)
    assert list(rows) == ["masterless", "done"], "newest first"
    assert (rows["done"]["state"], rows["done"]["step"], rows["done"]["max_steps"]) == ("done", 120, 120)
    assert rows["masterless"]["state"] == "no master"
    assert rows["done"]["size_bytes"] >= 1_000_000
    masterless.journal.write_bytes(b"no journal\n")
    assert main(["list", "--base-dir", str(tmp_path)]) == 0
    assert "120/120" in capsys.readouterr().out


async def test_an_active_run_is_listed_followed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nursery: trio.Nursery
) -> None:
    run, view = left(tmp_path, "mine"), RunView()
    for entry in run_with_a_loss():
        view.apply(entry)

    async def answer(request: object) -> dict[str, object]:
        assert isinstance(request, StatusRequest)
        return view.at(20.0).to_dict()

    await nursery.start(serve_control, run.control_socket, answer)

    async def oobleck(*words: str) -> tuple[int, str]:
        code = await trio.to_thread.run_sync(partial(main, [*words, "--base-dir", str(tmp_path)]))
        return code, "".join(capsys.readouterr())

    code, said = await oobleck("list", "--json")
    assert (code, json.loads(said)[0]["state"]) == (0, "active")
    for words in (("attach", "mine"), ("status", "--watch")):
        code, said = await oobleck(*words)
        assert code == 0, said
        assert "step 120/120" in said, "off a terminal, its lines up to its end"
    code, said = await oobleck("resume", "mine")
    assert (code, "`oobleck attach mine` shows it" in said) == (2, True)
    assert (await oobleck("clean", "--older-than", "0s", "--yes"))[0] == 0
    assert run.journal.exists()


def test_a_run_is_removed_by_its_name_unless_it_lives_or_may_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, masterless, held = (left(tmp_path, tag, ends=tag != "b") for tag in ("a", "b", "c"))
    base = ("--base-dir", str(tmp_path))
    assert main(["rm", "a", "nosuch", *base]) == 2
    assert done.journal.exists(), "all or nothing of what is named"
    assert "no run 'nosuch'; runs in" in capsys.readouterr().err
    assert main(["rm", "../a", *base]) == 2
    assert main(["rm", "a", *base]) == 0
    assert not done.path.exists()
    died = (masterless.path / "lock").read_text()
    assert main(["rm", "b", *base]) == 2
    assert "its nodes may still train: `oobleck resume b`" in capsys.readouterr().err
    assert (masterless.path / "lock").read_text() == died, "it names the master, and not this command"
    assert main(["rm", "b", "--force", *base]) == 0
    assert not masterless.path.exists()
    with held.lock():
        assert main(["rm", "c", "--force", *base]) == 2
    assert held.journal.exists()


def test_a_removed_run_leaves_no_state_from_which_a_new_one_would_continue(tmp_path: Path) -> None:
    run, other = left(tmp_path, "mine"), left(tmp_path, "other")
    memories = [AgentDir(each.run_id, "node0").memory for each in (run, other)]
    for memory in memories:
        memory.mkdir(parents=True)
    try:
        assert main(["rm", "mine", "mine", "--base-dir", str(tmp_path)]) == 0
        assert [memory.parent.exists() for memory in memories] == [False, True]
    finally:
        for memory in memories:
            shutil.rmtree(memory.parent, ignore_errors=True)


def test_what_a_masterless_run_has_left_here_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = left(tmp_path, "mine", ends=False)
    (tmp_path / "mine" / "temporary").write_text(str(tmp_path))
    directory = AgentDir(run.run_id, "node0")
    directory.create()
    with subprocess.Popen(["sleep", "600"]) as agent:
        directory.note_process("agent", agent.pid)
        assert main(["rm", "mine", "--base-dir", str(tmp_path)]) == 2
        assert agent.poll() is None
        assert main(["rm", "mine", "--force", "--base-dir", str(tmp_path)]) == 0
        assert agent.wait(timeout=10) == -signal.SIGKILL
    assert not directory.path.exists()
    assert not list(tmp_path.glob(".removed-*"))


def test_a_detached_run_takes_its_output_by_itself(tmp_path: Path) -> None:
    """The command that started it may have been killed."""
    run = left(tmp_path, "mine")
    program = f"""if True:
        from pathlib import Path
        from oobleck.cli.up.detached import take_output
        from oobleck.runtime.files import RunDirectory
        print("before", flush=True)
        take_output(RunDirectory(base_dir=Path({str(tmp_path)!r}), tag="mine"))
        print("after", flush=True)
    """
    for name, is_taken in ((".detached-1.log", True), ("mine.log", False)):
        with (tmp_path / name).open("w") as output:
            subprocess.run([sys.executable, "-c", program], stdout=output, check=True, timeout=60)
        assert (tmp_path / name).exists() is not is_taken
    assert (run.path / "output.log").read_text() == "before\nafter\n"


def test_a_run_that_cannot_be_removed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = left(tmp_path / "elsewhere", "mine")
    (tmp_path / "mine").symlink_to(run.path)
    assert main(["rm", "mine", "--base-dir", str(tmp_path)]) == 2
    assert "run mine cannot be removed as a whole" in capsys.readouterr().err
    assert run.journal.exists()


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (JobEnded(t_s=1.0, exit_code=0, reason="stopped on request; 4 steps are committed"), "stopped"),
        (JobEnded(t_s=1.0, exit_code=0, reason="all data is read; 4 steps are committed"), "done"),
        (JobEnded(t_s=1.0, exit_code=75, reason="all nodes are lost"), "can be resumed"),
        (JobEnded(t_s=1.0, exit_code=1, reason="the job failed"), "failed"),
    ],
)
def test_a_run_s_end_is_told(end: JobEnded, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = left(tmp_path, "mine", ends=False)
    with run.journal.open("ab") as file:
        file.write(encode_json(end))
    assert listed(tmp_path, capsys)["mine"]["state"] == state


def test_old_runs_are_shown_and_removed_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, young = left(tmp_path, "old", age_s=LONG_AGO_S), left(tmp_path, "young")
    base = ("--base-dir", str(tmp_path))
    assert main(["clean", *base]) == 0
    assert "old: done" in capsys.readouterr().out
    assert old.path.exists()
    assert main(["clean", "--yes", *base]) == 0
    assert (old.path.exists(), young.path.exists()) == (False, True)
    assert main(["clean", *base]) == 0
    assert "no run ended that long ago" in capsys.readouterr().out


def test_resuming_gives_the_command_again_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = left(tmp_path, "mine", ends=False)
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    run.note_command(["oobleck", "version", "--resume", "never", "--json"], ())  # it would start over
    command = [sys.executable, "-m", "oobleck", "resume", "mine", "--base-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in json.loads(done.stdout)
    assert f"oobleck: cd {there} && oobleck version --json" in done.stderr


@pytest.mark.parametrize(
    ("line", "again"),
    [
        ("oobleck up --resume never --local 2", "oobleck up --local 2"),
        ("oobleck up --resume=/my/checkpoint --local 2", "oobleck up --local 2"),
        ("oobleck up train.py -- --resume never", "oobleck up train.py -- --resume never"),
        ("oobleck up --local 2 --resume auto -- --resume", "oobleck up --local 2 -- --resume"),
        ("oobleck up --job 'my job.yaml'", "oobleck up --job 'my job.yaml'"),
    ],
)
def test_a_run_that_is_resumed_does_not_start_over(line: str, again: str) -> None:
    assert continuing(f"cd '/my runs' && {line}") == f"cd '/my runs' && {again}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["oobleck", "up", "--env", "KEY=s3cret"], "noted without what may be secret"),
        (["oobleck", "up", "--until-eof"], "was started by a program"),
    ],
)
def test_a_command_that_nobody_can_give_again_is_not_given(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path, "mine").note_command(words, ())
    assert main(["resume", "mine", "--base-dir", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "cd /x && oobleck up 'half", "nothing", "\xff"])
def test_a_command_that_is_not_noted_as_a_whole_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path, "mine").path.joinpath("command").write_text(command, encoding="latin-1")
    assert main(["resume", "mine", "--base-dir", str(tmp_path)]) == 2
    assert "is not noted as a whole" in capsys.readouterr().err


SAVED = CheckpointSaved(t_s=1.0, name="s", step=1, saved_at="", size_bytes=1, pause_s=0.0, duration_s=0.0)


@pytest.mark.parametrize(("entries", "ends", "repeats"), [([SAVED], True, False), ([], True, True), ([], False, False)])
@pytest.mark.parametrize("resume", [["--resume", "never"], ["--resume=/elsewhere"]])
def test_a_run_that_has_saved_continues_whatever_it_began_from(
    entries: list[CheckpointSaved], resume: list[str], tmp_path: Path, *, ends: bool, repeats: bool
) -> None:
    run = left(tmp_path, "mine")
    end = [JobEnded(t_s=2.0, exit_code=0, reason="stopped; 1 step is committed")] if ends else []
    run.journal.write_bytes(b"".join(map(encode_json, [*entries, *end])))
    run.note_command(["oobleck", "version", *resume, "--json"], ())
    command = [sys.executable, "-m", "oobleck", "resume", "mine", "--base-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    given = ["oobleck", "version", *(resume if repeats else []), "--json"]
    assert f"&& {' '.join(given)}\n" in done.stderr


def test_a_shell_completes_the_tags_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tag in ("llama-1", "llama-2", "other"):
        left(tmp_path, tag)
    monkeypatch.setenv(BASE_DIR_VARIABLE, str(tmp_path))
    assert complete_tags("ll") == ["llama-1", "llama-2"]
    assert complete_tags("[") == []


@pytest.mark.parametrize(
    ("former", "now"), [("get_agent_list", "status"), ("kill_agent", "kill NODE"), ("run_singlenode", "up --local N")]
)
def test_the_commands_of_oobleck_0_1_answer_with_the_new_words(
    former: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([former, "10.0.0.1"]) == 2
    assert f"it is `oobleck {now}`" in capsys.readouterr().err


def test_a_detached_run_that_is_refused_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oobleck", "up", "-d", "--local", "2", "--job", "nosuch.yaml"]
    base = ["--base-dir", str(tmp_path)]
    done = subprocess.run([*command, *base], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nosuch.yaml" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-df", "0", "--job", "nosuch.yaml"), "nosuch.yaml"),
        (("--detach", "--job", "-d"), "job file -d:"),
    ],
)
def test_a_detached_run_is_one_process_however_its_words_are_joined(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    started = tmp_path / "started"
    # Each process detaches before it looks at its words, so one that detaches again would do so until the last here.
    limit = f"""if True:
        import os
        with open({str(started)!r}, "a+") as started:
            started.write(".")
            started.seek(0)
            if len(started.read()) > 4:
                os._exit(1)
    """
    (tmp_path / "sitecustomize.py").write_text(limit)
    command = [sys.executable, "-m", "oobleck", "up", "--local", "2", *words, "--base-dir", str(tmp_path / "base")]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, started.read_text()) == (2, "..")
    assert said in done.stderr


def test_a_script_finds_the_same_variables_in_a_detached_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import json, os, pathlib\npathlib.Path('seen').write_text(json.dumps(sorted(os.environ)))\nraise ValueError"
    )
    command = [sys.executable, "-m", "oobleck", "up", "--local", "2", "--base-dir", str(tmp_path / "base"), "job.py"]
    seen = []
    for words in ((), ("--detach",)):
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, check=False, timeout=120)
        assert done.returncode == 78, done.stderr
        seen.append((tmp_path / "seen").read_text())
        (tmp_path / "seen").unlink()
    assert seen[0] == seen[1]
