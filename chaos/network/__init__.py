"""Networks and clocks for the real processes of virtual nodes, and their faults."""
