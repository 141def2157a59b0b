"""`run(1, ..., module="tests.support.workers.measured_convert")`: tools.checkpoint with the growth of its
process in bytes."""

import re
import sys
from pathlib import Path
from typing import Any

import torch

import meshwright.tools.checkpoint.convert as tool
from meshwright.models.config import LlamaConfig
from meshwright.tools.checkpoint.__main__ import main
from meshwright.train.checkpoint.initial_weights import weight_shapes

read_full = tool.read_full_tensors
highest_bytes = 0


def anonymous_bytes() -> int:
    """Anonymous memory of this process: without mapped files (proc(5), status)."""
    match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def read_and_look(*arguments: Any) -> dict[str, torch.Tensor]:
    """read_full_tensors of the tool, with a measurement after it."""
    global highest_bytes
    tensors = read_full(*arguments)
    highest_bytes = max(highest_bytes, anonymous_bytes())
    return tensors


if __name__ == "__main__":
    tool.read_full_tensors = read_and_look
    weight_shapes(LlamaConfig())  # do late imports now, so that they are not counted
    before_bytes = anonymous_bytes()
    main(sys.argv[1:])
    print("grew", highest_bytes - before_bytes)
