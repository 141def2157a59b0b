"""Trains transformer models, Llama first, with PyTorch's own parallelism, torch.compile first, by one plan.

In a checkout the subpackages are links to the folders beside this one. All imports, also between them, go by
this package: `from meshwright.parallel.plan import Plan`. `python -m train.main` and `python -m tools.NAME`
in the checkout's folder are `python -m meshwright.train.main` and `python -m meshwright.tools.NAME`
everywhere.
"""

__version__ = "0.1.0"
