"""The models that train/ and tools/ work with: our Llama, and a model that a function of yours returns."""
