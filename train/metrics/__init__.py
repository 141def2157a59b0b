"""What a run reports: rows, TensorBoard, and the facts of the run."""
