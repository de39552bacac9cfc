"""Shows a run to other programs: Prometheus, recipients of notifications, TensorBoard, and a browser."""
