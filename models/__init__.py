"""The Llama model, its cost and its parameter names. Independent of `parallel/`."""
