"""`v41 bench CASE`: runs a bench. Its lines come as it goes; its figures are kept in a file, or with --json printed.

    v41 bench head                 lines to stdout; the file in tools/bench/results/, or where --out says
    v41 bench head --json          what would be in the file to stdout, and nothing else; lines to stderr
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from v41.tools.bench.timing import RESULTS
from v41.tools.files import check_file

STDOUT, STDERR = 1, 2  # of this process and those that it starts


def bench_command(arguments: Namespace) -> int:
    """The exit code of the case. FileNotWritten now, and not after minutes, where its file cannot be written."""
    case = import_module(f"v41.tools.bench.{arguments.case}")
    if not arguments.json:
        check_file(arguments.out or RESULTS / f"{arguments.case}.json")
        return int(case.bench_command(arguments))
    with TemporaryDirectory() as folder:
        arguments.out = Path(folder, "printed-to-stdout.json")  # as the last line on stderr says
        with lines_on_stderr():
            code = int(case.bench_command(arguments))
        if arguments.out.exists():  # of ranks the first alone writes it
            print(arguments.out.read_text(encoding="utf-8"), end="")
    return code


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """What is printed meanwhile goes to stderr, also that of processes started meanwhile."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    try:
        os.dup2(STDERR, STDOUT)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)
