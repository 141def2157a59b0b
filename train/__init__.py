"""Training: joins model and parallelism with config, data, step, optimizer, checkpoint, metrics and main."""
