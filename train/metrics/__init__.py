"""The reports of a run: rows of metrics, TensorBoard, and the run summary."""
