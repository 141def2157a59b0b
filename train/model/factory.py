"""Calls the function that a model config names, which returns the model: our Llama's class, or a function of
yours that `model.factory` names."""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.parallel.errors import one_line
from meshwright.parallel.model.describe import Example
from meshwright.train.config import ModelConfig
from meshwright.train.errors import ConfigError
from meshwright.train.user_code import find

if TYPE_CHECKING:
    from meshwright.parallel.model.check import Loss

RESULT = "a model, or a model and an example of its arguments (a dict or a tuple), and if you like a loss"


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
    function = find("model.factory", config.factory)
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
