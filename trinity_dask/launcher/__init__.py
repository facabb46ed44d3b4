"""Runs the stages of a job on the control worker and tells the driver how it goes."""
