"""Trains transformer models, Llama first, with PyTorch's own parallelism, torch.compile first, by one plan.

In a checkout the subpackages are links to the folders beside this one. Every import goes by this package,
such as `from meshwright.parallel.apply import apply_plan`: by two names a module would exist twice. From the
folder of a checkout `python -m train.main` and `python -m tools.NAME` are short for `python -m
meshwright.train.main` and `python -m meshwright.tools.NAME`, which work everywhere.
"""

import os

__version__ = "0.1.0"

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "train")):
    raise ImportError(
        "meshwright/train is no folder: git has made the links of this checkout into text files. "
        "`git config core.symlinks true; git checkout -- meshwright` makes them anew"
    )
