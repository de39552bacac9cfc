"""Keras 3 made to work under `tf.distribute`, from outside. `patching` lists the faults and loads the patches."""
