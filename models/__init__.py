"""The Llama model, its cost and its names. Knows nothing of parallelism."""
