"""What a run shows to other programs: Prometheus, recipients of notifications, TensorBoard, and a browser."""
