import argparse

from ..data import list_clusters, list_failures, list_jobs
from ._options import Given, Output, argument, command


_BEFORE = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"}
_SCRIPT = """\
_prism_jax() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
        *)
            case "${{COMP_WORDS[1]}}" in
{options}
            esac
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _prism_jax prism-jax
"""


@command("bash", argument("shell", "the shell", choices=tuple(_BEFORE)))
def run(given: Given) -> Output:
    """Print a script with which bash or zsh completes commands, options, jobs and clusters."""
    script = _script()
    shell = given.shell
    how = f'# Put this line into ~/.{shell}rc: eval "$(prism-jax completion {shell})"\n'
    script = f"{how}{_BEFORE[shell]}{script}".rstrip()
    return Output({"shell": shell, "script": script}, [script])


def _script() -> str:
    """The function for bash, which zsh runs too. If it knows no word, it completes file names."""
    from ._main import make_parser, options_of

    _, commands = make_parser()
    options, values = [], []
    for name, parser in commands.items():
        known = options_of(parser)
        positional = [_words(action) for action in parser._actions if not action.option_strings]
        words = " ".join([*known, *filter(None, positional)])
        options.append(f'            {name}) words="{words}" ;;')
        for option, action in known.items():
            if action.nargs != 0:
                values.append(f'        {name}:{option}) words="{_words(action)}" ;;')
    return _SCRIPT.format(
        commands=" ".join(commands), options="\n".join(options), values="\n".join(values)
    )


def _words(action: argparse.Action) -> str:
    """The values of an argument that have names."""
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    names = {"JOB": list_jobs, "CLUSTER": list_clusters, "FAILURES": list_failures}
    listed = names.get(str(action.metavar))
    return " ".join(listed()) if listed is not None else ""
