"""Every command that a user is shown is one: all are parsed, and those that need no run and no cluster are run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.errors import ExitCode
from oobleck.planner import device_sheet, estimate_profile, model_shape, profile_to_json
from tests.documented import command_path, documented_commands
from tests.e2e.shown_commands import ON_A_RUN

ROOT = Path(__file__).parents[2]
DOCUMENTED = documented_commands()
OURS = tuple(line for line in DOCUMENTED if line.startswith("oobleck "))
TOOLS = tuple(line for line in DOCUMENTED if line.startswith("python tools/"))

LEFT_OUT = {
    "oobleck plan … --after-losing node3": "--profile gpt2.json --nodes 13 --global-batch 128",
    "oobleck plan … --after-losing node3,node7": "--profile gpt2.json --nodes 13 --global-batch 128",
    "oobleck plan … --gpus-per-node 8 --sharding optimizer": "--profile gpt2.json --nodes 4 --global-batch 128",
    "oobleck plan … --sharding gradients --expert-parallel": (
        "--model mixtral.json --device H100 --gpus-per-node 8 --nodes 4 --global-batch 128 --microbatch 1"
    ),
    "oobleck plan … --sharding gradients --context-parallel 8": (
        "--model gpt3-6.7b --device H100 --gpus-per-node 8 --nodes 4 --global-batch 128 --microbatch 1"
    ),
    "oobleck plan … --schedule auto": "--profile gpt2.json --nodes 13 --global-batch 128",
    "oobleck sim --failures trace.json --mode cluster …": (
        "--model gpt3-2.7b --device A100 --global-batch 512 --microbatch 2 --steps 100"
    ),
    "oobleck sim --failures trace.json --model gpt3-6.7b --device A100 …": "--global-batch 512 --microbatch 2",
    "oobleck sim --failures trace.json --policy oobleck,varuna,restart …": (
        "--model gpt3-2.7b --device A100 --global-batch 512 --microbatch 2"
    ),
}
"""What stands for the … of commands that are run."""

HERE = re.compile(r"oobleck (plan|sim|trace (generate|convert|info)) .*")
"""Run by this file, in a directory with the files that the pages speak of."""

ELSEWHERE = (
    (
        r"oobleck( \w+)?( (NODE|generate|convert|info|verify))?",
        "names a command; its options are in other lines",
    ),
    (r"oobleck up --local 4", "tests/e2e: every run there is one"),
    (r"oobleck up hosts.txt\b.*", "needs hosts: tests/e2e/test_openssh.py has one, over OpenSSH"),
    (r"oobleck (up|check) --hosts-from .*", "tests/runtime/launchers; tests/e2e/test_faults.py follows one"),
    (
        r"oobleck (up|check) --dial-in .*|oobleck node .*",
        "tests/runtime/launchers/test_dial_in.py, tests/e2e/test_dial_in.py, tests/e2e/test_check.py",
    ),
    (r"oobleck (up|check) --slurm.*", "tests/e2e/test_slurm.py, on a real Slurm where there is one"),
    (
        r"oobleck (up|check) --ray.*",
        "tests/runtime/launchers/test_ray.py; tests/e2e/test_ray.py where Ray is installed",
    ),
    (r"oobleck ui .*", "tests/cli/following/test_page.py"),
    (r"oobleck logs.*", "tests/cli/following/test_logs.py; tests/e2e/test_openssh.py, over OpenSSH"),
    (r"oobleck verify.*", "tests/e2e/test_verify.py, on scripts of many kinds"),
    (r"oobleck run .*", "tests/e2e/test_run_scripts.py, on virtual nodes"),
    (r"oobleck keys .*|oobleck up --keys .*", "tests/deploy/test_kubernetes.py, tests/e2e/test_kubernetes.py"),
    (r"oobleck up … .*", "tests/e2e/test_dry_run.py and tests/e2e/test_events.py; the other words are those of a run"),
    (
        r"oobleck check (hosts.txt|HOSTFILE).*|oobleck check --local 4",
        "tests/e2e/test_check.py, tests/runtime/node_check/test_check.py",
    ),
    (r"oobleck chaos examples/chaos.json --local 4", "takes a minute; tests/e2e/test_faults.py plays others"),
    (r"oobleck profile (job.yaml|examples/gpt2.yaml) .*", "tests/cli/test_profile.py"),
    (r"oobleck profile train.py --device cuda .*", "needs a GPU"),
    (r"oobleck add 'node7 slots=1 port=2222'", "needs a host: tests/cli/test_docs.py sees that it names one node"),
    (r"oobleck checkpoint \w+ my-llama.*", "tests/e2e/test_commands.py, by the other name of a run"),
    (r"oobleck checkpoint import( state/ .*)?", "tests/training/checkpoint/test_dcp_format.py, by the converter alone"),
    (r"oobleck checkpoint export (job|own) .*", "tests/e2e/test_commands.py, test_dcp_format.py, by other names"),
    (r"oobleck checkpoint export lora .*", "tests/e2e/test_examples.py, by the other name of a run"),
    (r"oobleck (run|up) .*train\.py.*", "tests/e2e/test_run_scripts.py, test_trainer.py"),
    (r"oobleck up --dry-run|python train\.py", "tests/e2e/test_dry_run.py, test_trainer.py"),
    (r"oobleck (list|attach|resume|rm|clean)\b.*|oobleck status --watch", "tests/cli/test_runs.py"),
    (r"oobleck (init|schema)", "tests/cli/test_starter.py"),
    (r"oobleck kill node2 --tag gpt2-demo", "tests/e2e/test_losses.py: a survivor keeps its process"),
    (
        r"oobleck stop gpt2-demo --now",
        "tests/cli/test_control_commands.py; the run of tests/e2e is stopped after its step",
    ),
    (r"oobleck up --detach", "tests/e2e/test_output.py"),
    (r"make (demo|test)", "CI runs them"),
    (r"make test-cuda-stub", "its environment takes 5 GB"),
    (r"make test-all", "`make test` is a part of it, and the rest takes half an hour"),
    (r"make docs", "tests/test_docs_site.py builds the site"),
    (r"pip (install|download) .*", "needs an index; tests/test_distribution.py installs the wheel"),
    (r"oobleck up --local 2 --job job.yaml", "tests/e2e/test_examples.py has a job file on virtual nodes"),
    (r"oobleck up --local 2 --steps 3", "tests/test_distribution.py, from the wheel"),
    (r"oobleck (up|checkpoint) .*s3://.*", "tests/e2e/test_urls.py, on a store of its own"),
    (r"pip install 'oobleck-train\[ray\]'|python -m pytest tests/e2e/test_ray.py", "takes 250 MB"),
    (r"python -m oobleck.runtime.agent.agent_process", "what the master runs on a node, in every run"),
    (r"python tools/gpu/verify.py .*", "needs a GPU; tests/tools/test_verify.py has fakes of what it starts"),
    (r"python tools/bench/.*", "tests/tools/test_benches.py, with --smoke"),
    (
        r"python tools/mutations.py( --end-to-end| --verify)?",
        "takes ten minutes; tests/tools/test_mutations.py sees that it fits the code",
    ),
    (
        r"python tools/(compare|paper|recovery_states|recovery_timeline|pictures|sizing).py.*",
        "tests/tools has a test of each",
    ),
)
"""What is not run by this file or on a run of tests/e2e, and why, or who runs it."""


def plain(line: str) -> str:
    return line.replace("'…'", "…")


@pytest.mark.parametrize("line", OURS, ids=plain)
def test_its_options_are_those_of_the_command(line: str, capsys: pytest.CaptureFixture[str]):
    words = [word for word in shlex.split(line) if word != "…"]
    path = command_path(words)
    assert path, "its first word is a command"
    rest = words[1 + len(path) :]
    own = rest[: rest.index("--")] if "--" in rest else rest
    if list(path) == ["run"]:  # what follows a script is the script's
        own = own[: next((place for place, word in enumerate(own, 1) if word.endswith(".py")), len(own))]
    assert main([*path, "--help", *own]) == ExitCode.DONE, capsys.readouterr().err
    offered = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out.split("Examples:")[0]))
    assert [word for word in own if word.startswith("-") and word not in offered] == []


@pytest.mark.parametrize("line", TOOLS)
def test_its_script_has_its_options(line: str):
    _, script, *options = shlex.split(line)
    text = (ROOT / script).read_text(encoding="utf-8")
    assert [word for word in options if word.startswith("--") and f'"{word}"' not in text] == []


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the pages speak of, where the commands are run."""
    monkeypatch.chdir(tmp_path)
    profile = estimate_profile(model_shape("gpt2-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024)
    Path("gpt2.json").write_text(profile_to_json(profile))
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    experts = {**config, "intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
    Path("mixtral.json").write_text(json.dumps({**experts, "vocab_size": 32000}))
    Path("config.json").write_text(json.dumps({**config, "intermediate_size": 11008, "vocab_size": 32000}))
    faults = [
        {"node_id": "x", "event_time": day, "event_type": kind, "fault_type": {"Level": "Hardware Failure"}}
        for day, kind in ((1.0, "fault_start"), (1.5, "fault_end"))
    ]
    Path("fault_trace.json").write_text(json.dumps(faults))
    Path("p3-trace.csv").write_text("5000,add,a\n5000,add,b\n65000,remove,a\n125000,add,c\n")
    for name in ("trace.json", "t.json"):
        assert main(shlex.split(f"trace generate --nodes 6 --duration 4h --preset spot-p3 -o {name}")) == ExitCode.DONE
    return tmp_path


@pytest.mark.parametrize("line", [line for line in OURS if HERE.fullmatch(line)], ids=plain)
def test_it_runs(line: str, files: Path, capsys: pytest.CaptureFixture[str]):
    more = LEFT_OUT[plain(line)] if "…" in line else ""
    words = shlex.split(line.replace("'…'", more))
    assert main(words[1:]) == ExitCode.DONE, capsys.readouterr().err
    if "-o" in words or "--plot" in words:
        written = words[words.index("-o" if "-o" in words else "--plot") + 1]
        assert (files / written).stat().st_size > 0
    else:
        assert capsys.readouterr().out.strip()


def test_every_command_is_run_or_it_is_said_why_not():
    lines = [plain(line) for line in DOCUMENTED]
    shown_elsewhere = [re.compile(pattern) for pattern, _ in ELSEWHERE]
    assert [
        line
        for line in lines
        if not HERE.fullmatch(line)
        and line not in ON_A_RUN
        and not any(pattern.fullmatch(line) for pattern in shown_elsewhere)
    ] == []
    assert [line for line in ON_A_RUN if line not in lines] == [], "no page has them any more"
    assert [pattern.pattern for pattern in shown_elsewhere if not any(map(pattern.fullmatch, lines))] == []
