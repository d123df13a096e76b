"""Job files and `--set`: what they make of a job, and what is said of those that cannot be used."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.cli.inputs.job_file import apply_overrides, default_job, load_job
from oobleck.cli.inputs.options import complete_keys
from oobleck.errors import ConfigError, UsageError
from oobleck.job import ControlSpec, DataSpec, JobSpec, LoraSpec, ModelSpec, OptimizerSpec
from tests.examples import examples
from tests.wire.strategies import job_specs


def load(text: str) -> JobSpec:
    return load_job(text, source="job.yaml")


def change(*settings: str, job: JobSpec | None = None) -> JobSpec:
    return apply_overrides(job or JobSpec(), settings)


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "{}", "optimizer:\n  # learning_rate: 1\ndata:\nmodel:\n"]
)
def test_a_file_that_says_nothing_is_the_default_job(text):
    assert load(text) == JobSpec()


def test_the_names_of_training_arguments_are_understood():
    text = """
        run_name: mine
        learning_rate: 1e-4
        optimizer: {weight_decay: 0.3}
        per_device_train_batch_size: 4
        bf16: true
        fp16: false
        gradient_checkpointing: true
        save_steps: 50
        sequence_length: 128
    """
    job = load(text)
    assert (job.checkpoint.save_steps, job.data.sequence_length) == (50, 128)
    assert (job.tag, job.microbatch_size, job.dtype, job.recompute) == ("mine", 4, "bfloat16", "all")
    assert (job.optimizer.learning_rate, job.optimizer.weight_decay) == (1e-4, 0.3)
    assert change("learning_rate=0.5", "optimizer.weight_decay=0").optimizer.learning_rate == 0.5


def test_the_job_files_of_oobleck_0_1_are_understood():
    text = """
        dist: {master_ip: 10.0.0.1, node_ips: [10.0.0.2, 10.0.0.3], num_workers: 1}
        job: {fault_threshold: 3, microbatch_size: 8, global_microbatch_size: 128, steps: 50}
        model:
          model_name: gpt2
          model_tag: test
          dataset_path: wikitext
          dataset_name: wikitext-2-raw-v1
          model_args: {n_layer: 24}
    """
    job = load(text)
    assert (job.tag, job.fault_threshold, job.max_steps) == ("test", 3, 50)
    assert (job.microbatch_size, job.global_batch_size) == (8, 128)
    assert (job.model.type, dict(job.model.config)) == ("gpt2", {"n_layer": 24})
    assert (job.data.dataset_path, job.data.dataset_name) == ("wikitext", "wikitext-2-raw-v1")


def test_the_default_job_shows_two_pipelines_where_there_are_nodes_for_them():
    assert default_job(1) == JobSpec()
    assert default_job(4) == JobSpec(num_pipelines=2)


def test_keys_of_all_kinds():
    text = """
        tag: run-1
        model: {type: llama, hidden_size: 512, tie_word_embeddings: true, rope_theta: 1e4, hidden_act: silu, pad: null}
        data:
          paths:
            - a.txt
            - texts/
          sequence_length: 64
        optimizer:
          learning_rate: 3e-4
          weight_decay: 0
          lr_scheduler_type: linear
        control: {lease_s: 10}
        max_steps: 1_000
        dtype: float64
        num_pipelines: 2
        torch_threads: ~
        schedule: 1f1b
    """
    assert load(text) == JobSpec(
        tag="run-1",
        model=ModelSpec(
            type="llama",
            config={
                "hidden_size": 512,
                "tie_word_embeddings": True,
                "rope_theta": 1e4,
                "hidden_act": "silu",
                "pad": None,
            },
        ),
        data=DataSpec(paths=("a.txt", "texts/"), sequence_length=64),
        optimizer=OptimizerSpec(learning_rate=3e-4, weight_decay=0.0, lr_scheduler_type="linear"),
        control=ControlSpec(lease_s=10.0),
        max_steps=1000,
        dtype="float64",
        num_pipelines=2,
    )


def test_whole_numbers_become_floats_where_floats_are_wanted():
    assert type(load("optimizer: {weight_decay: 0}").optimizer.weight_decay) is float


@pytest.mark.parametrize(
    "text",
    [
        "model: {type: llama, hidden_size: 512}",
        "model: {hidden_size: 512, type: llama}",
        "model:\n  type: llama\n  config: {hidden_size: 512}",
        "model:\n  type: llama\n  config:\n  hidden_size: 512",
    ],
)
def test_a_models_configuration_stands_beside_its_type_or_below(text):
    assert load(text).model == ModelSpec(type="llama", config={"hidden_size": 512})


def test_a_models_name_alone_is_its_type():
    assert load("model: llama").model == ModelSpec(type="llama")


def as_yaml(value: Any) -> Any:
    """A job as the containers that PyYAML writes."""
    if is_dataclass(value):
        return {field.name: as_yaml(getattr(value, field.name)) for field in fields(value) if field.name != "script"}
    if isinstance(value, tuple):
        return [as_yaml(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def is_writable(value: Any) -> bool:
    """Whether a file can say it: all numbers finite, all keys words."""
    if isinstance(value, dict):
        return all(value) and all(map(is_writable, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


@examples(60)
@given(job=job_specs().map(lambda job: replace(job, script=None)))
def test_every_job_that_can_be_written_is_read_back(job):
    written = as_yaml(job)
    assume(is_writable(written))
    # Quotes everything: PyYAML would write text plainly that is a number by the rules of YAML 1.2.
    assert load(yaml.safe_dump(written, default_style='"')) == job
    model = written["model"]
    if not model["config"].keys() & {"type", "config", "path", "task", "lora", "whole_loss"}:
        written["model"] = {
            **{key: model[key] for key in ("type", "path", "task", "lora", "whole_loss")},
            **model["config"],
        }
        assert load(yaml.safe_dump(written, default_style='"')) == job


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("seed: 1\nmax_stps: 3", 2, "unknown key 'max_stps'; did you mean max_steps?"),
        ("max_bytes: 1", 1, "unknown key 'max_bytes'; did you mean data.max_bytes?"),
        ("seed: 1\nlearning_rate: fast", 2, "optimizer.learning_rate: expected a number, got 'fast'"),
        ("learning_rate: 1\noptimizer:\n  learning_rate: 2", 3, "optimizer.learning_rate is given twice, here and in"),
        ("data: [1, 2]\nsequence_length: 8", 1, "data: expected keys with values, got a list"),
        ("learning_rate: 1\noptimizer: adam", 2, "optimizer: expected keys with values, got adam"),
        ("dtype: float32\nfp16: true", 2, "dtype is given twice, here and in line 1"),
        ("model:\n  n_embd: 64\n  config:\n    n_embd: 32", 4, "model.n_embd is given twice, once within config"),
        ("model:\n  config: {n_embd: 64}\n  n_embd: 32", 3, "model.n_embd is given twice, once within config"),
        ("bf16: 3", 1, "bf16: expected true or false"),
        ("data:\n  seed: 1", 2, "unknown key 'seed' in data; did you mean seed?"),
        ("optimizer:\n  learning_rte: 1", 2, "unknown key 'learning_rte' in optimizer; did you mean learning_rate?"),
        ("optimiser:\n  learning_rate: 1", 1, "unknown key 'optimiser'; did you mean optimizer?"),
        ("seqence_length: 1", 1, "unknown key 'seqence_length'; did you mean data.sequence_length?"),
        ("data:\n\n  q: 1", 3, "unknown key 'q' in data; known are dataset_name, dataset_path,"),
        ("seed: 0\nmax_steps: many", 2, "max_steps: expected a whole number, got 'many'"),
        ("max_steps: '5'", 1, "max_steps: expected a whole number, got '5'"),
        ("max_steps: 1e3", 1, "max_steps: expected a whole number, got 1e3; write 1000"),
        ("max_steps: 1.5", 1, "max_steps: expected a whole number, got 1.5"),
        ("max_steps: true", 1, "max_steps: expected a whole number, got true"),
        ("max_steps:", 1, "max_steps: expected a whole number, got nothing"),
        ("max_steps: [1]", 1, "max_steps: expected a whole number, got a list"),
        ("num_pipelines: two", 1, "num_pipelines: expected a whole number, got 'two'"),
        (f"max_steps: {2**63}", 1, "max_steps: expected a whole number of at most 64 bits, got 9223372036854775808"),
        ("optimizer:\n  learning_rate: fast", 2, "optimizer.learning_rate: expected a number, got 'fast'"),
        ("optimizer:\n  learning_rate: .nan", 2, "optimizer.learning_rate: expected a finite number, got .nan"),
        ("control: {lease_s: .inf}", 1, "control.lease_s: expected a finite number, got .inf"),
        ("tag: 5", 1, "tag: expected text, got 5; put it in quotes"),
        ("tag: {a: 1}", 1, "tag: expected text, got keys with values"),
        ("dtype: float8", 1, "dtype: expected one of float32, float64, bfloat16, float16, got 'float8'"),
        ("dtype: [float32]", 1, "dtype: expected one of float32, float64, bfloat16, float16, got a list"),
        ("data:\n  paths: a.txt", 2, "data.paths: expected a list, got 'a.txt'; write [a.txt]"),
        ("data:\n  paths:\n    - a\n    - 5", 4, "data.paths: expected text, got 5; put it in quotes"),
        (
            "reductions_per_step: often",
            1,
            "reductions_per_step: expected a whole number, or auto, got 'often'",
        ),
        (
            "attn_implementation: flex",
            1,
            "expected one of eager, sdpa, flash_attention_2, flash_attention_3, got 'flex'",
        ),
        (
            "attn_implementation: [eager]",
            1,
            "attn_implementation: expected one of eager, sdpa",
        ),
        ("reductions_per_step:", 1, "reductions_per_step: expected a whole number, or auto, got nothing"),
        ("reductions_per_step: 0", 1, "reductions_per_step: 0 is not possible; it must be from 1 to 65,536 (or auto)"),
        ("data: text.txt", 1, "data: expected keys with values, got 'text.txt'"),
        ("optimizer: [1]", 1, "optimizer: expected keys with values, got a list"),
        ("- 1", 1, "expected keys with values, got a list"),
        ("hello", 1, "expected keys with values, got 'hello'"),
        ("model: 5", 1, "model: expected text, got 5; put it in quotes"),
        ("model:\n  type: [a]", 2, "model.type: expected text, got a list"),
        ("model:\n  rope: {a: 1}", 2, "model.rope: expected text, a number, true or false, got keys with values"),
        ("model:\n  config:\n    a: [1]", 3, "model.a: expected text, a number, true or false, got a list"),
        ("model: {a: .inf}", 1, "model.a: expected a finite number, got .inf"),
        (f"tag: 1\nseed: {'x' * 99}", 1, "tag: expected text"),
        (f"seed: {'x' * 99}", 1, f"got '{'x' * 60}…'"),
        ("\nmax_steps: 0", 2, "max_steps: 0 is not possible; it must be from 1 to 1,000,000,000,000"),
        (
            "microbatch_size: 2\nglobal_batch_size: 7",
            2,
            "global_batch_size: 7 is not possible; it must be a multiple of",
        ),
        ("seed: 1\nmicrobatch_size: 7", 1, "global_batch_size: 8 is not possible; it must be a multiple of"),
        ("seed: 1\ndata:\n  vocab_size: 3", 3, "data.vocab_size: 3 is not possible; it must be from 257 to 10,000,000"),
        ("\ncontrol:\n  heartbeat_interval_s: 2", 2, "control.lease_s: 3.0 is not possible; it must be at least two"),
        (
            "seed: 1\ncontrol:\n  notice_command: ''",
            3,
            "control.notice_command: '' is not possible; it must be a shell",
        ),
        ("data:\n  paths: ['a.txt', '']", 2, "data.paths: ('a.txt', '') is not possible; it must be files or"),
        ("seed: 1\nseed: 2", 2, "seed is given twice, here and in line 1"),
        ("seed: [", 1, "not YAML"),
        ("seed: !!python/object/apply:os.abort []", 1, "is not supported"),
    ],
)
def test_errors_name_file_line_key_value_and_remedy(text, line, problem):
    with pytest.raises(ConfigError) as error:
        load(text)
    assert str(error.value).startswith(f"job.yaml:{line}: ")
    assert problem in str(error.value)


KEYS = st.sampled_from(
    ["tag", "seed", "model", "data", "optimizer", "learning_rate", "paths", "dtype", "type", "config"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["float32", "gpt2"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@examples(300)
@given(text=st.text(max_size=60) | st.dictionaries(KEYS, VALUES, max_size=4).map(yaml.safe_dump))
def test_any_text_gives_a_job_or_a_config_error_that_names_a_line(text):
    try:
        job = load(text)
    except ConfigError as error:
        source, line, problem = str(error).split(":", 2)
        assert source == "job.yaml"
        assert int(line) >= 1
        assert problem.strip()
    else:
        assert isinstance(job, JobSpec)


# --- overrides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.learning_rate=3e-4", JobSpec(optimizer=OptimizerSpec(learning_rate=3e-4))),
        ("seed=7", JobSpec(seed=7)),
        ("seed = 7", JobSpec(seed=7)),
        ("dtype=float64", JobSpec(dtype="float64")),
        ("data.paths=[a.txt, b.txt]", JobSpec(data=DataSpec(paths=("a.txt", "b.txt")))),
        ("data.paths=[]", JobSpec()),
        ("data.paths=", JobSpec()),
        ("data={paths: [a=b], vocab_size: 300}", JobSpec(data=DataSpec(paths=("a=b",), vocab_size=300))),
        ("model=llama", JobSpec(model=ModelSpec(type="llama"))),
        ("model.type=llama", JobSpec(model=ModelSpec(type="llama"))),
        ("model={type: llama, hidden_size: 5}", JobSpec(model=ModelSpec(type="llama", config={"hidden_size": 5}))),
        ("num_pipelines=2", JobSpec(num_pipelines=2)),
        ("reductions_per_step=4", JobSpec(reductions_per_step=4)),
        ("reductions_per_step=auto", JobSpec()),
        ("tag=2024", JobSpec(tag="2024")),  # a shell eats quotes
        ("tag=1e3", JobSpec(tag="1e3")),
        ("tag='x'", JobSpec(tag="x")),
    ],
)
def test_an_override_changes_one_key(text, expected):
    assert change(text) == expected


def test_an_override_leaves_the_rest_of_the_job_alone():
    job = JobSpec(seed=3, optimizer=OptimizerSpec(weight_decay=0.5), num_pipelines=2, tag="mine")
    assert change("optimizer.learning_rate=1", job=job) == JobSpec(
        seed=3, optimizer=OptimizerSpec(weight_decay=0.5, learning_rate=1.0), num_pipelines=2, tag="mine"
    )


def test_nothing_to_override_changes_nothing():
    assert change("model=", "optimizer=", job=JobSpec(seed=3)) == JobSpec(seed=3)
    assert change(job=JobSpec(seed=3)) == JobSpec(seed=3)


def test_an_option_can_be_taken_back():
    assert change("num_pipelines=null", job=JobSpec(num_pipelines=2)) == JobSpec()


def test_overrides_take_effect_together():
    assert change("microbatch_size=3", "global_batch_size=9") == JobSpec(microbatch_size=3, global_batch_size=9)


def test_the_later_of_two_overrides_counts():
    assert change("seed=1", "optimizer={warmup_steps: 3}", "seed=2", "optimizer.warmup_steps=4") == JobSpec(
        seed=2, optimizer=OptimizerSpec(warmup_steps=4)
    )


def test_a_models_configuration_is_changed_key_by_key():
    job = JobSpec(model=ModelSpec(type="llama", config={"hidden_size": 64, "num_hidden_layers": 2}))
    assert change("model.hidden_size=32", "model.config.vocab_size=99", job=job).model == ModelSpec(
        type="llama", config={"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99}
    )


@pytest.mark.parametrize("settings", [("model.n_layer=3", "model=gpt2"), ("model.type=gpt2", "model.n_layer=3")])
def test_a_model_that_is_named_starts_from_its_own_defaults(settings):
    job = JobSpec(model=ModelSpec(type="llama", config={"hidden_size": 64}))
    assert change(*settings, job=job).model == ModelSpec(type="gpt2", config={"n_layer": 3})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("seed",), "--set seed: not KEY=VALUE, as in optimizer.learning_rate=3e-4"),
        (("=1",), "--set =1: not KEY=VALUE"),
        (("a..b=1",), "--set a..b=1: not KEY=VALUE"),
        (("seed=[",), "--set seed=[: not YAML"),
        (("sed=1",), "--set sed=1: unknown key 'sed'; did you mean seed?"),
        (("optimizer.lr=1",), "--set optimizer.lr=1: unknown key 'lr' in optimizer; known are adam_beta1"),
        (("seed=x",), "--set seed=x: seed: expected a whole number, got 'x'"),
        (("seed.x=1",), "--set seed.x=1: seed: expected a whole number, got keys with values"),
        (("optimizer=1",), "--set optimizer=1: optimizer: expected keys with values, got 1"),
        (("data.paths=a.txt",), "--set data.paths=a.txt: data.paths: expected a list, got 'a.txt'; write [a.txt]"),
        (("tag=",), "--set tag=: tag: expected text, got nothing"),
        (
            ("seed=1", "max_steps=0"),
            "--set max_steps=0: max_steps: 0 is not possible; it must be from 1 to 1,000,000,000,000",
        ),
        (
            ("seed=1", "microbatch_size=3"),
            "--set seed=1 microbatch_size=3: global_batch_size: 8 is not possible; it must be a multiple",
        ),
    ],
)
def test_errors_name_the_override_and_the_remedy(settings, problem):
    with pytest.raises(UsageError) as error:
        change(*settings)
    assert str(error.value).startswith(problem)


@examples(200)
@given(
    text=st.text(max_size=30)
    | st.builds("{}={}".format, st.lists(KEYS, min_size=1, max_size=3).map(".".join), VALUES.map(str))
)
def test_any_override_gives_a_job_or_a_usage_error(text):
    try:
        job = change(text)
    except UsageError as error:
        said = str(error)
    else:
        assert isinstance(job, JobSpec)
        return
    assert said.startswith(f"--set {text}: ")


@pytest.mark.parametrize("offered", complete_keys(""))
def test_a_shell_offers_keys_that_can_be_set(offered: str) -> None:
    # No key takes such a value, and one that is unknown is refused before its value is.
    with pytest.raises(UsageError) as error:
        change(f"{offered}[[]]")
    assert "unknown key" not in str(error.value)


def test_a_shell_offers_the_keys_of_sections_rather_than_sections() -> None:
    assert complete_keys("model.l") == [f"model.lora.{part.name}=" for part in fields(LoraSpec)]


def test_the_example_spells_the_default_job_out():
    path = Path(__file__).parents[3] / "examples" / "gpt2.yaml"
    assert load_job(path.read_text(), source=str(path)) == default_job(4)
