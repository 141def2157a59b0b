"""Runs the Triton kernels of the cross entropy in Triton's interpreter, on CPU tensors. Run by test_loss.py: `OUT`."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from models.kernels.cross_entropy_triton import BLOCK, read_rows, write_gradient
from tests.models import test_loss
from tests.models.test_loss import ROW_CASES, make_rows


def main() -> None:
    assert BLOCK == test_loss.BLOCK
    results = []
    for case in ROW_CASES:
        logits, ids, log_sum, scale, weight = make_rows(*case)
        rows = read_rows(logits, ids)
        write_gradient(logits, ids, log_sum, scale, weight)
        results.append((rows, logits))
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
