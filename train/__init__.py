"""Introduces the model to the parallelism: config, data, step, optimizer, checkpoint, metrics, main."""

VERSION = "0.1.0"
