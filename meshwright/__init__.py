"""Trains transformer models, Llama first, with PyTorch's own parallelism, torch.compile first, by one plan.

In a checkout the subpackages are links to the folders beside this one. Every import goes by this package,
such as `from meshwright.parallel.apply import apply_plan`: by two names a module would exist twice. From the
folder of a checkout `python -m train.main` and `python -m tools.NAME` are short for `python -m
meshwright.train.main` and `python -m meshwright.tools.NAME`, which work everywhere.
"""

__version__ = "0.1.0"
