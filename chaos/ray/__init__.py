"""Faults under Ray."""
