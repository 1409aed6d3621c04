"""The network between virtual nodes: a forwarder passes their packets, and does to them what faults say."""
