"""Calls the function that a model config names, which returns the model: our Llama's class, or a function of
yours that `model.factory` names."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models.llama import LlamaConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.model.describe import Example
from meshwright.train.config import ModelConfig
from meshwright.train.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.parallel.model.check import Loss

RESULT = "a model, or a model and an example of its arguments (a dict or a tuple), and if you like a loss"
_named: set[str] = set()


def name_factory(factory: str) -> None:
    """Allow this process to call a factory, because the user's command names it."""
    _named.add(factory)


@dataclass(frozen=True)
class OwnModel:
    """What a factory returns.

    `example`: arguments of one forward, of which only shapes and dtypes count; None: the factory gives none.
    """

    module: nn.Module
    example: Example | None = None
    loss: "Loss | None" = None


def call_factory(config: ModelConfig, device: str | None = "meta") -> OwnModel:
    """Call the factory, by default with new tensors on the meta device, which takes no memory; None: where
    the function puts them.

    Raises ConfigError if no command has named it, as when a checkpoint does, and if there is no such
    function, it refuses its arguments, or returns something else.
    """
    named = f"model.factory={config.factory}"
    if config.factory not in {LlamaConfig.factory, *_named}:
        raise ConfigError(
            f"the model is built by {config.factory}, which only a checkpoint names, and reading a "
            f"checkpoint runs no code: if you trust it, add --{named}"
        )
    function = _find(config.factory)
    try:
        inspect.signature(function).bind(**config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{named}: {error}: set it with --model.args.KEY=VALUE") from error
    try:
        with torch.device(device) if device else nullcontext():
            result = function(**config.args)
    except (ValueError, ImportError, OSError) as error:  # others are bugs: their traceback says where
        raise ConfigError(one_line(f"{named}: {type(error).__name__}: {error}")) from error
    parts = result if isinstance(result, tuple) else (result,)
    if not (1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module) and _is_example(*parts[1:2])):
        raise ConfigError(f"{named} must return {RESULT}")
    return OwnModel(*parts)


def _is_example(value: object = None) -> bool:
    return isinstance(value, Mapping | tuple | list | None)


def _find(factory: str) -> Callable[..., Any]:
    """Import the module, from the current folder too, and return the function."""
    module, _, name = factory.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.factory={factory}: {error}: use a function of a module in this folder, or installed"
        ) from error
    return function
