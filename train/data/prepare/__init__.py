"""Preparation of data: from the text of a source to a folder of tokenized shards."""
