"""Finds, fetches and rebuilds shards and parity that were lost."""
