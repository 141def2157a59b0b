"""The optimizer, its learning-rate schedule, and AdamW in bfloat16: a reference and a Triton kernel."""
