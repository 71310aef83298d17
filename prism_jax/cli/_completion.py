"""Completion in a shell, by shtab: commands, options, and the names of what is shipped."""

import argparse
from collections.abc import Mapping

from .._installed import needed
from ..data import list_names


# What is shipped of the kind that the word for a value says.
_KINDS = {"JOB": "job", "CLUSTER": "cluster", "MODEL": "model", "FAILURES": "count of failures"}
# A function for each of these words: with files, because each may also be one.
_FUNCTIONS = {
    "bash": '_prism_jax_{word}() {{\n    compgen -W "{names}" -- "$1"; compgen -f -- "$1"\n}}',
    "zsh": "_prism_jax_{word}() {{\n    compadd {names}; _files\n}}",
}


def completion_script(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], shell: str
) -> str:
    """The script with which a shell completes the words of the commands of a parser.

    **Raises:**

    `ImportError` of one sentence if shtab is not installed.
    """
    shtab = needed("shtab")
    names = {word: " ".join(list_names(kind)) for word, kind in _KINDS.items()}
    for action in (action for command in commands.values() for action in command._actions):
        word = str(action.metavar)
        if word in names:
            functions = dict.fromkeys(_FUNCTIONS, f"_prism_jax_{word}")
            action.complete = functions | {"tcsh": f"({names[word]})"}  # pyright: ignore
        elif (
            "=" not in word
            and action.nargs != 0
            and action.choices is None
            and action.type in (None, str)
        ):
            action.complete = shtab.FILE  # pyright: ignore
    preamble = {
        shell: "\n".join(text.format(word=word, names=names[word]) for word in names)
        for shell, text in _FUNCTIONS.items()
    }
    return shtab.complete(parser, shell, preamble=preamble)
