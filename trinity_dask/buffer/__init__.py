"""Data on its way: task files in, experiences through a committed store, rows out by lease."""
