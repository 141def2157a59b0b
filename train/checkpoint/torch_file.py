"""A file of `torch.save`, read as a safetensors file is, slice by slice: it is mapped, and only tensors and
plain data are unpickled."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.errors import one_line
from meshwright.train.checkpoint.manifest import DTYPES
from meshwright.train.checkpoint.shards import dtype_name

NESTED = ("model", "state_dict")  # keys of a training's file that may have the state_dict


@dataclass(frozen=True)
class TorchSlice:
    """A tensor in a file, as one of safetensors: `get_dtype` returns its name of the dtype, else torch's."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        name = dtype_name(self.tensor.dtype)
        return DTYPES[name][0] if name in DTYPES else name

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        return self.tensor[where]


class TorchFile:
    """The state_dict in a file, alone or under a key of NESTED, with the methods of `safetensors.safe_open`.
    Raises ValueError if there is none, and if the file needs code."""

    def __init__(self, file: Path) -> None:
        try:
            content: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # of the unpickler: any, if the file is damaged
            # not all of its message, which advises to run the code in the file
            code = re.search(r"GLOBAL (\S+)", str(error))
            reason = (
                f"it calls {code[1]}, and no code in a file is run" if code else one_line(str(error), 150)
            )
            raise ValueError(f"{reason}; torch.save(model.state_dict(), FILE) writes another") from None
        outer = content if isinstance(content, Mapping) else {}
        found = next((outer[key] for key in NESTED if isinstance(outer.get(key), Mapping)), outer)
        tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
        if not tensors:
            keys = ", ".join(map(str, list(outer)[:8]))
            raise ValueError(f"no tensors, alone or under {' or '.join(NESTED)}, but {keys or type(content)}")
        self._slices = {name: TorchSlice(tensor.detach()) for name, tensor in tensors.items()}
        self.keys, self.get_slice = self._slices.keys, self._slices.__getitem__

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *error: object) -> None: ...
