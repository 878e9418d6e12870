"""From regions and pieces to code that runs: Triton for regions, Inductor for the rest."""
