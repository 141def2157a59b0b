"""`python -m tools.bench.gpu.worker`: one part or one peer in a process of its own, which `bench gpu`
starts."""

import argparse
import json
import warnings
from pathlib import Path

import torch

from meshwright.tools.bench.gpu.cases import SHAPES
from meshwright.tools.bench.gpu.parts import PARTS
from meshwright.tools.bench.gpu.peers import NEEDED, measure_peer
from meshwright.train.distributed.exit import end_process


def main() -> None:
    """Measure, and write the figures to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=(*PARTS, *NEEDED))
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--checkpoint", choices=("none", "full"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # libraries' own
    torch.set_num_threads(options.threads)
    shape, device = SHAPES[options.shape], torch.device(options.device)
    if options.work in PARTS:
        figures = PARTS[options.work](shape, device)
    else:
        figures = measure_peer(options.work, shape, options.layers, options.checkpoint, device)
    options.out.write_text(json.dumps(figures), encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
