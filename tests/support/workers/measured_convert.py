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
from meshwright.train.model.trained_model import model_of

read_full = tool.read_full
highest_bytes = 0


def anonymous_bytes() -> int:
    """Anonymous memory of this process: without mapped files (proc(5), status)."""
    match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def read_and_look(*arguments: Any) -> torch.Tensor:
    """read_full of the tool, with a measurement after it."""
    global highest_bytes
    tensor = read_full(*arguments)
    highest_bytes = max(highest_bytes, anonymous_bytes())
    return tensor


if __name__ == "__main__":
    tool.read_full = read_and_look
    model_of(LlamaConfig()).module.state_dict()  # do late imports now, so that they are not counted
    before_bytes = anonymous_bytes()
    main(sys.argv[1:])
    print("grew", highest_bytes - before_bytes)
