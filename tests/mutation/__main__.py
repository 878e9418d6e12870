"""python -m tests.mutation: breaks guards of the passes one at a time, and says what no test noticed.

Exits with 1 where a mutant survives that was killed in score.json. What it finds of a file is written there, in place
of what was said of that file; so a whole run may be made in parts.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.mutation.score import (
    ROOT,
    SCORE,
    drawn,
    load,
    merged,
    newly_survived,
    reach,
    run,
    score_of,
    sources_of,
    table,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("only", nargs="*", help="words in the names of files; all files of passes where there are none")
    parser.add_argument("--share", type=float, default=0.06, help="of the mutants that are no rules, drawn by hash")
    parser.add_argument("--most", type=int, help="of these, so many of each file (no limit)")
    parser.add_argument("--tests", nargs="+", default=(), help="words in the names of files of tests (all)")
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow")
    asked = parser.parse_args()
    import torch  # noqa: F401  (children are forks: what is loaded here is loaded once)

    sources = sources_of(ROOT, asked.only)
    reached, results = reach(ROOT, sources, asked.tests, quick=asked.quick), []
    for mutant, outcome in run(ROOT, drawn(ROOT, sources, asked.share, asked.most), reached):
        results.append((mutant, outcome))
        if outcome.told in ("survived", "timeout"):
            print(f"{outcome.told}  {mutant.file}:{mutant.line}  {mutant.function}  {mutant.change}", flush=True)
    most = f", at most {asked.most} of a file" if asked.most is not None else ""
    score = score_of(results, f"all rules; of the others {asked.share:.0%}, by hash{most}")
    print(table(score))
    before = load()
    SCORE.write_text(json.dumps(merged(before, score), indent=1) + "\n")
    return 1 if newly_survived(score, before) else 0


sys.exit(main())
