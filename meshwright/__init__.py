"""Train Llama models with PyTorch's own parallelism and torch.compile, as one plan describes.

In a checkout the subpackages are symbolic links to the folders next to this one. Import every module through
this package, such as `from meshwright.parallel.apply import apply_plan`: a module imported under two names
would exist twice. `python -m meshwright.train.main` and `python -m meshwright.tools.NAME` work from any
folder; in the folder of a checkout `python -m train.main` and `python -m tools.NAME` do the same.
"""

import os

__version__ = "0.1.0"

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "train")):
    raise ImportError(
        "meshwright/train is not a folder: git checked out the symbolic links as text files. Restore them "
        "with `git config core.symlinks true; git checkout -- meshwright`"
    )
