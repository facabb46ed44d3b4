"""Step."""
