"""DeepSeek-V4.1-Flash in plain PyTorch: the specification, and in eager mode the oracle for all else."""
