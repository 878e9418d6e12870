"""What passes ask of a graph: rows, effects, order, cost."""
