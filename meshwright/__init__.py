"""Shard and train transformers with PyTorch's own parallelism and torch.compile, as one plan describes.

In a checkout the subpackages are symbolic links to the folders next to this one. Import every module through
this package, such as `from meshwright.parallel.apply import apply_plan`: a module imported under two names
would exist twice. `python -m meshwright.train.main` and `python -m meshwright.tools.NAME` work from any
folder; in the folder of a checkout `python -m train.main` and `python -m tools.NAME` do the same.
"""

import os
import sys
from importlib import import_module
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.parallel.apply import apply_plan as apply_plan
    from meshwright.parallel.check.check import check as check
    from meshwright.parallel.check.report import CheckReport as CheckReport
    from meshwright.parallel.config import CompileConfig as CompileConfig
    from meshwright.parallel.config import ParallelConfig as ParallelConfig
    from meshwright.parallel.errors import PlanError as PlanError
    from meshwright.parallel.fsdp import full_tensor as full_tensor
    from meshwright.parallel.mesh import build_mesh as build_mesh
    from meshwright.parallel.model.describe import describe as describe
    from meshwright.parallel.model.materialize import load_weights as load_weights
    from meshwright.parallel.model.materialize import materialize as materialize
    from meshwright.parallel.model.shard import shard as shard
    from meshwright.parallel.plan.make import RunShape as RunShape
    from meshwright.parallel.plan.make import make_plan as make_plan
    from meshwright.parallel.plan.schema import ModelUnits as ModelUnits
    from meshwright.parallel.plan.schema import Plan as Plan
    from meshwright.parallel.plan.serialize import diff_plans as diff_plans
    from meshwright.parallel.plan.serialize import load_plan as load_plan
    from meshwright.parallel.plan.serialize import plan_to_table as plan_to_table
    from meshwright.parallel.plan.serialize import plan_to_yaml as plan_to_yaml
    from meshwright.parallel.sharded_model import ShardedModel as ShardedModel
    from meshwright.parallel.sharded_model import evaluating as evaluating
    from meshwright.parallel.simulate.simulator import TrainingCode as TrainingCode
    from meshwright.parallel.simulate.simulator import simulate as simulate
    from meshwright.train.checkpoint.own_loop import load as load
    from meshwright.train.checkpoint.own_loop import save as save
    from meshwright.train.optim.optimizer import optimizer as optimizer

# the public names, and the modules that have them; imported when first used, because torch takes seconds
_PUBLIC = {
    "shard": "parallel.model.shard",
    "describe": "parallel.model.describe",
    "ModelUnits": "parallel.plan.schema",
    "make_plan": "parallel.plan.make",
    "ParallelConfig": "parallel.config",
    "CompileConfig": "parallel.config",
    "RunShape": "parallel.plan.make",
    "Plan": "parallel.plan.schema",
    "plan_to_table": "parallel.plan.serialize",
    "plan_to_yaml": "parallel.plan.serialize",
    "load_plan": "parallel.plan.serialize",
    "diff_plans": "parallel.plan.serialize",
    "build_mesh": "parallel.mesh",
    "apply_plan": "parallel.apply",
    "ShardedModel": "parallel.sharded_model",
    "evaluating": "parallel.sharded_model",
    "full_tensor": "parallel.fsdp",
    "materialize": "parallel.model.materialize",
    "load_weights": "parallel.model.materialize",
    "check": "parallel.check.check",
    "CheckReport": "parallel.check.report",
    "save": "train.checkpoint.own_loop",
    "load": "train.checkpoint.own_loop",
    "optimizer": "train.optim.optimizer",
    "simulate": "parallel.simulate.simulator",
    "TrainingCode": "parallel.simulate.simulator",
    "PlanError": "parallel.errors",
}
__all__ = [*_PUBLIC]

__version__ = "0.1.0"

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "train")):
    raise ImportError(
        "meshwright/train is not a folder: git checked out the symbolic links as text files. Restore them "
        "with `git config core.symlinks true; git checkout -- meshwright`"
    )


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the program, but no traceback for Ctrl-C; Python then ends it by SIGINT, which
    a shell reports as 130."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


# Commands handle Ctrl-C themselves from their first statement on. Before it, they import torch for seconds.
_COMMANDS = ("meshwright.", "train.", "tools.", "benchmarks.")
if any(option == "-m" and name.startswith(_COMMANDS) for option, name in pairwise(sys.orig_argv)):
    sys.excepthook = _print_error


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
