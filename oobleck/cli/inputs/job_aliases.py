"""Other names of a job's keys: those of `TrainingArguments`, and those of Oobleck 0.1's job files.

They become the job's own keys before anything else is read, so that lines and errors stay those of the file.

    TrainingArguments   learning_rate, warmup_steps, per_device_train_batch_size, bf16, gradient_checkpointing, …
    Oobleck 0.1         sections `job` and `model` (model_name, model_args, dataset_path, …), `dist`, `steps`, …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from oobleck.job import OptimizerSpec

from .yaml_tree import YamlError, YamlMapping, YamlScalar, YamlValue

_DATA = ("epochs", "sequence_length", "vocab_size", "tokenizer", "text_column", "validation_split", "mlm_probability")
_CHECKPOINT = ("save_steps", "save_total_limit")
# These keys may stand at the top, or in the sections `job` and `model`; their values are their paths in a job.
ALIASES: dict[str, tuple[str, ...]] = {
    **{key: ("checkpoint", key) for key in _CHECKPOINT},
    **{key: ("data", key) for key in _DATA},
    **{part.name: ("optimizer", part.name) for part in fields(OptimizerSpec)},
    "per_device_train_batch_size": ("microbatch_size",),
    "torch_compile": ("compile",),
    "run_name": ("tag",),
    "global_microbatch_size": ("global_batch_size",),
    "steps": ("max_steps",),
    "model_name": ("model", "type"),
    "model_args": ("model", "config"),
    "model_tag": ("tag",),
    "dataset_path": ("data", "dataset_path"),
    "dataset_name": ("data", "dataset_name"),
}
# These keys of the section `model` are not keys of the model's configuration.
_MODEL_KEYS = ("model_name", "model_args", "model_tag", "dataset_path", "dataset_name")
# Other names lead into these sections, so their keys may be spread over a file.
_SECTIONS = (("optimizer",), ("data",), ("model",), ("checkpoint",))
# Switches that stand for a word of another key: that of true, and that of false if it has one.
_SWITCHES = {
    "bf16": ("dtype", "bfloat16", None),
    "fp16": ("dtype", "float16", None),
    "activation_checkpointing": ("recompute", "all", "none"),
    "gradient_checkpointing": ("recompute", "all", "none"),
}
OTHER_KEYS = (*_SWITCHES, "job", "dist")
"""Keys at the top that stand for no key of a job."""
# This section named the nodes in Oobleck 0.1. A hostfile does now, so the section is ignored.
_NODES = "dist"

_Entry = tuple[tuple[str, ...], YamlScalar, YamlValue]


def in_own_words(tree: YamlValue) -> YamlValue:
    """Return the tree with the job's own keys. Raises YamlError for a key that is given twice."""
    if not isinstance(tree, YamlMapping):
        return tree
    return _nested(tree, list(_placed(tree)), ())


def _placed(tree: YamlMapping) -> Iterator[_Entry]:
    for key, value in tree.entries:
        if key.text == "job" and isinstance(value, YamlMapping):
            yield from _placed(value)
        elif key.text == "model" and isinstance(value, YamlMapping):
            yield from _placed_of_model(key, value)
        elif key.text in _SWITCHES:
            yield from _switch(key, value)
        elif key.text != _NODES:
            yield from _spread(ALIASES.get(key.text, (key.text,)), key, value)


def _placed_of_model(key: YamlScalar, section: YamlMapping) -> Iterator[_Entry]:
    own = []
    for inner, value in section.entries:
        if inner.text in _MODEL_KEYS:
            yield ALIASES[inner.text], inner, value
        else:
            own.append((inner, value))
    if own or not section.entries:
        yield from _spread(("model",), key, YamlMapping(entries=tuple(own), line=section.line))


def _spread(path: tuple[str, ...], key: YamlScalar, value: YamlValue) -> Iterator[_Entry]:
    # The entries of a section come one by one, so that a key of it and another name of the same key meet.
    if path in _SECTIONS and isinstance(value, YamlMapping) and value.entries:
        for inner, item in value.entries:
            yield (*path, inner.text), inner, item
    else:
        yield path, key, value


def _switch(key: YamlScalar, value: YamlValue) -> Iterator[_Entry]:
    if not isinstance(value, YamlScalar) or not isinstance(value.value, bool):
        raise YamlError(f"{key.text}: expected true or false", key.line)
    own_key, of_true, of_false = _SWITCHES[key.text]
    if word := of_true if value.value else of_false:
        yield (own_key,), key, YamlScalar(value=word, text=word, line=value.line)


def _nested(tree: YamlMapping, entries: list[_Entry], prefix: tuple[str, ...]) -> YamlMapping:
    found: dict[str, tuple[YamlScalar, YamlValue]] = {}
    for path, key, value in entries:
        if path[: len(prefix)] != prefix or path == prefix:
            continue
        name, rest = path[len(prefix)], path[len(prefix) + 1 :]
        if not rest:
            # An empty section may stand next to other names of its keys.
            if name in found and value.is_nothing:
                continue
            if name in found:
                _check_section(path, value, key.line)
                raise YamlError(f"{'.'.join(path)} is given twice, here and in line {found[name][0].line}", key.line)
            found[name] = (YamlScalar(value=name, text=name, line=key.line), value)
        elif name not in found or found[name][1].is_nothing:
            inner = _nested(YamlMapping(entries=(), line=key.line), entries, (*prefix, name))
            found[name] = (YamlScalar(value=name, text=name, line=key.line), inner)
        elif not isinstance(found[name][1], YamlMapping):
            _check_section((*prefix, name), found[name][1], found[name][0].line)
            raise YamlError(f"{name} is given twice, here and in line {found[name][0].line}", key.line)
    return YamlMapping(entries=tuple(found.values()), line=tree.line)


def _check_section(path: tuple[str, ...], value: YamlValue, line: int) -> None:
    # Without this check, a section without keys would be reported as given twice.
    if path in _SECTIONS and not isinstance(value, YamlMapping):
        got = value.text if isinstance(value, YamlScalar) else "a list"
        raise YamlError(f"{'.'.join(path)}: expected keys with values, got {got}", line)
