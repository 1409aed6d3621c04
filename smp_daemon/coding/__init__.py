"""Keeping snapshots protected: encoding, scrubbing, regrouping."""

__all__ = ["buffer_pool", "drain", "protect", "regroup", "scrub"]
