"""Files that the controller sends to the node, and files of the node that it collects."""
