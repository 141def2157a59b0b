"""`train.main` whose third step has shorter sequences than the others. Run by test_guarantees.py."""

import sys
from typing import Any

import meshwright.train.training
from meshwright.train.data.sequences import Batch
from meshwright.train.main import main
from meshwright.train.step import train_step

if __name__ == "__main__":
    steps = iter(range(1, 1000))

    def shortened(sharded: Any, optimizer: Any, batches: Any, *rest: Any) -> Any:
        if next(steps) == 3:
            batches = [Batch(b.tokens[:, :16], b.targets[:, :16]) for b in batches]
        return train_step(sharded, optimizer, batches, *rest)

    meshwright.train.training.train_step = shortened
    main(sys.argv[1:])
