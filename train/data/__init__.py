"""From text to batches: documents, tokens on disk, an order of samples, a loader that runs ahead."""
