"""Functions and classes of yours that a config names, as MODULE:NAME.

A name in a config file or on the command line of a command may be imported; one that only a checkpoint names
is never imported, because reading a checkpoint runs no code.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from meshwright.models.config import LlamaConfig
from meshwright.parallel.errors import place_of
from meshwright.parallel.plan.rules import nearest
from meshwright.train.errors import ConfigError

# the keys whose values are such names
KEYS = ("model.factory", "data.factory", "optim.name", "optim.schedule", "train.hooks", "train.loss")
_allowed = {LlamaConfig.factory}  # and what the user's command names


def allow(names: Iterable[str]) -> None:
    """Allow this process to import what the user's command names."""
    _allowed.update(names)


def find(key: str, name: str) -> Any:
    """Import the module, from the current folder too, and return the function or class that it calls NAME.
    Raises ConfigError if there is none, and if no command has named it, as when a checkpoint does."""
    if name not in _allowed:
        value = f"[{name}]" if key == "train.hooks" else name
        raise ConfigError(
            f"{key} is {name}, which only a checkpoint names, and reading a checkpoint runs no code: if you "
            f"trust it, add --{key}={value}"
        )
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        where = "" if error.name == module else f", which {module} imports"
        raise ConfigError(
            f"{key}={name}: {error}{where}: use a name in a module in this folder, or installed"
        ) from error
    except (Exception, SystemExit) as error:  # of the module's own code
        raise ConfigError(
            f"{key}={name}: {module} cannot be imported: {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    if not callable(it := getattr(found, attribute, None)):
        hint = nearest(attribute, [n for n, of in vars(found).items() if callable(of)]) or " Use MODULE:NAME."
        raise ConfigError(f"{key}={name}: {found.__file__} has no function or class '{attribute}'.{hint}")
    return it
