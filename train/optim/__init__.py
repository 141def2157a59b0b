"""The optimizer, its schedule, and AdamW in bfloat16 with its kernels, each beside its reference."""
