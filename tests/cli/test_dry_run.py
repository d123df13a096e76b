"""What `oobleck up --dry-run` shows, and that it starts and writes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oobleck.cli.dry_run import dry_run as show_dry_run
from oobleck.cli.inputs import NodeOptions, VirtualOnes, parse_scaling, read_source
from oobleck.cli.inputs.job_file import default_job, load_job
from oobleck.cli.main import main
from oobleck.errors import ConfigError, ExitCode, UsageError
from oobleck.planner import DeviceProfile, LayerProfile, NetworkProfile, Profile, profile_to_json
from oobleck.runtime.processes import ModelOutline, outline_of

JOB = default_job(4)
TWO = VirtualOnes.alike(2)


@pytest.fixture(scope="module")
def outline() -> ModelOutline:
    return outline_of(JOB)


@pytest.fixture
def show(outline: ModelOutline, tmp_path: Path) -> Callable[..., None]:
    """A dry run of a model whose outline is known already: each outline takes a process that loads torch."""
    return partial(show_dry_run, base_dir=tmp_path / "base", find_outline=lambda _: outline)


def dry_run(base_dir: Path, *arguments: object) -> int:
    return main(["up", *map(str, arguments), "--dry-run", "--base-dir", str(base_dir)])


def first_stages(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The stages of the first pipeline that was printed as JSON."""
    stages: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["plan"]["pipelines"][0]["stages"]
    return stages


def measured(outline: ModelOutline, *, block_s: float) -> Profile:
    """A profile such as a run of the default job would have measured, with blocks of this speed."""
    layers = [
        LayerProfile(
            name=layer.name,
            forward_s={1: block_s},
            backward_s={1: 2 * block_s},
            param_bytes=4 * layer.parameters,
            optimizer_bytes=8 * layer.parameters,
            activation_bytes=1000,
            output_bytes=1000,
        )
        for layer in outline.layers
    ]
    return Profile(
        model="gpt2",
        microbatch_size=JOB.microbatch_size,
        sequence_length=JOB.data.sequence_length,
        layers=tuple(layers),
        device=DeviceProfile(name="a processor", memory_bytes=10**10),
        network=NetworkProfile(
            inter_node_bytes_per_s=1e9,
            inter_node_latency_s=1e-4,
            intra_node_bytes_per_s=1e9,
            intra_node_latency_s=1e-4,
        ),
    )


def test_the_outline_is_the_default_model(outline):
    config = JOB.model.config
    width, vocabulary = config["n_embd"], JOB.data.vocab_size
    assert [layer.name for layer in outline.layers] == [
        "embedding",
        *(f"transformer.h.{index}" for index in range(config["n_layer"])),
        "head",
    ]
    # Attention has 4 matrices of width², the feed-forward part 8; with biases of 4, 1 + 4 + 1 and norms of 4 widths.
    assert outline.layers[1].parameters == 12 * width**2 + 13 * width
    assert outline.layers[-1].parameters == (vocabulary + 2) * width


def test_without_a_profile_the_plan_is_an_estimate_and_nothing_is_written(show, tmp_path, capsys):
    job = replace(JOB, num_pipelines=2, device_memory_bytes=3000000000, fault_threshold=0)
    show(job, VirtualOnes.alike(3), as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["estimated"], answer["device"], answer["nodes"], answer["fault_threshold"]) == (True, "CPU", 3, 0)
    pipelines = answer["plan"]["pipelines"]
    assert len(pipelines) == 2
    assert sorted(node for each in pipelines for node in each["nodes"]) == ["node0", "node1", "node2"]
    assert sum(each["microbatches"] for each in pipelines) == JOB.num_microbatches
    assert {stage["available_bytes"] for each in pipelines for stage in each["stages"]} == {3000000000}
    assert not (tmp_path / "base").exists()


def test_nodes_are_the_hostfiles_and_the_newest_profile_that_fits_is_used(outline, show, tmp_path, capsys):
    folder = tmp_path / "base" / JOB.tag / "profile"
    folder.mkdir(parents=True)
    slow, fast = measured(outline, block_s=0.5), measured(outline, block_s=0.01)
    others = {
        "other-length": replace(slow, sequence_length=32),
        "other-model": replace(slow, model="llama"),
        "other-sizes": replace(
            slow, layers=(slow.layers[0], *(replace(layer, param_bytes=4) for layer in slow.layers))
        ),
    }
    texts = {"slow": profile_to_json(slow), "fast": profile_to_json(fast), "torn": "{"}
    texts |= {name: profile_to_json(profile) for name, profile in others.items()}
    for age, (name, text) in enumerate(texts.items()):
        (folder / f"{name}.json").write_text(text)
        os.utime(folder / f"{name}.json", (age, age))
    (tmp_path / "hosts.txt").write_text("red\ngreen port=2222\nuser@blue\n")
    source = read_source(tmp_path / "hosts.txt", NodeOptions())
    before = sorted((tmp_path / "base").rglob("*"))
    show(JOB, source, as_json=False)
    shown = capsys.readouterr().out
    assert "nothing is started" in shown
    assert str(folder / "fast.json") in shown.replace("\n", "")
    assert "gpt2 on 3 nodes of 1 × a processor" in shown
    assert "estimated" not in shown
    assert sorted((tmp_path / "base").rglob("*")) == before
    show(JOB, source, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert not answer["estimated"]
    assert sorted(node for each in answer["plan"]["pipelines"] for node in each["nodes"]) == ["blue", "green", "red"]
    # Each microbatch takes a third of a second through ten layers; no plan makes eight of them faster than this.
    assert answer["plan"]["step_s"] >= 8 * 10 * 0.03 / 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(("--local", 2, "--set", "model.n_layers=3"), ExitCode.CONFIG, "n_layers", marks=pytest.mark.slow),
        (("--local", 2, "--summary", "s.json"), ExitCode.USAGE, "a dry run has none"),
        (("--local", 2, "--summary", "/"), ExitCode.USAGE, "--summary: / is a directory; name a file"),
        (("--local", 2, "--verify", 3), ExitCode.USAGE, "--verify: a dry run compares nothing; use `oobleck verify`"),
        pytest.param(
            ("--local", 2, "--tp", "2"),
            ExitCode.CONFIG,
            "tensor_parallel: gpt2 cannot be shared by devices",
            marks=pytest.mark.slow,
        ),
        (("--local", 2, "--set", "device=cuda"), ExitCode.USAGE, "oobleck plan --device"),
    ],
)
def test_what_a_run_would_refuse_is_refused(tmp_path, capsys, arguments, code, said):
    assert dry_run(tmp_path, *arguments) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_the_memory_is_that_of_the_nodes_of_this_run_and_not_of_the_one_that_measured(outline, show, tmp_path, capsys):
    folder = tmp_path / "base" / JOB.tag / "profile"
    folder.mkdir(parents=True)
    (folder / "measured.json").write_text(profile_to_json(measured(outline, block_s=0.01)))
    show(JOB, VirtualOnes.alike(2), as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert not answer["estimated"]
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert {stage["available_bytes"] for each in answer["plan"]["pipelines"] for stage in each["stages"]} == {own}


def test_a_model_that_does_not_fit_is_refused(show):
    with pytest.raises(ConfigError, match=r"needs 26\.24 MB, and a stage has 1000 bytes .*; give each node"):
        show(replace(JOB, device_memory_bytes=1000), VirtualOnes.alike(2), as_json=False)


def test_nodes_of_several_kinds_are_planned_by_their_data_sheets(show, tmp_path, capsys):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("red slots=2 device=A100\nblue device=A100\ngreen\n")
    show(JOB, read_source(hostfile, NodeOptions()), as_json=False)
    shown = capsys.readouterr().out
    assert "the run itself measures each kind first" in shown
    assert "No data sheet is known of default: that of a CPU core is used" in shown
    assert "A100×2" in shown
    with pytest.raises(UsageError, match="there is no data sheet of default"):
        show(replace(JOB, device="cuda"), read_source(hostfile, NodeOptions()), as_json=False)


def test_an_interleaved_job_on_nodes_of_several_kinds_is_refused_as_the_run_would_be(show, tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("red device=A100\nblue device=A40\n")
    with pytest.raises(ConfigError, match="choose 1f1b, zero-bubble or auto"):
        show(replace(JOB, schedule="interleaved"), read_source(hostfile, NodeOptions()), as_json=False)


def test_nodes_that_would_rest_are_left_out_and_told(show, capsys):
    job = replace(JOB, scaling=parse_scaling("efficient", JOB.scaling, now=datetime.now(UTC)))
    show(job, VirtualOnes.alike(12), as_json=False)
    told = capsys.readouterr().out
    assert " of 12 nodes " in told
    show(job, VirtualOnes.alike(12), as_json=True)
    used = json.loads(capsys.readouterr().out)["nodes"]
    assert 2 <= used < 12
    assert f"{used} of 12 nodes" in told
    show(JOB, VirtualOnes.alike(12), as_json=True)
    assert json.loads(capsys.readouterr().out)["nodes"] == 12


def test_of_several_kinds_the_slowest_would_rest_first(show, tmp_path, capsys):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("".join(f"slow{number}\n" for number in range(6)) + "fast0 device=A100\nfast1 device=A100\n")
    job = replace(JOB, scaling=parse_scaling("efficient", JOB.scaling, now=datetime.now(UTC)))
    show(job, read_source(hostfile, NodeOptions()), as_json=False)
    told = capsys.readouterr().out
    show(job, read_source(hostfile, NodeOptions()), as_json=True)
    plan = json.loads(capsys.readouterr().out)["plan"]
    used = [node for pipeline in plan["pipelines"] for node in pipeline["nodes"]] + plan["spares"]
    assert f"{len(used)} of 8 nodes are to train (efficient)" in told
    assert len(used) < 8
    assert {"fast0", "fast1"} <= set(used)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--set", "data.paths=[/nowhere]"), 78, "data.paths: /nowhere does not exist"),
        (("--set", "data.tokenizer=/nowhere"), 78, "data.tokenizer: /nowhere does not exist"),
        (("--resume", "/nowhere"), 78, "--resume /nowhere: there is no checkpoint"),
        (("--metrics", "8.8.8.8:9"), 2, "--metrics: '8.8.8.8' is no address of this machine"),
        (("--set", "optimizer.adam_beta1=1"), 2, "optimizer.adam_beta1: 1.0 is not possible"),
        (("--python", "/nowhere"), 2, "--python: there is no /nowhere"),
        (("--set", "eval_steps=3"), 78, "eval_steps: 3 is not possible; it must be left out unless data.validation_"),
        (("--set", "model.n_layer=0"), 2, "model.config.n_layer: 0 is not possible; it must be from 1 to 1,000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_run_would_refuse_is_refused_by_a_dry_run(tmp_path, capsys, arguments, code, words):
    assert dry_run(tmp_path / "base", "--local", 2, *arguments) == code
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "base").exists()


def test_a_directory_for_checkpoints_that_cannot_be_written_to_is_refused_by_name(tmp_path, capsys):
    """All may write in /proc, as it says itself, and nobody can."""
    job = tmp_path / "job.yaml"
    job.write_text("model: {type: gpt2, n_embd: 8, n_layer: 1, n_head: 1}\ncheckpoint: {directory: /proc/x}\n")
    assert dry_run(tmp_path / "base", "--local", 2, "--job", job) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "checkpoint.directory: /proc/x: nothing can be written in /proc" in said
    assert "name another one" in said


def test_a_base_directory_that_cannot_be_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert dry_run(tmp_path / "file" / "deep", "--local", 2) == ExitCode.CONFIG
    assert str(tmp_path / "file") in capsys.readouterr().err.replace("\n", "")
    assert dry_run(tmp_path / "file", "--local", 2) == ExitCode.USAGE


def test_more_losses_at_once_than_nodes_are_warned_of(tmp_path, capsys):
    """Before anything else is looked at."""
    for f, nodes, is_warned in ((99, 2, True), (2, 2, True), (1, 2, False), (1, 1, False), (2, 3, False)):
        assert dry_run(tmp_path / "base", "--local", nodes, "--pipelines", 1, "-f", f, "--metrics", "8.8.8.8:9") == 2
        said = capsys.readouterr().err
        assert all(words in said for words in (f"fault_threshold is {f},", f" {nodes} nodes")) == is_warned


def test_experts_that_would_stay_on_their_devices_are_counted_once_in_a_node(tmp_path, capsys):
    sizes = "hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2"
    job = load_job(
        f"model: {{type: mixtral, {sizes}, num_key_value_heads: 1, num_local_experts: 8}}\n"
        "data: {sequence_length: 32, vocab_size: 300}\nglobal_batch_size: 16\nmicrobatch_size: 2\n"
        "sharding: optimizer\nsharding_devices: 2\n",
        source="job.yaml",
    )
    outline = outline_of(job)
    held = {}
    for expert_parallel in (False, True):
        each = replace(job, expert_parallel=expert_parallel)
        show_dry_run(each, TWO, base_dir=tmp_path / "base", as_json=True, find_outline=lambda _: outline)
        held[expert_parallel] = sum(sum(stage["memory_bytes"].values()) for stage in first_stages(capsys))
    # Without, each of the two devices has all experts' weights and gradients as well.
    assert held[False] - held[True] == 2 * (4 + 4) * 2 * 8 * 3 * 64 * 128


def test_devices_that_would_share_samples_hold_a_part_of_the_activations(show, capsys):
    heads = JOB.model.config["n_head"]
    data = replace(JOB.data, sequence_length=12 * heads)
    shared = replace(JOB, data=data, global_batch_size=8 * heads, dropout=False)
    job = replace(shared, sharding="optimizer", sharding_devices=heads)
    held = {}
    for number in (1, heads):
        show(replace(job, context_parallel=number), TWO, as_json=True)
        held[number] = sum(stage["memory_bytes"]["activations"] for stage in first_stages(capsys))
    # The rest is gradients of weights, such as the embedding, as they come: as large on each device.
    assert held[heads] < 0.44 * held[1]
