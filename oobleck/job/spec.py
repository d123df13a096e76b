"""What a user asks for, as values: the job, and the nodes to run it on.

Pure values, shared by every floor. Reading them from YAML, hostfiles and command lines is `cli`'s business.
Names follow Hugging Face's `TrainingArguments` where it has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from oobleck.errors import ConfigError

from .bounds import Bounds, bounded, check_pattern, check_spec, require

Scalar = bool | int | float | str | None
Task = Literal["causal_lm", "masked_lm", "sequence_classification", "token_classification"]
"""What a model predicts: the next token, masked tokens, a label of a sample, or one of each token."""
ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble", "auto"]

MAX_NODES = 16_384
"""The most nodes of a job: a slip in a range of a hostfile, or a number too many, should not fill the memory."""
MAX_DEVICES = 256
"""The most devices of one machine."""
MAX_KINDS = 4
"""The most kinds of nodes of a job: plans are searched over the numbers of nodes of each."""
DEFAULT_KIND = "default"
"""What the devices of nodes are called whose line names none."""
MAX_CHUNKS = 64
"""The most chunks of a stage: each costs messages."""
MAX_STEPS = 10**12
_MAX_SECONDS = 1e9
"""Thirty years."""
_LEAST_SECONDS = 1e-3
_MAX_TOKENS = 1 << 24
MAX_MICROBATCHES = 65_536
"""Of one step: every one of them is some instructions of a worker's program."""


_KIND_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")


# --- a model's configuration -----------------------------------------------------------------------------------

_LAYERS = Bounds(1, 1_000)
_HEADS = Bounds(1, 65_536)
_EXPERTS = Bounds(1, 4_096)
_WIDTH = Bounds(1, _MAX_TOKENS)
_VOCABULARY = Bounds(1, 10_000_000)
_ANY_NUMBER = Bounds(-(2**40), 2**40)
_MODEL_BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(("n_layer", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers"), _LAYERS),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_key_value_heads", "num_heads", "n_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(
        ("n_embd", "hidden_size", "d_model", "intermediate_size", "n_inner", "ffn_dim", "head_dim"), _WIDTH
    ),
    **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings"), _WIDTH),
    "vocab_size": _VOCABULARY,
}
"""By the names of transformers' configurations; other whole numbers are only kept from filling the memory."""


def check_model_numbers(config: Mapping[str, object]) -> None:
    """Raise ConfigError for numbers of a model's configuration that no model has, by the names of transformers."""
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
    """The rank of the adapters; None: there are none, and the model itself is trained."""
    lora_alpha: float = bounded(8.0, 1e-6, 1e6)
    """Adapters are scaled by this, divided by their rank."""
    lora_dropout: float = bounded(0.0, 0, 1, excluded=(1,))
    target_modules: tuple[str, ...] = ()
    """The ends of the names of the modules that are adapted, or `all-linear`; none: PEFT's choice for the type."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained as a whole, beside heads that classify, which always are."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained as well."""
    use_rslora: bool = False
    """Scale by `lora_alpha` divided by the square root of the rank."""

    def __post_init__(self) -> None:
        check_spec(self, "model.lora.")
        is_off = self.r is None and replace(self, r=1) != LoraSpec(r=1)
        require(not is_off, "model.lora.r", self.r, "given where other keys of lora are")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformers model, built from its configuration, or from a directory with its weights."""

    type: str = "gpt2"
    """The `model_type` of a transformers configuration: gpt2, llama, qwen2, …"""
    config: Mapping[str, Scalar] = field(default_factory=dict)
    """Overrides of that configuration. `vocab_size` is the tokenizer's where it is left out."""
    path: str | None = None
    """A directory, on every node, that transformers' `save_pretrained` wrote: `type` is its own then, training starts
    from its weights, and its tokenizer is taken unless another is named."""
    task: Task | None = None
    """What is predicted; None: what a `path` was saved for, or else masked tokens by encoders such as BERT, the next
    token by all others."""
    lora: LoraSpec = field(default_factory=LoraSpec)

    def __post_init__(self) -> None:
        check_spec(self, "model.")
        check_model_numbers(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What to train on: text or tokens, packed into samples of `sequence_length` tokens."""

    paths: tuple[str, ...] = ()
    """Files or directories: text, JSON lines (.jsonl), or tokens (.bin, .npy). None means the sources of Python's own
    standard library."""
    dataset_path: str | None = None
    """A Hugging Face dataset in place of `paths`: what `datasets.load_dataset` takes for its path, or a directory that
    its `save_to_disk` wrote."""
    dataset_name: str | None = None
    """Which configuration of that dataset."""
    dataset_split: str = "train"
    format: Literal["text", "samples", "prompts", "messages", "labels"] = "text"
    """Of JSON lines and datasets. `text`: documents, strung together. Else each row is a sample: named arrays;
    `prompt` and `completion`, of which the latter is predicted; `messages`, of which those of the assistant are; or a
    text and its `label`."""
    packing: bool = False
    """Prompts and conversations that fit one after the other share a sample, and see nothing of each other."""
    text_column: str = "text"
    """The key of JSON lines, or the column of a dataset, that holds the text."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory with one; None: that of `model.path`, or else one is trained on the text."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"  # noqa: S105  no password
    """Of .bin files, which are nothing but tokens in the byte order of Intel's processors."""
    shards: tuple[str, ...] = ()
    """In place of `paths`: files, patterns of file names, or streams (redis://HOST:PORT/KEY), of any lengths, that are
    handed out to steps as they are read. A record is a sample: a row of tokens (.bin, .npy), or a line of text."""
    follow: bool = False
    """Shards grow: a run that has read all of them waits for more, until a file NAME.end lies beside a file."""
    epochs: int = bounded(1, 1, MAX_STEPS)
    """How often shards are read; training ends then, if `max_steps` has not come before."""
    shards_at_once: int | None = bounded(None, 1, 64)
    """How many shards are read side by side; None: one, or all of those that grow."""
    sequence_length: int = bounded(64, 2, _MAX_TOKENS)
    vocab_size: int = bounded(4096, 257, 10_000_000, note="256 bytes and an end at least")
    """Size of the BPE tokenizer that is trained on the text; of tokens in files, one more than the largest can be."""
    max_bytes: int = bounded(8_000_000, 1, 2**40)
    """How much of the text is used."""
    validation_split: float = bounded(0.0, 0, 1, excluded=(1,))
    """The share of samples that is kept for evaluation and never trained on."""
    mlm_probability: float = bounded(0.15, 0, 1, excluded=(0, 1))
    """The share of a sample's tokens that masked language models predict."""

    def __post_init__(self) -> None:
        check_spec(self, "data.")
        if self.shards:
            others = bool(self.paths or self.dataset_path)
            require(not others, "data.shards", list(self.shards), "left out where paths or dataset_path are given")
            split = self.validation_split
            require(not split, "data.validation_split", split, "0 where the data is in shards")
        is_text = self.format == "text"
        require(is_text or bool(self.paths or self.dataset_path), "data.format", self.format, "text without paths")
        is_packed = self.format in ("prompts", "messages") or not self.packing
        require(is_packed, "data.packing", self.packing, "false unless format is prompts or messages")
        require(
            not (self.paths and self.dataset_path), "data.dataset_path", self.dataset_path, "left out where paths are"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer of torch.optim with a learning-rate schedule and clipping by the global gradient norm."""

    optim: str = "adamw"
    """The class of torch.optim in small letters; `TrainingArguments`' adamw_torch and adamw_torch_fused too."""
    optim_args: Mapping[str, Scalar] = field(default_factory=dict)
    """Further arguments of that class."""
    learning_rate: float = bounded(1e-3, 1e-30, 1e300)
    adam_beta1: float = bounded(0.9, 0, 1, excluded=(1,))
    adam_beta2: float = bounded(0.95, 0, 1, excluded=(1,))
    adam_epsilon: float = bounded(1e-8, 0, 1)
    weight_decay: float = bounded(0.1, 0, 1e6)
    max_grad_norm: float = bounded(1.0, 0, 1e30, note="0: off")
    """0 turns clipping off."""
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
    """Further arguments of the schedule, by the names that transformers gives them."""
    warmup_steps: int = bounded(10, 0, MAX_STEPS)

    def __post_init__(self) -> None:
        check_spec(self, "optimizer.")


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_HEADER_VALUE = re.compile(r"[\t -~\xa0-\xff]{0,8000}")
"""Of HTTP headers (RFC 9110, section 5): with a line end in it, a header would be two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """How failures are noticed, in seconds."""

    heartbeat_interval_s: float = bounded(0.5, _LEAST_SECONDS, _MAX_SECONDS)
    lease_s: float = bounded(3.0, _LEAST_SECONDS, _MAX_SECONDS)
    """A node that was not heard of for this long is marked as lost."""
    connect_timeout_s: float = bounded(10.0, _LEAST_SECONDS, _MAX_SECONDS)
    start_timeout_s: float = bounded(120.0, _LEAST_SECONDS, _MAX_SECONDS)
    """How long a node may take from its connection to a worker that is ready."""
    orphan_timeout_s: float = bounded(600.0, 0, _MAX_SECONDS)
    """How long agents train on without a master before they stop, and how long a master that hears of none waits."""
    network_timeout_s: float = bounded(1800.0, 0, _MAX_SECONDS)
    """How long a run waits for the network where more nodes do not reach each other than it can lose."""
    rejoin_after_s: float = bounded(10.0, 0, _MAX_SECONDS, note="0: never")
    """A lost node is tried again after this time, then after twice the time, and so on; 0 leaves it to the user."""
    relay_nodes: int = bounded(64, 0, 1_000_000, note="0: never")
    """From this many nodes on, agents reach the master through a tree of relays; 0 disables it."""
    relay_fanout: int = bounded(32, 2, 1024)
    """How many agents one relay serves, and how many relays the master."""
    notice_command: str | None = None
    """A shell command that succeeds when the node it runs on is about to be taken away; None: nothing is asked."""
    notice_url: str | None = None
    """A URL that answers 200 then."""
    notice_pattern: str | None = None
    """What its answer must contain then, as a regular expression; None: anything."""
    notice_headers: Mapping[str, Scalar] = field(default_factory=dict)
    """HTTP headers that it is asked with."""
    notice_interval_s: float = bounded(5.0, _LEAST_SECONDS, _MAX_SECONDS)

    def __post_init__(self) -> None:
        check_spec(self, "control.")
        if self.notice_url is not None:
            is_web = re.fullmatch(r"https?://[!-~]+", self.notice_url) is not None
            expected = "an address that begins with http:// or https://, without spaces"
            require(is_web, "control.notice_url", self.notice_url, expected)
        for name, value in self.notice_headers.items():
            is_name, is_value = _HEADER_NAME.fullmatch(name), _HEADER_VALUE.fullmatch(str(value))
            require(is_name is not None, "control.notice_headers", name, "names of letters, digits and '-'")
            require(is_value is not None, f"control.notice_headers.{name}", value, "one line of Latin letters")
        if self.notice_pattern is not None:
            check_pattern("control.notice_pattern", self.notice_pattern)
        require(
            self.lease_s >= 2 * self.heartbeat_interval_s,
            "control.lease_s",
            self.lease_s,
            f"at least two heartbeat intervals ({2 * self.heartbeat_interval_s})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """The Python script that a job comes from; workers run it again for what no setting can name."""

    name: str
    """Of the file."""
    source: str
    arguments: tuple[str, ...] = ()
    directory: str = ""
    """Where it lies; what it imports is looked for there, on nodes that have such a directory."""
    provides: tuple[str, ...] = ()
    """What the script makes itself: model, loss, data, eval_data, optimizer, lr_lambda, callbacks."""
    is_tried: bool = field(default=False, compare=False)
    """The layers of its model were tried before nodes started, so that workers, which start in recoveries too, need
    not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When the state is saved, and where."""

    enabled: bool = True
    save_steps: int | None = bounded(None, 1, MAX_STEPS)
    """Save after every so many steps. Without this and `save_interval_s`, the interval follows from what a save costs
    and how often failures need one."""
    save_interval_s: float | None = bounded(None, 0, _MAX_SECONDS, excluded=(0,))
    """Save every so many seconds."""
    save_total_limit: int = bounded(3, 1, 1_000_000)
    """How many checkpoints are kept; older ones are removed."""
    directory: str | None = None
    """Where checkpoints lie, on every node; None is `checkpoints` in the run's directory there. Shared by all nodes,
    or a lost node takes what it saved with it."""
    compare_steps: int = bounded(100, 0, MAX_STEPS, note="0: off")
    """After every so many steps the copies of each layer are compared; 0 turns it off."""

    def __post_init__(self) -> None:
        check_spec(self, "checkpoint.")
        require(
            self.save_steps is None or self.save_interval_s is None,
            "checkpoint.save_interval_s",
            self.save_interval_s,
            "left out where save_steps is given",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """On how many of the nodes that are there the job trains; the others rest, connected."""

    policy: Literal["all", "efficient", "deadline"] = "all"
    """All; as many as add at least a fifth of what a node gives on average; or the fewest that end in time."""
    deadline_s: float | None = bounded(None, 0, _MAX_SECONDS, excluded=(0,))
    """Of the policy `deadline`: seconds from the start of the run in which it is to end."""
    hysteresis_s: float = bounded(60.0, 0, _MAX_SECONDS)
    """Another number of nodes has to be the better one for so long."""

    def __post_init__(self) -> None:
        check_spec(self, "scaling.")
        is_timed = self.policy == "deadline"
        require(
            (self.deadline_s is not None) == is_timed,
            "scaling.deadline_s",
            self.deadline_s,
            "given where the policy is deadline" if is_timed else "left out unless the policy is deadline",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job, complete: what every worker needs to know beside the plan.

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
    """Of float16; it is halved when gradients overflow, and doubled when they have not for long."""
    activation_checkpointing: bool = False
    """Blocks keep their input alone and compute what is between again in their backward pass."""
    compile: bool = False
    """Blocks are compiled by torch when they are first run."""
    dropout: bool = True
    """False: nothing is dropped, and no noise is added, whatever the model's configuration says."""
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = bounded(0, -(2**63), 2**63 - 1)
    eval_steps: int | None = bounded(None, 1, MAX_STEPS)
    """Evaluate after every so many steps; None: never."""
    max_eval_samples: int | None = bounded(None, 1, MAX_STEPS)
    """At most so many of the samples kept for evaluation; None: all."""
    fault_threshold: int = bounded(1, 0, MAX_NODES)
    """f: the number of simultaneous node failures that never cost state."""
    num_pipelines: int | None = bounded(None, 1, MAX_NODES)
    """Asks the planner for exactly this many pipelines as long as the nodes allow it; None leaves it free."""
    schedule: ScheduleName = "1f1b"
    """`auto` has every plan choose for each of its pipelines: zero-bubble or interleaved where that saves time, else
    1f1b."""
    num_chunks: int = bounded(2, 2, MAX_CHUNKS)
    """Chunks of layers in each stage of an interleaved pipeline."""
    reductions_per_step: int | Literal["auto"] = bounded("auto", 1, MAX_MICROBATCHES, note="or auto")  # type: ignore[assignment]  # one of its words
    """How often a step's gradients are reduced, so that a failure costs a part of a step at most: a long step several
    times, by default. Each but the last keeps the sums so far in memory of their own."""
    tensor_parallel: int = bounded(1, 1, MAX_DEVICES)
    """Devices of a node that share each stage, by the model's own plan."""
    device_memory_bytes: int | None = bounded(None, 1, 2**50)
    """Memory of one device; None asks the nodes."""
    script: ScriptSpec | None = None
    """What the job comes from, if not from a file alone."""
    torch_threads: int | None = bounded(None, 1, 1024)
    """Threads a worker computes with; None divides a host's cores among its workers."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """From which level on workers write to their agents' logs."""

    def __post_init__(self) -> None:
        check_spec(self)
        check_tag(self.tag)
        require(
            self.global_batch_size % self.microbatch_size == 0,
            "global_batch_size",
            self.global_batch_size,
            f"a multiple of microbatch_size ({self.microbatch_size})",
        )
        require(
            self.num_microbatches <= MAX_MICROBATCHES,
            "global_batch_size",
            self.global_batch_size,
            f"at most {MAX_MICROBATCHES:,} microbatches of {self.microbatch_size}; raise microbatch_size",
        )
        require(
            math.frexp(self.initial_loss_scale)[0] == 0.5,
            "initial_loss_scale",
            self.initial_loss_scale,
            "a power of two, as 65536.0",
        )
        is_power = self.tensor_parallel & (self.tensor_parallel - 1) == 0
        require(is_power, "tensor_parallel", self.tensor_parallel, "a power of two: 1, 2, 4, 8, …")
        require(
            self.tensor_parallel == 1 or self.schedule != "zero-bubble",
            "schedule",
            self.schedule,
            "1f1b, gpipe, interleaved or auto where devices share stages (tensor_parallel)",
        )
        require(
            not self.compile or (self.tensor_parallel == 1 and self.schedule != "zero-bubble"),
            "compile",
            self.compile,
            "false where devices share stages (tensor_parallel) or backward passes are split (zero-bubble)",
        )
        if self.num_pipelines is not None:
            require(
                self.num_pipelines <= self.num_microbatches,
                "num_pipelines",
                self.num_pipelines,
                f"at most the {self.num_microbatches} microbatches of a step",
            )

    @property
    def text(self) -> DataSpec:
        """The data, with the tokenizer of the model's directory where no other is named."""
        return self.data if self.data.tokenizer else replace(self.data, tokenizer=self.model.path)

    @property
    def may_split_backward(self) -> bool:
        """Whether backward passes may be taken in two parts."""
        is_whole = self.tensor_parallel > 1 or self.compile
        return self.schedule == "zero-bubble" or (self.schedule == "auto" and not is_whole)

    def is_evaluated(self, step: int) -> bool:
        """Whether the model is evaluated after a step: that depends on its number alone, so that all agree."""
        return self.eval_steps is not None and step > 0 and step % self.eval_steps == 0

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step, over all pipelines."""
        return self.global_batch_size // self.microbatch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One line of the hostfile: how a node is reached and which of its devices are ours."""

    name: str
    """Unique in the job: the host, or host#2, host#3, … where the host appears again."""
    host: str
    devices: tuple[int, ...] = (0,)
    port: int | None = None
    """None leaves it to ~/.ssh/config."""
    user: str | None = None
    address: str | None = None
    """Where process groups listen: an address of the node, its name, or one of its network interfaces. None is the
    address that SSH reached it by."""
    origin: str = ""
    """What has given it, for people: `Slurm's job 17`. Empty for one that a user has named."""
    device: str = DEFAULT_KIND
    """What its devices are: nodes with other ones compute at another speed."""

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        """Which nodes it is like: those with as many devices of the same name, as `A40` or `A100×8`."""
        return self.device if self.num_devices == 1 else f"{self.device}×{self.num_devices}"


def check_kind_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a node's devices."""
    # A number alone is one of `devices`, and a slip.
    if not _KIND_NAME.fullmatch(name) or name.isdecimal():
        raise ConfigError(
            f"{name!r} is no name of a kind of devices; it has letters, digits, '.', '_', '+' and '-', at most 64, as "
            "in A100"
        )


def check_tag(tag: str) -> None:
    """Raise ConfigError for what cannot name a run."""
    valid = tag and all(letter.isalnum() or letter in "._-" for letter in tag) and tag[0] not in ".-"
    require(bool(valid), "tag", tag, "letters, digits, '.', '_' and '-', starting with none of '.-'")
    require(len(tag) <= 40, "tag", tag, "at most 40 characters (it is part of a socket's path)")
