"""Refuses transformers' own trainers in a run's scripts: they would train in the script's process alone.

A library that imported transformers' Trainer before a script put ours in its place (TRL's trainers are subclasses
of it) would train as if there were no nodes, without a word.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from oobleck.errors import UsageError

_MODULE = "transformers.trainer"


def refuse_plain_trainers() -> None:
    """Make `train()` of trainers that are not ours raise UsageError, once transformers is imported."""
    # It is not imported here: the script may set environment variables for it first.
    if _MODULE in sys.modules:
        _refuse(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds the module as other finders would, and changes it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        # `find_spec` would otherwise ask this finder again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            load = loader.exec_module

            def load_and_refuse(module: ModuleType) -> None:
                load(module)
                _refuse(module)

            loader.exec_module = load_and_refuse  # type: ignore[method-assign]  # this spec's own loader
        return spec


def _refuse(module: ModuleType) -> None:
    kind: Any = module.Trainer
    train = kind.train  # our subclass overrides it and never calls it

    @functools.wraps(train)
    def refusing(self: Any, *_args: Any, **_named: Any) -> Any:
        raise UsageError(
            f"{type(self).__name__}.train(): its class is one of transformers' own Trainer, and would train in the "
            "script's process alone; make it a subclass of oobleck.transformers.Trainer, or start the script by "
            "`oobleck run`"
        )

    kind.train = refusing
