"""parser: argparse that answers a mistyped word with the nearest, and whose help ends in examples.

    v41 insepct                 invalid choice: 'insepct' (choose from ...); the nearest is inspect
    v41 cost --tokns 16         unrecognized arguments: --tokns 16; the nearest is --tokens

Nothing heavy is imported here or for it: help comes at once.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from v41.tools.nearest import nearest

EXAMPLES = {  # command -> what one types, and what for; None: of all commands
    None: [
        ("v41 capture flash -o run/", "all 40 layers, without weights or a GPU, once"),
        ("v41 inspect run/", "what each layer became: regions, pieces, decisions"),
        ("v41 cost run/ --tokens 1,128,4096", "bytes, operations and the least time of three steps"),
        ("v41 explain sinkhorn_1/div_7 -m run/", "one node: its line, its passes, its piece, its kernel"),
        ("v41 why-not fold_sinkhorn -m my_model:make", "your model, a function that returns (model, inputs)"),
        ("v41 bisect python check.py", "the pass with which your check begins to fail"),
    ],
    "capture": [
        ("v41 capture flash -o run/", "the whole released model, from its sizes alone"),
        ("v41 capture flash --layers 3 -o run/", "its first three layers"),
        ("v41 capture my_model:make -o run/", "make() of my_model.py returns (model, inputs)"),
    ],
    "inspect": [
        ("v41 inspect run/", "every layer with its regions, then passes, pieces, options"),
        ("v41 inspect tiny --against run/", "the layers that differ from a run kept before; exit code 1"),
        ("v41 inspect run/ --strict", "for CI: exit code 1 where an expected rewrite did not fire"),
    ],
    "cost": [("v41 cost run/ --tokens 16 --gpu B200", "a decode step of 16 rows on another GPU")],
    "partition": [("v41 partition run/", "why each piece begins where it does")],
    "memory": [("v41 memory run/ --tokens 64,8192 --context 32768", "a decode step far into a text, and a prefill")],
    "timeline": [("v41 timeline flash --rows 16 --trace step.json", "a step of 16 rows, for ui.perfetto.dev")],
    "explain": [
        ("v41 explain mhc_boundary_3 -m run/", "a region: attributes, pass, the lines it holds"),
        ("v41 explain mhc.py:66 -m run/", "what came of a line of the model"),
    ],
    "passes": [("v41 passes run/ --strict", "for CI: exit code 1 where a pass failed, or refused what has a hint")],
    "why-not": [
        ("v41 why-not outline_mhc -m run/", "all refused sites, else the nearest miss"),
        ("v41 why-not outline_mhc NODE -m run/", "one of them, by the name that shows"),
    ],
    "diff": [("v41 diff outline_gate -m run/ --all", "every node that a pass added, moved or took away")],
    "kernels": [
        ("v41 kernels run/ --arch sm_90", "registers and spills on a Hopper that need not be here"),
        ("v41 kernels run/ --show moe_gate", "the text of one, by the beginning of its name"),
    ],
    "verify": [("v41 verify tiny --layers 2", "all passes over two layers, values compared bit for bit")],
    "bisect": [("v41 bisect pytest -x tests/test_mine.py", "any command that exits with 0 where all is well")],
    "generate": [("v41 generate --compare-eager", "read and write with the compiled model, held to eager")],
    "bench": [("v41 bench compile --layers 10", "what capturing the first ten layers costs; this one needs no GPU")],
    "completion": [('eval "$(v41 completion bash)"', "for this shell; in ~/.bashrc for all")],
}


class Parser(argparse.ArgumentParser):
    """Like its parent, and see above."""

    def format_help(self) -> str:
        command = self.prog.partition(" ")[2] or None
        lines = EXAMPLES.get(command, [])
        width = max((len(line) for line, _ in lines), default=0)
        told = "".join(f"  {line:{width}}  {what}\n" for line, what in lines)
        return super().format_help() + (f"\nexamples:\n{told}" if told else "")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, strange = self.parse_known_args(args, namespace)
        if getattr(found, "site", "given") is None and len(strange) == 1 and not strange[0].startswith("-"):
            found.site = strange.pop()  # PASS -m run/ SITE: argparse looks for SITE right behind PASS alone
        if strange:
            (within,) = [self] if not hasattr(found, "command") else [self.of(found.command)]
            within.error(f"unrecognized arguments: {' '.join(strange)}")
        return found

    def of(self, command: str) -> argparse.ArgumentParser:
        """The parser of a subcommand."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return next((action.choices[command] for action in actions if command in action.choices), self)

    def error(self, message: str) -> NoReturn:
        told = re.search(r"invalid choice: '([^']*)' \(choose from (.+)\)", message)
        strange = re.search(r"unrecognized arguments: (--?[\w-]+)", message)
        near = None
        if told is not None:
            near = nearest(told[1], re.findall(r"[\w.-]+", told[2]))
        elif strange is not None:
            near = nearest(strange[1], self._option_string_actions)
        from v41.tools.tables import WIDTH, fitted

        start = f"{self.prog}: error: "
        whole = f"{start}{message}" + (f"; the nearest is {near}" if near is not None else "")
        super().error("\n".join(fitted(whole, WIDTH)).removeprefix(start))
