"""From the text of a source to a folder of tokenised shards."""
