"""Patches that make Keras 3 work under `tf.distribute`. `patching` lists the faults and applies the patches."""
