"""bench: measurements on a GPU, each checked against fp64 before it is timed, each kept as JSON with everything it
depends on."""
