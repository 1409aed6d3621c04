"""Keeping snapshots protected: encoding, scrubbing, regrouping."""

__all__ = ["drain", "protect", "regroup", "scrub"]
