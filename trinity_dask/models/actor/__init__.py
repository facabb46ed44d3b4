"""Actor."""
