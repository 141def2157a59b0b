"""Hand-written kernels, each with a plain-torch reference."""
