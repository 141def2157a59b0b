"""Hand-written kernels of training, each beside its plain-torch reference."""
