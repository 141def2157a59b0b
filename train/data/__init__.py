"""From text to batches: documents, token shards on disk, the sample order, and a prefetching loader."""
