"""Hand-written kernels, each beside its plain-torch reference."""
