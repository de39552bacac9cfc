"""Regular measurements of the node, its tasks and its GPUs."""
