"""Tokens that tensor parallelism gathers for products in float8, sent in float8: a byte a number."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

EPS = 1e-12  # torchao's: the least that the largest number counts as

_c10d = torch.ops._c10d_functional


def gather_in_float8(model: nn.Module, patterns: Sequence[str], styles: Mapping[str, str]) -> None:
    """Have modules of these patterns gather in float8: norms their output; rowwise linears, in the backward,
    its gradient, which needs the wider range."""
    for name, module in model.named_modules():
        if pattern := next((p for p in patterns if fnmatch.fnmatchcase(name, p)), ""):
            dtype = "float8_e4m3fn" if styles[pattern] == "sequence" else "float8_e5m2"
            module.tensor_axis = replace(module.tensor_axis, gather_dtype=dtype)  # type: ignore[arg-type]


def gather_narrow(x: Tensor, group_name: str, degree: int, dim: int, dtype_name: str) -> Tensor:
    """The shares x of all ranks, joined along `dim`, with one scale for all: products in float8 would round
    them to just that."""
    dtype = getattr(torch, dtype_name)
    most = torch.finfo(dtype).max
    largest = _c10d.wait_tensor(_c10d.all_reduce(x.abs().amax().float(), "max", group_name))
    scale = most / largest.clamp(min=EPS)
    sent = (x.float() * scale).clamp(-most, most).to(dtype).view(torch.uint8)
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(sent.contiguous(), degree, group_name))
    return (torch.cat(gathered.chunk(degree), dim).view(dtype).float() / scale).to(x.dtype)
