"""Streaming: a corpus that does not fit the disk, read from local files and URLs during training."""
