"""Whether trainers live."""
