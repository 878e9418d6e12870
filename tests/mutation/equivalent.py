"""equivalent: mutants that no test can tell from the pass, each with the reason. They count for nothing."""

EQUIVALENT: dict[str, str] = {}
