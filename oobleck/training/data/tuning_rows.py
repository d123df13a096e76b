"""Text to fine-tune on, row by row: prompts with completions, conversations, or texts with labels.

A row of JSON lines or of a Hugging Face dataset becomes a sample: tokenized on demand, and cut to its length. Packing
tokenizes all rows at once, and puts as many consecutive rows as fit into each sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oobleck.errors import ConfigError
from oobleck.job import DataSpec

from .batches import IGNORED_LABEL
from .samples import ModelInputs, Sample, read_sample, side_by_side
from .text import read_table
from .tokenizer import tokenizer_file

_Columns = dict[str, Any]

_FORMAT_OF_LABELS = "labels"


class TuningRows:
    """A source of samples: rows in the format that `data.format` names."""

    mask_id = None

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError for data that cannot be read, or has no rows."""
        self._format = data.format
        self._columns: tuple[str, ...]
        self._encode: Callable[[Mapping[str, Any]], _Columns]
        match data.format:
            case "prompts":
                self._columns, self._encode = ("prompt", "completion"), self._of_prompt
            case "messages":
                self._columns, self._encode = ("messages",), self._of_messages
            case "labels":
                self._columns, self._encode = (data.text_column, "label"), self._of_label
            case "text" | "samples":
                raise AssertionError(f"{data.format} has no rows to tune on")
            case _:
                assert_never(data.format)
        self.sequence_length = data.sequence_length
        self._tokenizer = _load_tokenizer(data)
        self._rows = list(read_table(data))
        if not self._rows:
            raise ConfigError("data.paths: there are no rows")
        for place, row in self._rows:
            _check_columns(place, row, self._columns)
        self._packed = list(self._pack()) if data.packing else None
        self.num_samples = len(self._rows if self._packed is None else self._packed)
        self.digest = self._digest_all(data)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def sample(self, index: int, inputs: ModelInputs) -> Sample:
        """Return a sample by index. Raises ConfigError if it does not fit the model."""
        if self._packed is not None:
            columns, place = self._packed[index], f"packed sample {index}"
        else:
            place, row = self._rows[index]
            columns = self._encoded(place, row)
        try:
            return read_sample(columns, inputs, length=self.sequence_length, vocab_size=self.vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error

    def check(self, inputs: ModelInputs) -> None:
        """Read the first and the last sample. Raises ConfigError if the format is not for the model."""
        task = "sequence_classification" if self._format == _FORMAT_OF_LABELS else "causal_lm"
        if inputs.task != task:
            raise ConfigError(f"data.format: {self._format} is for {task}, and the model's task is {inputs.task}")
        for index in (0, self.num_samples - 1):
            side_by_side([self.sample(index, inputs)], inputs, length=self.sequence_length)

    def _encoded(self, place: str, row: Mapping[str, Any]) -> _Columns:
        try:
            columns = self._encode(row)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        # A chat template is a program, and may fail in any way, as may its input.
        except Exception as error:
            raise ConfigError(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}") from error
        return {
            name: values[: self.sequence_length] if isinstance(values, list) else values
            for name, values in columns.items()
        }

    # --- formats -------------------------------------------------------------------------------------------

    def _of_prompt(self, row: Mapping[str, Any]) -> _Columns:
        """Label the completion, and the end of the text after it."""
        prompt, completion = (_text(row, name) for name in self._columns)
        whole = prompt + completion
        ids, labels = self._labelled(whole, [(len(prompt), len(whole))], add_special_tokens=True)
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids, labels = [*ids, end], [*labels, end]
        return {"input_ids": ids, "labels": labels}

    def _of_messages(self, row: Mapping[str, Any]) -> _Columns:
        """Label the assistant's messages, as the tokenizer's chat template renders them."""
        messages = row["messages"]
        if not any(each["role"] == "assistant" for each in messages):
            raise ConfigError("no message is the assistant's, which are what is predicted")
        whole = self._render(messages, prompts=False)
        spans = [
            self._span(messages, number, whole) for number, each in enumerate(messages) if each["role"] == "assistant"
        ]
        # A chat template writes special tokens itself.
        ids, labels = self._labelled(whole, spans, add_special_tokens=False)
        return {"input_ids": ids, "labels": labels}

    def _of_label(self, row: Mapping[str, Any]) -> _Columns:
        encoded = self._tokenizer(_text(row, self._columns[0]), truncation=True, max_length=self.sequence_length)
        others = {name: values for name, values in encoded.items() if name != "attention_mask"}
        return {**others, "label": row["label"]}

    def _span(self, messages: Sequence[Any], number: int, whole: str) -> tuple[int, int]:
        """Return where in the whole text a message of the assistant begins and ends."""
        before = self._render(messages[:number], prompts=True) if number else ""
        after = self._render(messages[: number + 1], prompts=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ConfigError(
                "the chat template writes a message in another way once others follow, so that it cannot be told what "
                f"the assistant says in message {number}; give a template that does not, or have a script's `data` "
                "return samples with labels"
            )
        return len(before), len(after)

    def _render(self, messages: Sequence[Any], *, prompts: bool) -> str:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompts)
        assert isinstance(text, str)
        return text

    def _labelled(
        self, text: str, spans: Sequence[tuple[int, int]], *, add_special_tokens: bool
    ) -> tuple[list[int], list[int]]:
        """Return a text's tokens, and labels for those that begin within spans of it."""
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        labels = [
            # Special tokens are not in the text, and their offsets are empty.
            token if stop > start and any(first <= start < end for first, end in spans) else IGNORED_LABEL
            for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        return ids, labels

    # --- packing -------------------------------------------------------------------------------------------

    def _pack(self) -> Iterator[_Columns]:
        """Yield samples of as many consecutive rows as fit."""
        documents: list[_Columns] = []
        for place, row in self._rows:
            document = self._encoded(place, row)
            if sum(len(each["input_ids"]) for each in documents) + len(document["input_ids"]) > self.sequence_length:
                yield _joined(documents)
                documents = []
            documents.append(document)
        yield _joined(documents)

    def _digest_all(self, data: DataSpec) -> str:
        digest = hashlib.blake2b(repr((self._format, data.packing, self.sequence_length)).encode(), digest_size=16)
        digest.update(tokenizer_file(data.tokenizer or "").read_bytes())
        digest.update(str(self._tokenizer.chat_template).encode())
        for _, row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def _joined(documents: Sequence[_Columns]) -> _Columns:
    """Join documents in one sample."""

    def joined(arrays: Sequence[Any]) -> npt.NDArray[np.int64]:
        return np.concatenate(arrays).astype(np.int64)

    return {
        "input_ids": joined([each["input_ids"] for each in documents]),
        # Without the labels of first tokens, since no document predicts another.
        "labels": joined([[IGNORED_LABEL, *each["labels"][1:]] for each in documents]),
        "position_ids": joined([np.arange(len(each["input_ids"])) for each in documents]),
    }


def _check_columns(place: str, row: Mapping[str, Any], known: Sequence[str]) -> None:
    missing = [name for name in known if row.get(name) is None]
    unused = [name for name, value in row.items() if name not in known and value is not None]
    if missing:
        raise ConfigError(f"{place}: it has no {missing[0]!r}; data.format needs {' and '.join(known)}")
    if unused:
        raise ConfigError(f"{place}: its column {unused[0]!r} is used by nothing; leave the column out")


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ConfigError(f"its column {column!r} is no text")
    return value


def _load_tokenizer(data: DataSpec) -> PreTrainedTokenizerFast:
    if data.tokenizer is None:
        raise ConfigError("data.tokenizer: name one, or a model.path with one: data.format needs it")
    file = tokenizer_file(data.tokenizer)
    try:
        if (file.parent / "tokenizer_config.json").is_file():
            loaded: Any = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
        else:
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(file))  # type: ignore[no-untyped-call]
    # The library raises bare exceptions.
    except Exception as error:
        raise ConfigError(f"data.tokenizer: {file.parent} cannot be loaded: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ConfigError(f"data.tokenizer: {file.parent} is no fast tokenizer, which says where its tokens begin")
    return loaded
