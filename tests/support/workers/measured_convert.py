"""`run(1, ..., module="tests.support.workers.measured_convert")`: tools.checkpoint with the growth of its
process in bytes."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import meshwright.tools.checkpoint.convert as tool
from meshwright.models.config import LlamaConfig
from meshwright.tools.checkpoint.__main__ import main
from meshwright.train.checkpoint.initial_weights import weight_shapes

save = tool.write_weights
highest_bytes = 0


def anonymous_bytes() -> int:
    """Anonymous memory of this process: without mapped files (proc(5), status)."""
    match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def save_and_look(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """write_weights of the tool, with a measurement before and after."""
    global highest_bytes
    highest_bytes = max(highest_bytes, anonymous_bytes())
    save(file, tensors)
    highest_bytes = max(highest_bytes, anonymous_bytes())


if __name__ == "__main__":
    tool.write_weights = save_and_look
    weight_shapes(LlamaConfig())  # do late imports now, so that they are not counted
    before_bytes = anonymous_bytes()
    main(sys.argv[1:])
    print("grew", highest_bytes - before_bytes)
