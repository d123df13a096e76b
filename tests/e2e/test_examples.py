"""Every example runs, at a size that a test can afford; the scripts with a node that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from oobleck.cli.chaos_run.play import name_nodes, not_played
from oobleck.cli.trace import read_trace

from .elastic import assert_nothing_lost
from .harness import TAG, Outcome, Runner, oobleck

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ("--tag", TAG, "--set", "torch_threads=1", "--set", "data.max_bytes=200000")


def _script(runner: Runner, name: str, *arguments: str, options: tuple[str, ...] = ()) -> Outcome:
    nodes = ("--local", "4", str(EXAMPLES / name), *options, *TINY)
    return runner.run(*(("--", *arguments) if arguments else ()), nodes=nodes)


def _entries(runner: Runner, kind: str) -> list[dict[str, object]]:
    return [entry for entry in runner.journal() if entry["@type"] == kind]


def test_every_example_is_tested() -> None:
    others = [Path(__file__).with_name(name) for name in ("test_launch.py", "test_run_scripts.py")]
    others.append(Path(__file__).parents[1] / "sim" / "test_example.py")
    tests = "".join(path.read_text() for path in (Path(__file__), *others))
    jobs = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")]
    assert len(jobs) >= 5
    assert [name for name in jobs if name not in tests] == []


def test_the_trace_is_one_for_four_nodes() -> None:
    trace = read_trace(EXAMPLES / "chaos.json")
    assert name_nodes(trace, [f"node{index}" for index in range(4)]) == {node: node for node in trace.nodes}
    assert not_played(trace) is None


@pytest.mark.slow  # tests/cli/inputs/test_job_file.py reads the first
@pytest.mark.parametrize(("name", "size"), [("gpt2.yaml", "n_layer"), ("llama.yaml", "num_hidden_layers")])
def test_job_files(runner: Runner, name: str, size: str) -> None:
    options = ("--steps", "3", "--set", f"model.{size}=2", *TINY)
    outcome = runner.run("--job", str(EXAMPLES / name), *options, nodes=("--local", "2"))
    assert_nothing_lost(outcome, 3)


def test_a_stream_is_trained_on_while_it_is_written(runner: Runner, tmp_path: Path) -> None:
    """`stream.yaml`, on what `feed.py` writes meanwhile."""
    file = tmp_path / "stream.bin"
    feed = [sys.executable, str(EXAMPLES / "feed.py"), str(file), "--rows", "90", "--rows-per-second", "60"]
    with subprocess.Popen(feed) as writing:
        options = ("--set", f"data.shards=[{file}]", "--set", "model.n_layer=2", "--set", "model.n_embd=32", *TINY)
        outcome = runner.run("--job", str(EXAMPLES / "stream.yaml"), *options, nodes=("--local", "2"))
        assert writing.wait() == 0
    assert_nothing_lost(outcome, 6)
    assert outcome.summary["samples_committed"] == 90


@pytest.mark.slow
def test_llama_from_a_script_with_evaluation_and_callbacks(runner: Runner) -> None:
    """`llama.py`: its arguments arrive, its callbacks hear of steps, evaluations and the recovery."""
    steps = 60  # so that a busy master hears of the step to kill at long before the last
    options = ("--set", "eval_steps=20", "--set", "num_pipelines=2", "--kill", "node3@6")
    arguments = ("--hidden-size", "32", "--layers", "3", "--steps", str(steps))
    outcome = _script(runner, "llama.py", *arguments, options=options)
    assert_nothing_lost(outcome, steps)
    evaluated = _entries(runner, "Evaluated")
    assert [entry["step"] for entry in evaluated] == [20, 40, 60]
    losses = [entry["loss"] for entry in evaluated]
    assert losses == sorted(losses, reverse=True), "it learns"
    log = (runner.base_dir / TAG / "script.log").read_text()
    assert f"step {steps}: {{'loss': " in log
    assert "step 40: {'eval_loss': " in log
    assert "node3 lost; " in log
    assert "failed" not in log


@pytest.mark.slow
def test_a_script_of_transformers_trainer_continues_after_training(runner: Runner, tmp_path: Path) -> None:
    """`trainer.py`: a node is killed on the way; the lines after `train()` have the trained weights."""
    options = ("--resume", "never", "--set", "num_pipelines=2", "--kill", "node1@6")
    arguments = ("--layers", "2", "--files", "4", "--steps", "20", "--output", str(tmp_path / "trained"))
    outcome = _script(runner, "trainer.py", *arguments, options=options)
    assert_nothing_lost(outcome, 20)
    after = float(outcome.output.split("eval_loss after training: ")[1].split()[0])
    assert after < outcome.losses[0] - 0.3, "it has learnt"
    assert (tmp_path / "trained" / "model.safetensors").is_file()
    assert "node1 lost; " in (runner.base_dir / TAG / "script.log").read_text()


@pytest.mark.slow
def test_a_model_of_ones_own_survives_a_kill(runner: Runner) -> None:
    """`own_model.py`: layers, data, optimizer and schedule are the script's."""
    outcome = _script(runner, "own_model.py", options=("--steps", "60", "--kill", "node1@20"))
    assert_nothing_lost(outcome, 60)
    assert outcome.losses[-1] < outcome.losses[0] / 2, "it learns to say what came before"
    rates = [entry["record"]["learning_rate"] for entry in _entries(runner, "StepDone")]  # type: ignore[index]
    assert rates[:3] == pytest.approx([3e-4, 6e-4, 9e-4])


@pytest.mark.slow
def test_fine_tuning_a_saved_model(runner: Runner, tmp_path: Path) -> None:
    """`finetune.yaml`: a directory with weights and a tokenizer, JSON lines, bfloat16, evaluation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    lines = [f"line {number} says {number * number}" for number in range(2000)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    vocab_size = _save_tokenizer(lines, tmp_path / "model")
    config = GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=vocab_size, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")

    outcome = runner.run(
        *("--job", str(EXAMPLES / "finetune.yaml"), "--steps", "12", "--tag", TAG, "--kill", "node0@5"),
        *("--set", f"model.path={tmp_path / 'model'}", "--set", f"data.paths=[{tmp_path / 'corpus.jsonl'}]"),
        *("--set", "data.sequence_length=32", "--set", "global_batch_size=8", "--set", "eval_steps=6"),
        *("--set", "learning_rate=5e-3", "--set", "warmup_steps=2", "--set", "torch_threads=1"),
    )
    assert_nothing_lost(outcome, 12)
    assert outcome.losses[-1] < outcome.losses[0] - 0.3, "it learns"
    assert [entry["step"] for entry in _entries(runner, "Evaluated")] == [6, 12]


def _save_tokenizer(lines: list[str], directory: Path) -> int:
    """Train a tokenizer on some lines, and save it as transformers does; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    saved.save_pretrained(directory)
    size: int = tokenizer.get_vocab_size()
    return size


@pytest.mark.slow
def test_adapters_are_trained_and_exported_alone(runner: Runner, tmp_path: Path) -> None:
    """`lora.yaml`: what PEFT makes of the adapters and their model is what the merged model computes."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    lines = [f"twice {number} is {2 * number}" for number in range(400)]
    rows = [{"prompt": f"twice {number}", "completion": f" is {2 * number}"} for number in range(400)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vocab_size = _save_tokenizer(lines, tmp_path / "model")
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=vocab_size, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    outcome = runner.run(
        *("--job", str(EXAMPLES / "lora.yaml"), "--steps", "16", "--tag", TAG, "--kill", "node1@5"),
        *("--set", f"model.path={tmp_path / 'model'}", "--set", f"data.paths=[{tmp_path / 'questions.jsonl'}]"),
        *("--set", "data.sequence_length=48", "--set", "num_pipelines=2", "--set", "learning_rate=3e-2"),
        *("--set", "warmup_steps=2", "--set", "torch_threads=1"),
    )
    assert_nothing_lost(outcome, 16)
    assert outcome.losses[-1] < outcome.losses[0] - 0.1, "it learns"
    for form in ("hf", "peft"):
        words = ("checkpoint", "export", TAG, str(tmp_path / form), "--format", form)
        done = oobleck(*words, "--base-dir", str(runner.base_dir))
        assert done.returncode == 0, done.stderr
    ids = torch.arange(1, 25)[None]
    # In float64, so that nothing is rounded but the merged weights.
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name).double().eval() for name in ("model", "hf"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers will drop
        before = base(ids).logits.clone()
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft").double().eval()
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)
        assert (adapted(ids).logits - before).abs().max() > 1e-3
