"""Packages and devices that megatron-core would use and a CPU has not: their data structures, for drills and tests."""
