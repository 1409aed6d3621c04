"""What a machine with a GPU has to show: that state on it is captured and restored exactly, and at what cost."""
