"""Runs what was compiled: pieces in the order of the Plan."""
