"""Keeping snapshots protected: encoding, scrubbing, regrouping."""

__all__ = ["moving", "protect", "regroup", "scrub"]
