"""A run of train.main that records every operator that makes the host wait for a value, with the step.

Arguments: the folder for a JSON file per rank, then those of train.main. Run by test_host_syncs.py.
"""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.exit import exit_process
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.phases import run

PACKAGE = Path(__file__).parents[3] / "meshwright"
# excludes a virtual environment in the same folder
OURS = tuple(f"{PACKAGE / name}/" for name in ("models", "parallel", "train"))
# Reading a value (.item(), .tolist(), if tensor), and shapes that depend on values.
READS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.is_nonzero",
    "aten.equal",
    "aten.masked_select",
    "aten._unique",
)


class Reads(TorchDispatchMode):
    """Records (step, operator, function of this project that called it); step 0 is outside train_loop."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(READS):
            step, caller = where(sys._getframe())
            self.noted.append((step, str(func), caller))
        return func(*args, **(kwargs or {}))


def where(frame: FrameType | None) -> tuple[int, str]:
    """The step of the train_loop around a frame, and the nearest function of this project."""
    caller = ""
    while frame is not None:
        code = frame.f_code
        if not caller and code.co_filename.startswith(OURS):
            caller = f"{Path(code.co_filename).relative_to(PACKAGE)} {code.co_qualname}"
        if code.co_name == "train_loop":
            return int(frame.f_locals.get("step", 0)), caller
        frame = frame.f_back
    return 0, caller


if __name__ == "__main__":
    ranks = read_rank_info()
    with Reads() as reads:
        run(parse_config(sys.argv[2:]), ranks)
    Path(sys.argv[1], f"{ranks.rank}.json").write_text(json.dumps(reads.noted))
    exit_process(ranks, 0)
