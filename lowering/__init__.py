"""Lowering: a piece of the program becomes something that runs. Inductor for most; generated Triton for regions."""
