"""`bench gpu`: one GPU, end to end, by parts, and beside its peers."""
