"""The weights of a transformers model directory, read parameter by parameter.

A stage reads only its own layers' parameters, unless names in the files differ from the model's in more than the prefix
of its trunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.training.fetched import model_directory

from .adapters import is_adapter, plain_name
from .brought import named_state

_DIGESTED_PIECES, _PIECE_BYTES = 64, 4096
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The safetensors files of a directory, which are read on demand."""

    is_whole = False
    """Whether no parameter starts from the seed, as those of adapters and new heads do."""

    def __init__(self, directory: str) -> None:
        self._directory = model_directory(directory, "model.path")
        self._loaded: dict[str, torch.Tensor] | None = None

    def digest(self) -> str:
        """Digest the files' names and sizes, and samples of their bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(set(self._files.values())):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                # Reading whole files would take too long.
                for number in range(_DIGESTED_PIECES):
                    file.seek(size * number // _DIGESTED_PIECES)
                    digest.update(file.read(_PIECE_BYTES))
        return digest.hexdigest()

    def read(
        self, names: Iterable[str], model: PreTrainedModel, shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """Return the parameters that have these names in `model`, which may be on the meta device.

        Raises ConfigError for a parameter that the directory lacks, or that has another shape there.
        """
        wanted = list(names)
        found = {name: self._name_in_files(name, model) for name in wanted}
        if all(value is not None for value in found.values()):
            state = {name: self._tensor(known) for name, known in found.items() if known is not None}
        else:
            # Some models were renamed, and some merge experts while loading; only transformers knows how, and each
            # worker has it load the whole model once.
            state = {name: value for name, value in self._all_of(model).items() if name in found}
        for name in wanted:
            if name not in state:
                raise ConfigError(f"model.path: {self._directory} has no weights for {name}")
            if state[name].shape != shapes[name]:
                raise ConfigError(
                    f"model.path: {name} has the shape {tuple(state[name].shape)} in {self._directory}, and "
                    f"{tuple(shapes[name])} in the model; leave the keys of its configuration as they are"
                )
        return state

    def names_in_files(self, parameters: Iterable[str]) -> dict[str, str]:
        """Return the names of parameters in the files, which have no adapters, keyed by their names in the model."""
        return {name: plain_name(name) for name in parameters if not is_adapter(name)}

    def known(self, names: Iterable[str], model: PreTrainedModel, *, renamed: bool = False) -> tuple[str, ...]:
        """Return the names that the files have: literally, or with `renamed` also as transformers renames them."""
        wanted = list(names)
        found = {name for name in wanted if self._name_in_files(name, model) is not None}
        if renamed and len(found) < len(wanted):
            found |= self._all_of(model).keys()
        return tuple(name for name in wanted if name in found)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Each tensor's file."""
        index = self._directory / _INDEX
        try:
            if index.exists():
                names = json.loads(index.read_text())["weight_map"]
                return {name: self._directory / file for name, file in names.items()}
            single = self._directory / _SINGLE
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(
                f"model.path: {self._directory} has no weights as safetensors ({_SINGLE}): {error}"
            ) from error

    def _name_in_files(self, name: str, model: PreTrainedModel) -> str | None:
        # Files of a model without its head lack the prefix of its trunk.
        for candidate in (name, name.removeprefix(f"{model.base_model_prefix}.")):
            if candidate in self._files:
                return candidate
        return None

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.path: {self._files[name]} cannot be read: {error}") from error
        return tensor

    def _all_of(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Have transformers load all parameters and buffers; leave out those that the directory lacks."""
        if self._loaded is None:
            loaded: Any = type(model).from_pretrained(
                self._directory,
                config=model.config,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
            whole, report = loaded
            # transformers has filled these with random values.
            missing = set(report["missing_keys"])
            self._loaded = {name: tensor.detach() for name, tensor in named_state(whole) if name not in missing}
        return self._loaded
