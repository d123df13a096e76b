"""The job that a user asks for.

Every floor shares these values; `cli` reads them from YAML, hostfiles and command lines. Names follow Hugging Face's
`TrainingArguments` if it has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .bounds import Bounds, bounded, check_pattern, check_spec, require

Scalar = bool | int | float | str | None
Task = Literal["causal_lm", "masked_lm", "sequence_classification", "token_classification"]
"""A model predicts the next token, masked tokens, a label of a sample, or one of each token."""
LossCounting = Literal["items", "labels", "samples", "sum", "batch"]
"""The loss of a step is a sum divided by `num_items_in_batch`, the mean over labels or over samples, the sum of its
microbatches' losses, or is made of the losses of the script's own batches, which are not cut."""
Tracker = Literal["clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""Places that transformers' own callbacks report to, by its names."""
Sharding = Literal["none", "optimizer", "gradients", "all"]
ShardingChoice = Literal["none", "optimizer", "gradients", "all", "auto"]
"""With `auto`, the planner chooses one of the others but `none`, once the layers are measured."""
Recompute = Literal["none", "selective", "all", "auto"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble", "auto"]

MAX_NODES = 16_384  # so that a typing error in a hostfile's range does not fill the memory
MAX_DEVICES = 256  # of one machine
MAX_KINDS = 4  # the planner searches over the numbers of nodes of each kind
MAX_CHUNKS = 64  # of a stage; each costs messages
MAX_STEPS = 10**12
MAX_TAG_CHARS = 40
MAX_MICROBATCHES = 65_536  # of one step; each adds instructions to a worker's program
_MAX_SECONDS = 1e9
_LEAST_SECONDS = 1e-3
_MAX_TOKENS = 1 << 24


# --- a model's configuration -----------------------------------------------------------------------------------

_HEADS = Bounds(1, 65_536)
_WIDTH = Bounds(1, _MAX_TOKENS)
_ANY_NUMBER = Bounds(-(2**40), 2**40)
_MODEL_BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(("n_layer", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers"), Bounds(1, 1_000)),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_key_value_heads", "num_heads", "n_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), Bounds(1, 4_096)),
    **dict.fromkeys(
        ("n_embd", "hidden_size", "d_model", "intermediate_size", "n_inner", "ffn_dim", "head_dim"), _WIDTH
    ),
    **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings"), _WIDTH),
    "vocab_size": Bounds(1, 10_000_000),
}
"""Keyed by the names of transformers' configurations; other numbers only must not fill the memory."""


def check_model_numbers(config: Mapping[str, object]) -> None:
    """Raise ConfigError for numbers in a model's configuration that no model has."""
    for key, value in config.items():
        bounds = _MODEL_BOUNDS.get(key, _ANY_NUMBER)
        if isinstance(value, int) and not isinstance(value, bool):
            require(bounds.hold(value), f"model.config.{key}", value, str(bounds))
        elif isinstance(value, float):
            require(math.isfinite(value), f"model.config.{key}", value, "finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Adapters that are trained in place of the model's own parameters: PEFT's LoraConfig, by its names."""

    r: int | None = bounded(None, 1, 65_536)
    """The rank of the adapters; None trains the model itself, without adapters."""
    lora_alpha: float = bounded(8.0, 1e-6, 1e6)
    """Adapters are scaled by this value divided by their rank."""
    lora_dropout: float = bounded(0.0, 0, 1, excluded=(1,))
    target_modules: tuple[str, ...] = ()
    """The ends of the names of adapted modules, or `all-linear`; empty leaves the choice to PEFT."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained as a whole, in addition to classification heads."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """The biases that are trained as well."""
    use_rslora: bool = False
    """Scale by `lora_alpha` divided by the square root of the rank."""

    def __post_init__(self) -> None:
        must = check_spec(self, "model.lora.")
        must("r", self.r is not None or replace(self, r=1) == LoraSpec(r=1), "set if other keys of lora are")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformers model, built from its configuration, or from a directory with its weights."""

    type: str = "gpt2"
    """The `model_type` of a transformers configuration: gpt2, llama, qwen2, …"""
    config: Mapping[str, Scalar] = field(default_factory=dict)
    """Overrides of that configuration. `vocab_size` defaults to the tokenizer's."""
    path: str | None = None
    """A directory, on every node, that transformers' `save_pretrained` wrote. It determines `type`, the initial
    weights, and the tokenizer unless another is named."""
    task: Task | None = None
    """The model's task; None takes the one that `path` was saved for, or else masked tokens for encoders such
    as BERT and the next token for all others."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    whole_loss: LossCounting | None = None
    """Set by a Trainer's script whose model is kept whole: how its loss is counted over microbatches."""

    def __post_init__(self) -> None:
        check_spec(self, "model.")
        check_model_numbers(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The data to train on: text or tokens, packed into samples of `sequence_length` tokens."""

    paths: tuple[str, ...] = ()
    """Files or directories: text, JSON lines (.jsonl), or tokens (.bin, .npy). None means the sources of Python's own
    standard library."""
    dataset_path: str | None = None
    """A Hugging Face dataset in place of `paths`: the path argument of `datasets.load_dataset`, or a directory that its
    `save_to_disk` wrote."""
    dataset_name: str | None = None
    """The configuration of that dataset."""
    dataset_split: str = "train"
    format: Literal["text", "samples", "prompts", "messages", "labels"] = "text"
    """The format of JSON lines and datasets. `text` are documents that are strung together. In the others each row is a
    sample: named arrays; `prompt` and the predicted `completion`; `messages`, where those of the assistant are
    predicted; or a text and its `label`."""
    packing: bool = False
    """Prompts and conversations that fit one after the other share a sample, invisible to each other."""
    text_column: str = "text"
    """The key of JSON lines, or the column of a dataset, that holds the text."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory with one; None takes that of `model.path`, or else trains one on the text."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"  # noqa: S105  no password
    """The type of the tokens in .bin files, which have nothing else; little-endian."""
    shards: tuple[str, ...] = ()
    """Files, patterns of file names, or streams (redis://HOST:PORT/KEY) in place of `paths`. They have any length, and
    their records are assigned to steps as they are read. A record is a sample: a row of tokens, or a line of text."""
    follow: bool = False
    """Shards grow: a run that has read all of them waits for more, until there is a file NAME.end next to each."""
    epochs: int = bounded(1, 1, MAX_STEPS)
    """How often shards are read; training ends then, or at `max_steps`."""
    shards_at_once: int | None = bounded(None, 1, 64)
    """How many shards are read concurrently; None reads one, or all that grow."""
    sequence_length: int = bounded(64, 2, _MAX_TOKENS)
    vocab_size: int = bounded(4096, 257, 10_000_000, note="256 bytes and an end at least")
    """The size of the BPE tokenizer that is trained on the text; for tokens in files, more than the largest token."""
    max_bytes: int = bounded(8_000_000, 1, 2**40)
    """How much of the text is used."""
    validation_split: float = bounded(0.0, 0, 1, excluded=(1,))
    """The share of samples that is kept for evaluation and never trained on."""
    mlm_probability: float = bounded(0.15, 0, 1, excluded=(0, 1))
    """The share of a sample's tokens that masked language models predict."""

    def __post_init__(self) -> None:
        must = check_spec(self, "data.")
        has_paths = bool(self.paths or self.dataset_path)
        must("paths", all(self.paths), "files or directories; an empty path is none")
        must("shards", all(self.shards), "files or directories; an empty path is none")
        must("shards", not (self.shards and has_paths), "left out if paths or dataset_path are set")
        must("validation_split", not (self.shards and self.validation_split), "0 if the data is in shards")
        must("format", self.format == "text" or has_paths, "text without paths")
        is_packable = self.format in ("prompts", "messages")
        must("packing", is_packable or not self.packing, "false unless format is prompts or messages")
        must("dataset_path", not (self.paths and self.dataset_path), "left out if paths are set")
        is_dataset, has_shards = self.dataset_path is not None, bool(self.shards)
        must("dataset_name", is_dataset or self.dataset_name is None, "left out unless dataset_path is set")
        must("dataset_split", is_dataset or self.dataset_split == "train", "left out unless dataset_path is set")
        must("epochs", has_shards or self.epochs == 1, "1 unless the data is in shards; other data has max_steps alone")
        must("follow", has_shards or not self.follow, "false unless the data is in shards")
        must("shards_at_once", has_shards or self.shards_at_once is None, "left out unless the data is in shards")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer of torch.optim with a learning-rate schedule and clipping by the global gradient norm."""

    optim: str = "adamw"
    """The class of torch.optim in small letters, or `TrainingArguments`' adamw_torch and adamw_torch_fused."""
    optim_args: Mapping[str, Scalar] = field(default_factory=dict)
    """Further arguments of that class."""
    learning_rate: float = bounded(1e-3, 1e-30, 1e300)
    adam_beta1: float = bounded(0.9, 0, 1, excluded=(1,))
    adam_beta2: float = bounded(0.95, 0, 1, excluded=(1,))
    adam_epsilon: float = bounded(1e-8, 0, 1)
    weight_decay: float = bounded(0.1, 0, 1e6)
    max_grad_norm: float = bounded(1.0, 0, 1e30, note="0: off")
    lr_scheduler_type: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "cosine"
    lr_scheduler_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    """Further arguments of the schedule, under transformers' names."""
    warmup_steps: int = bounded(10, 0, MAX_STEPS)

    def __post_init__(self) -> None:
        check_spec(self, "optimizer.")


_WEB = re.compile(r"https?://[!-~]+")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_HEADER_VALUE = re.compile(r"[\t -~\xa0-\xff]{0,8000}")  # RFC 9110, section 5; a line end would begin another header


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """How failures are noticed; times are in seconds."""

    heartbeat_interval_s: float = bounded(0.5, _LEAST_SECONDS, _MAX_SECONDS)
    lease_s: float = bounded(3.0, _LEAST_SECONDS, _MAX_SECONDS)
    """A node that has been silent for this long counts as lost."""
    connect_timeout_s: float = bounded(10.0, _LEAST_SECONDS, _MAX_SECONDS)
    start_timeout_s: float = bounded(120.0, _LEAST_SECONDS, _MAX_SECONDS)
    """How long a node may take from its connection until a worker is ready."""
    orphan_timeout_s: float = bounded(600.0, 0, _MAX_SECONDS)
    """How long agents train on without a master before they stop, and how long a master waits without any agent."""
    network_timeout_s: float = bounded(1800.0, 0, _MAX_SECONDS)
    """How long a run waits for the network if more nodes do not reach each other than it can lose."""
    rejoin_after_s: float = bounded(10.0, 0, _MAX_SECONDS, note="0: never")
    """A lost node is tried again after this time, then after twice the time, and so on; 0 leaves it to the user."""
    relay_nodes: int = bounded(512, 0, 1_000_000, note="0: never")
    """From this many nodes on, agents reach the master through a tree of relays; 0 disables it."""
    relay_fanout: int = bounded(32, 2, 1024)
    """How many agents one relay serves, and how many relays the master."""
    notice_command: str | None = None
    """A shell command that succeeds once the node it runs on is about to be taken away."""
    notice_url: str | None = None
    """A URL that answers 200 once the node is about to be taken away."""
    notice_pattern: str | None = None
    """A regular expression that the answer must contain as well."""
    notice_headers: Mapping[str, Scalar] = field(default_factory=dict)
    """HTTP headers of the request."""
    notice_interval_s: float = bounded(5.0, _LEAST_SECONDS, _MAX_SECONDS)
    webhook_url: str | None = None
    """A URL that gets the run's start, end, recoveries, warnings and errors, in the form of Slack's webhooks."""
    waits_for_script: bool = False
    """Whether a step begins only once the callbacks of the script's trainer have heard of the step before."""

    def __post_init__(self) -> None:
        must = check_spec(self, "control.")
        for name, url in {"notice_url": self.notice_url, "webhook_url": self.webhook_url}.items():
            is_web = url is None or _WEB.fullmatch(url) is not None
            must(name, is_web, "an address that begins with http:// or https://, without spaces")
        for name, value in self.notice_headers.items():
            is_name, is_value = _HEADER_NAME.fullmatch(name), _HEADER_VALUE.fullmatch(str(value))
            require(is_name is not None, "control.notice_headers", name, "names of letters, digits and '-'")
            require(is_value is not None, f"control.notice_headers.{name}", value, "one line of Latin letters")
        has_url = self.notice_url is not None
        must("notice_command", self.notice_command is None or bool(self.notice_command.strip()), "a shell command")
        must("notice_headers", has_url or not self.notice_headers, "left out unless notice_url is set")
        must("notice_pattern", has_url or self.notice_pattern is None, "left out unless notice_url is set")
        if self.notice_pattern is not None:
            check_pattern("control.notice_pattern", self.notice_pattern)
        least_s = 2 * self.heartbeat_interval_s
        must("lease_s", self.lease_s >= least_s, f"at least two heartbeat intervals ({least_s})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """The Python script that a job comes from; workers run it again for the parts that no setting can name."""

    name: str
    """The name of its file."""
    source: str
    arguments: tuple[str, ...] = ()
    directory: str = ""
    """The directory of its file, from which it imports on nodes that have it."""
    provides: tuple[str, ...] = ()
    """The parts that it makes: model, loss, data, eval_data, optimizer, lr_lambda, callbacks."""
    is_tried: bool = field(default=False, compare=False)
    """Whether its model was tried before nodes started, so that workers need not, which start in recoveries too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When and where the state is saved."""

    enabled: bool = True
    save_steps: int | None = bounded(None, 1, MAX_STEPS)
    """The number of steps between two saves. Without it and `save_interval_s`, the interval follows from the cost of a
    save and from how often failures need one."""
    save_interval_s: float | None = bounded(None, 0, _MAX_SECONDS, excluded=(0,))
    """The time between two saves."""
    save_total_limit: int = bounded(3, 1, 1_000_000)
    """How many checkpoints are kept; older ones are removed."""
    waits_for_disk: bool = False
    """Whether a step that `save_steps` names begins only once the save before it is over, so that each is saved."""
    directory: str | None = None
    """The directory of checkpoints on every node; None is `checkpoints` in the run's directory there. Unless all nodes
    share it, a lost node's saves are lost too."""
    compare_steps: int = bounded(100, 0, MAX_STEPS, note="0: off")
    """The number of steps after which the copies of each layer are compared; 0 turns it off."""

    def __post_init__(self) -> None:
        must = check_spec(self, "checkpoint.")
        is_single = self.save_steps is None or self.save_interval_s is None
        must("save_interval_s", is_single, "left out if save_steps is set")
        must("waits_for_disk", not self.waits_for_disk or self.save_steps is not None, "false unless save_steps is set")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """How many of the present nodes train; the others rest, connected."""

    policy: Literal["all", "efficient", "deadline"] = "all"
    """All nodes; as many as add at least a fifth of a node's average throughput; or the fewest that end in time."""
    deadline_s: float | None = bounded(None, 0, _MAX_SECONDS, excluded=(0,))
    """For the policy `deadline`: the run ends within this many seconds from its start."""
    hysteresis_s: float = bounded(60.0, 0, _MAX_SECONDS)
    """Another number of nodes has to be better for this long."""

    def __post_init__(self) -> None:
        must = check_spec(self, "scaling.")
        is_timed = self.policy == "deadline"
        expected = "set if the policy is deadline" if is_timed else "left out unless the policy is deadline"
        must("deadline_s", (self.deadline_s is not None) == is_timed, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A complete training job: all that every worker needs to know except the plan.

    The defaults are a GPT-2 of 11 million parameters, small enough to train on a laptop's processor.
    """

    tag: str = "gpt2-demo"
    """Names the run: its directory is `<base_dir>/<tag>`."""
    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(type="gpt2", config={"n_embd": 320, "n_layer": 8, "n_head": 5})
    )
    data: DataSpec = field(default_factory=DataSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    control: ControlSpec = field(default_factory=ControlSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    scaling: ScalingSpec = field(default_factory=ScalingSpec)
    max_steps: int = bounded(120, 1, MAX_STEPS)
    global_batch_size: int = bounded(8, 1, 1_000_000)
    """Samples in one step."""
    microbatch_size: int = bounded(1, 1, 1_000_000)
    """Samples in one microbatch; divides the global batch size."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """The last two are mixed precision: parameters stay float32; float16 scales its loss."""
    initial_loss_scale: float = bounded(65536.0, 2.0**-24, 2.0**100, note="a power of two, as 65536.0")
    """The first loss scale of float16; it halves when gradients overflow, and doubles after long without."""
    on_bad_step: Literal["apply", "skip", "stop"] = "apply"
    """What follows if a step's loss or gradients are not finite: `skip` leaves its update out, and so does `stop`,
    which then ends the run."""
    recompute: Recompute = "none"
    """What blocks compute again in the backward pass instead of keeping it: nothing; all but matrix products and
    attention; all. With `auto`, each plan chooses for each block what its stage has memory for."""
    compile: bool = False
    """torch compiles blocks when they first run."""
    compile_mode: CompileMode = "default"
    """How much torch tries where it compiles, by its own names."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = None
    """The implementation of attention, by transformers' name; None leaves the choice to transformers."""
    dropout: bool = True
    """False turns dropout and noise off, whatever the model's configuration has."""
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = bounded(0, -(2**63), 2**63 - 1)
    eval_steps: int | None = bounded(None, 1, MAX_STEPS)
    """The number of steps between two evaluations, the last of which follows `max_steps`; None never evaluates."""
    max_eval_samples: int | None = bounded(None, 1, MAX_STEPS)
    """The most samples of an evaluation; None takes all that are kept for it."""
    fault_threshold: int = bounded(1, 0, MAX_NODES)
    """f: the number of simultaneous node failures that never cost state."""
    max_redundancy_percent: float | None = bounded(None, 0.0, 1e6)
    """The most that f + 1 pipelines may lengthen a step; None pays any price."""
    change_interval_s: float = bounded(3600.0, 1.0, 1e9)
    """The expected seconds between changes of the nodes, within which a plan has to repay what moves for it, until the
    run has had changes itself."""
    num_pipelines: int | None = bounded(None, 1, MAX_NODES)
    """Asks the planner for exactly this many pipelines as long as the nodes allow it."""
    num_stages: int | None = bounded(None, 1, MAX_NODES)
    """The most stages of a pipeline; 1 keeps the model whole on each of its nodes. None leaves it to the planner."""
    schedule: ScheduleName = "1f1b"
    """With `auto`, each pipeline of a plan is zero-bubble or interleaved if that saves time, and else 1f1b."""
    num_chunks: int = bounded(2, 2, MAX_CHUNKS)
    """Chunks of layers in each stage of an interleaved pipeline."""
    reductions_per_step: int | Literal["auto"] = bounded("auto", 1, MAX_MICROBATCHES, note="or auto")  # type: ignore[assignment]  # one of its words
    """How often a step's gradients are reduced; a failure costs at most one such part of a step. By default, only long
    steps have several. All but the last keep the sums so far in extra memory."""
    tensor_parallel: int = bounded(1, 1, MAX_DEVICES)
    """The number of a node's devices that share each stage, by the model's own plan."""
    sharding: ShardingChoice = "none"
    """What the devices of a node that hold one stage share out: nothing, the optimizer's state, that and gradients, or
    weights as well; with `auto`, what allows the shortest step."""
    sharding_devices: int = bounded(1, 1, MAX_DEVICES)
    """The number of a node's devices that hold one stage and take a microbatch each, with `sharding`."""
    expert_parallel: bool = False
    """Whether these devices send tokens to each other's experts, instead of putting the experts' weights together."""
    context_parallel: int = bounded(1, 1, MAX_DEVICES)
    """How many of these devices share each microbatch, so that each has a part of its tokens' activations."""
    device_memory_bytes: int | None = bounded(None, 1, 2**50)
    """Memory of one device; None asks the nodes."""
    report_to: tuple[Tracker, ...] = ()
    """Experiment trackers that get losses, rates and evaluations; they are called next to the master."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all processes of the run, on every node; a journal has digests in place of values."""
    script: ScriptSpec | None = None
    """The script that the job comes from, if there is one."""
    torch_threads: int | None = bounded(None, 1, 1024)
    """Threads a worker computes with; None divides a host's cores among its workers."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """The lowest level that workers write to their agents' logs."""

    def __post_init__(self) -> None:
        must = check_spec(self)
        check_tag(self.tag)
        must(
            "global_batch_size",
            self.global_batch_size % self.microbatch_size == 0,
            f"a multiple of microbatch_size ({self.microbatch_size})",
        )
        must(
            "global_batch_size",
            self.num_microbatches <= MAX_MICROBATCHES,
            f"at most {MAX_MICROBATCHES:,} microbatches of {self.microbatch_size}; raise microbatch_size",
        )
        is_power = math.frexp(self.initial_loss_scale)[0] == 0.5
        must("initial_loss_scale", is_power, "a power of two, as 65536.0")
        # Workers that read shards wait for records, and for nothing else.
        waits = self.checkpoint.waits_for_disk
        require(not (waits and self.data.shards), "checkpoint.waits_for_disk", waits, "false if the data is in shards")
        is_power = self.tensor_parallel & (self.tensor_parallel - 1) == 0
        must("tensor_parallel", is_power, "a power of two: 1, 2, 4, 8, …")
        is_alone, is_split = self.devices_per_stage == 1, self.schedule == "zero-bubble"
        must(
            "schedule",
            is_alone or not is_split,
            "1f1b, gpipe, interleaved or auto where devices share stages (tensor_parallel, sharding)",
        )
        must(
            "compile",
            not (self.compile and is_split),
            "false with zero-bubble: a compiled block's backward pass cannot be split",
        )
        must("compile_mode", self.compile or self.compile_mode == "default", "default unless compile is true")
        # Pipelines keep the results of several microbatches, and a CUDA graph writes all into the same memory.
        is_graph = self.device == "cuda" and self.compile_mode in ("reduce-overhead", "max-autotune")
        must("compile_mode", not is_graph, "default or max-autotune-no-cudagraphs on GPUs")
        self._check_sharding(must)
        is_evaluated = self.eval_steps is not None or self.max_eval_samples is None
        must("max_eval_samples", is_evaluated, "left out unless eval_steps is set")
        has_chunks = self.schedule in ("interleaved", "auto")
        must("num_chunks", has_chunks or self.num_chunks == 2, "2 unless the schedule is interleaved or auto")
        is_known = not self.compile or self.recompute in ("none", "all")
        must("recompute", is_known, "none or all with compile")
        must(
            "recompute",
            self.recompute != "auto" or self.schedule == "1f1b",
            "none, selective or all unless the schedule is 1f1b",
        )
        is_short = self.device == "cuda" and self.dtype in ("bfloat16", "float16")
        must(
            "attn_implementation",
            is_short or not (self.attn_implementation or "").startswith("flash"),
            "eager or sdpa, unless the device is cuda and the dtype bfloat16 or float16",
        )
        must(
            "num_pipelines",
            self.num_pipelines is None or self.num_pipelines <= self.num_microbatches,
            f"at most the {self.num_microbatches} microbatches of a step",
        )

    def _check_sharding(self, must: Callable[[str, bool, str], None]) -> None:
        is_on = self.sharding != "none"
        must(
            "sharding_devices",
            is_on == (self.sharding_devices > 1),
            f"the number of a node's devices, 2 or more, with sharding: {self.sharding}"
            if is_on
            else "1 with sharding: none",
        )
        must("tensor_parallel", not is_on or self.tensor_parallel == 1, f"1 with sharding: {self.sharding}")
        must("expert_parallel", is_on or not self.expert_parallel, "false without sharding")
        must(
            "context_parallel",
            self.sharding_devices % self.context_parallel == 0,
            f"a divisor of sharding_devices ({self.sharding_devices})" if is_on else "1 without sharding",
        )
        is_sdpa = self.attn_implementation in (None, "sdpa")
        must("attn_implementation", is_sdpa or self.context_parallel == 1, "sdpa with context_parallel")
        shared = f" / context_parallel ({self.context_parallel})" if self.context_parallel > 1 else ""
        must(
            "global_batch_size",
            self.global_batch_size % (self.microbatch_size * self.num_lanes) == 0,
            f"a multiple of microbatch_size × sharding_devices ({self.microbatch_size} × {self.sharding_devices})"
            + shared,
        )

    @property
    def num_lanes(self) -> int:
        """The microbatches that the devices of a stage compute at once, which a plan counts as one."""
        return max(1, self.sharding_devices // self.context_parallel)

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """What devices may share out: one word, unless that is left to the planner."""
        return ("optimizer", "gradients", "all") if self.sharding == "auto" else (self.sharding,)

    @property
    def needs_consent(self) -> bool:
        """Whether workers wait for the master's consent to begin a step."""
        return self.control.waits_for_script or self.checkpoint.waits_for_disk

    @property
    def devices_per_stage(self) -> int:
        """The devices of a node that hold one stage together, each with a part of its state."""
        return self.tensor_parallel * self.sharding_devices

    @property
    def text(self) -> DataSpec:
        """The data, with the tokenizer of the model's directory unless another is named."""
        return self.data if self.data.tokenizer else replace(self.data, tokenizer=self.model.path)

    @property
    def compiles(self) -> CompileMode | None:
        """The mode in which torch compiles blocks; None where it does not."""
        return self.compile_mode if self.compile else None

    @property
    def may_split_backward(self) -> bool:
        """Whether backward passes may be split in two parts."""
        is_whole = self.devices_per_stage > 1 or self.compile
        return self.schedule == "zero-bubble" or (self.schedule == "auto" and not is_whole)

    def is_evaluated(self, step: int) -> bool:
        """Return whether the model is evaluated after a step."""
        # This depends on the number alone, so that all workers agree.
        return self.eval_steps is not None and step > 0 and (step % self.eval_steps == 0 or step == self.max_steps)

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step as plans count them, over all pipelines: `num_lanes` at once are one."""
        return self.global_batch_size // (self.microbatch_size * self.num_lanes)


def check_tag(tag: str) -> None:
    """Raise ConfigError for a bad name of a run."""
    valid = tag and all(letter.isalnum() or letter in "._-" for letter in tag) and tag[0] not in ".-"
    require(bool(valid), "tag", tag, "letters, digits, '.', '_' and '-', starting with none of '.-'")
    limit = f"at most {MAX_TAG_CHARS} characters (it is part of a socket's path)"
    require(len(tag) <= MAX_TAG_CHARS, "tag", tag, limit)


def tag_of(script: str, *, otherwise: str) -> str:
    """Return the name of a script's run, as far as a directory can have it; `otherwise` if nothing is left of it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", script).lstrip(".-")[:MAX_TAG_CHARS] or otherwise
