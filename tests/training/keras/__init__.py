COVERS = ("worker_entry/keras_patches", "worker_entry/hooks")
