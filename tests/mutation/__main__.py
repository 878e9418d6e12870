"""python -m tests.mutation: breaks guards of the passes one at a time, and says what no test noticed.

Exits with 1 where a mutant survives that was killed in score.json. What it finds is written there when all files ran.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.mutation.score import ROOT, SCORE, drawn, load, newly_survived, reach, run, score_of, sources_of, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("only", nargs="*", help="words in the names of files; all files of passes where there are none")
    parser.add_argument("--share", type=float, default=0.06, help="of the mutants that are no rules, drawn by hash")
    asked = parser.parse_args()
    import torch  # noqa: F401  (children are forks: what is loaded here is loaded once)

    sources = sources_of(ROOT, asked.only)
    reached, results = reach(ROOT, sources), []
    for mutant, outcome in run(ROOT, drawn(ROOT, sources, asked.share), reached):
        results.append((mutant, outcome))
        if outcome.told in ("survived", "timeout"):
            print(f"{outcome.told}  {mutant.file}:{mutant.line}  {mutant.function}  {mutant.change}", flush=True)
    score = score_of(results, asked.share)
    print(table(score))
    new = newly_survived(score, load())
    if not asked.only:
        SCORE.write_text(json.dumps(score, indent=1) + "\n")
    return 1 if new else 0


sys.exit(main())
