"""Keeping snapshots protected: encoding, scrubbing, regrouping, rejoining."""
