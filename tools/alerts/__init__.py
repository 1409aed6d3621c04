"""Recordings of Prometheus metrics while faults were injected into real jobs, and the script that made them."""
