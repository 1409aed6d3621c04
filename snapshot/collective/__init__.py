"""What ranks agree upon."""
