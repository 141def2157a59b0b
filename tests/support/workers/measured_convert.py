"""`run(1, ..., module="tests.support.workers.measured_convert")`: tools.convert_hf, and by how many bytes its
process has grown."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import meshwright.tools.convert_hf as tool
from meshwright.models.llama import LlamaConfig

save = tool.write_weights
highest_bytes = 0


def anonymous_bytes() -> int:
    """Memory of this process that no file lies behind (proc(5), status)."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def save_and_look(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the tool does with each file, looked at before and after."""
    global highest_bytes
    highest_bytes = max(highest_bytes, anonymous_bytes())
    save(file, tensors)
    highest_bytes = max(highest_bytes, anonymous_bytes())


if __name__ == "__main__":
    tool.write_weights = save_and_look
    tool.weight_shapes(LlamaConfig())  # what is imported late must not be counted
    before_bytes = anonymous_bytes()
    tool.main(sys.argv[1:])
    print("grew", highest_bytes - before_bytes)
