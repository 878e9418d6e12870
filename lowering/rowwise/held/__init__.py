"""held: a kernel in which a program holds whole rows in registers: short rows, cut and regrouped at will.

    read -> emit -> HeldKernel

Values are functions from an index to an expression (values.py), so a view costs nothing and is never refused; what a
row is folded over, ranked by or multiplied with is a tile of its own. Rows that are too long are for the kernels in
passes over chunks, one folder up.
"""
