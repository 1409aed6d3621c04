"""Keeping snapshots protected: encoding, scrubbing, regrouping, rejoining."""

__all__ = ["drain", "protect", "reform", "rejoin", "scratch", "scrub"]
