"""Back from a snapshot: planning, loading, resharding, and comparing what the first steps do with what they did."""
