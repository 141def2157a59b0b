"""What the user says about data."""

from dataclasses import dataclass, field

from meshwright.train.bounds import bounded


class DataError(ValueError):
    """The data asked for cannot be used: the message names what, where and the way out."""


@dataclass(frozen=True)
class DataConfig:
    """Text to train on.

    Args:
        source: stdlib (the source code of this Python's standard library); a file, folder or glob of text
            (.txt, .md, source
            code ...: one document each) or of records (.jsonl[.gz|.zst], .parquet, .arrow: a document each);
                or a folder
            that tools.prepare_data has written
        mixture: instead of source: name of a source -> its share of the sequences, as in {/data/web: 0.7,
            /data/code: 0.3}
        validation: name -> source, each evaluated whole besides what is held out, as in {wiki:
            /data/wiki.jsonl}
        tokenizer: bytes (every byte is a token, and 256 separates documents), or a tokenizer.json or the
            folder it lies in; auto is the one that prepared data was made with, else bytes
        bos: token in front of each document: auto (as the tokenizer's own files say), none, or a token such
            as <s>
        eos: token after each document: auto, or a token such as </s>
        text_field: field of a record that holds its text
        held_out: share of documents kept for evaluation, chosen by a hash of their names; prepared data has
            its own
        packing: true puts documents one after another and cuts the stream into sequences; false gives every
            document a sequence of its own, clipped or padded
        document_mask: with packing, attention does not cross documents, and positions begin anew in each
        verify: full compares prepared shards with their checksums once, and again when they have changed;
            size only their sizes
        cache_dir: folder of tokenised text; null is ~/.cache/meshwright
        prefetch: how many optimizer steps of batches the loader prepares ahead
    """

    source: str = "stdlib"
    mixture: dict[str, float] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    tokenizer: str = "auto"
    bos: str = "auto"
    eos: str = "auto"
    text_field: str = "text"
    held_out: float = bounded(0.02, low=0, high=0.999)
    packing: bool = True
    document_mask: bool = False
    verify: str = "full"
    cache_dir: str | None = None
    prefetch: int = bounded(2, low=1)

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("data.source is empty: name a file, a folder or a glob, or use stdlib")
        for source, weight in self.mixture.items():
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"data.mixture: {source} has the weight {weight}, which must be greater than 0"
                )
        if self.verify not in ("full", "size"):
            raise ValueError(f"data.verify={self.verify} must be full or size")
        if self.document_mask and not self.packing:
            raise ValueError(
                "data.document_mask is for packed sequences: with data.packing=false each has one document "
                "anyway"
            )
