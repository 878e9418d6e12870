"""`v41 completion SHELL`: what a shell needs to complete commands and options, as text for `eval`.

    eval "$(v41 completion bash)"      also zsh; `v41 completion fish | source`

Made of the parser itself, so it knows every command, every option and what an option takes where that is one of a few
words. Presets are offered where a model is named; files are completed where nothing fits. With --json, what may follow
which words, for a shell or an editor that is none of these.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from v41.tools.json_output import print_json

SHELLS = ("bash", "zsh", "fish")
MODELS = ("tiny", "bench", "flash")  # named here, for all that knows presets imports torch
Words = dict[tuple[str, ...], dict[str, str]]
Values = dict[tuple[str, ...], dict[str, list[str]]]


def completion_command(arguments: Namespace) -> int:
    from v41.tools.cli import parser

    made = parser()
    if arguments.json:
        found, taken = commands(made), values(made)
        after = [{"after": " ".join(path), "words": words, "values": taken[path]} for path, words in found.items()]
        print_json("completion", {"shell": arguments.shell, "completions": after})
    else:
        print(script(made, arguments.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    found, taken = commands(parser), values(parser)
    return "\n".join(fish(found, taken) if shell == "fish" else [*zsh(shell), *bash(found, taken)])


def values(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Values:
    """Words typed so far -> option -> the words that it takes; none where it takes any, so that files are offered and
    no other option."""
    found: Values = {path: {}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= values(inner, (*path, name))
        words = MODELS if action.dest == "model" else action.choices or ()
        if action.nargs != 0:
            found[path] |= {option: [*map(str, words)] for option in action.option_strings}
    return found


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Words:
    """Words typed so far -> words that may follow, with what they say."""
    found: Words = {path: {}}
    for action in parser._actions:
        shown = action.help if action.help not in (None, argparse.SUPPRESS) else ""
        if isinstance(action, argparse._SubParsersAction):
            helped = {each.dest: each.help or "" for each in action._choices_actions}
            for name, inner in action.choices.items():
                found[path][name] = helped.get(name, "")
                found |= commands(inner, (*path, name))
        for word in (*action.option_strings, *(map(str, action.choices or ()) if not action.option_strings else ())):
            found[path].setdefault(word, str(shown))
        if action.dest == "model" and not action.option_strings:
            found[path] |= dict.fromkeys(MODELS, "a preset")
    return found


def bash(found: Words, taken: Values) -> Iterator[str]:
    yield "_v41() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" path="${COMP_WORDS[1]}" words'
    yield '  [[ "$path" == bench && COMP_CWORD -gt 2 ]] && path="bench ${COMP_WORDS[2]}"'
    yield '  [[ COMP_CWORD -eq 1 ]] && path=""'
    yield '  [[ "$path" == bench && COMP_CWORD -eq 2 ]] && path="bench"'
    yield '  case "$path" in'
    for path, words in found.items():
        yield f'    "{" ".join(path)}") words="{" ".join(words)}" ;;'
    yield "  esac"
    yield '  case "$path ${COMP_WORDS[COMP_CWORD-1]}" in'
    for path, options in taken.items():
        for option, some in options.items():
            yield f'    "{" ".join((*path, option))}") words="{" ".join(some)}" ;;'
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -o default -F _v41 v41"


def zsh(shell: str) -> list[str]:
    """zsh runs bash's completions once it is told to."""
    return ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []


def fish(found: Words, taken: Values) -> Iterator[str]:
    for path, words in found.items():
        typed = [f'test "$typed[{at}]" = {word}' for at, word in enumerate(path, 2)]  # bench may be a preset as well
        when = "; and ".join(["set -l typed (commandline -opc)", *typed]) if path else "__fish_use_subcommand"
        for word, told in words.items():
            said = told.replace("'", "\\'").replace("%%", "%")
            some = taken[path].get(word)
            takes = f" -x -a '{' '.join(some)}'" if some else " -r" if some is not None else ""
            yield f"complete -c v41 -n '{when}' {_flag(word)}{takes} -d '{said}'"


def _flag(word: str) -> str:
    """How fish calls a word of the command line."""
    if word.startswith("--"):
        return f"-l {word[2:]}"
    return f"-s {word[1:]}" if word.startswith("-") else f"-a {word}"
