"""Network namespaces and wall clocks for the processes of virtual nodes."""
