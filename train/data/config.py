"""What the user says about data."""

from dataclasses import dataclass


class DataError(ValueError):
    """The data asked for cannot be used: the message names what, where and the way out."""


@dataclass(frozen=True)
class DataConfig:
    """Text to train on.

    Args:
        source: stdlib (the source code of this Python's standard library), a text file, a folder (all text files
            below it) or a glob such as 'corpus/**/*.txt'
        tokenizer: bytes: every byte is a token, and 256 separates documents
        held_out: share of documents kept for evaluation, chosen by a hash of their names
        cache_dir: folder of tokenised text; null is ~/.cache/meshwright
        prefetch: how many optimizer steps of batches the loader prepares ahead
    """

    source: str = "stdlib"
    tokenizer: str = "bytes"
    held_out: float = 0.02
    cache_dir: str | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("data.source is empty: name a file, a folder or a glob, or use stdlib")
        if self.tokenizer != "bytes":
            raise ValueError(f"data.tokenizer={self.tokenizer}: this version has only bytes")
        if not 0 < self.held_out < 1:
            raise ValueError(f"data.held_out={self.held_out} must lie between 0 and 1")
        if self.prefetch < 1:
            raise ValueError(f"data.prefetch={self.prefetch} must be at least 1")
