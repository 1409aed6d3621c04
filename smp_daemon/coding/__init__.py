"""Keeping snapshots protected: encoding, scrubbing, regrouping, rejoining."""

__all__ = ["drain", "protect", "regroup", "rejoin", "scratch", "scrub"]
