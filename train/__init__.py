"""Introduces the model to the parallelism: config, data, step, optimizer, checkpoint, metrics, main."""
