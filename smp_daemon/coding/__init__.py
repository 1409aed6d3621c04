"""Keeping snapshots protected: encoding, scrubbing, regrouping, rejoining."""

__all__ = ["buffer_pool", "drain", "protect", "regroup", "rejoin", "scrub", "sending"]
