"""`python -m tools.dryrun`: the CUDA program of one rank, run on a fake H100."""
