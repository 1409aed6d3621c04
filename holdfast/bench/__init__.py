"""The benchmarks of `holdfast bench`."""
