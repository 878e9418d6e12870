"""The `v41` command."""
