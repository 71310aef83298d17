"""The commands of a shell script with the values of its variables. Nothing is executed: what only a
run would tell, such as the output of a command, is a missing value.
"""

import dataclasses
import fnmatch
import itertools as it
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from ._shell_tokens import NAME, tokens
from ._shell_words import Variables, without_missing


# Scripts may read each other.
_DEEPEST = 8
_ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_OPENS = ("if", "while", "until", "case", "{")
_TURNS = ("then", "do", "elif", "else")
_CLOSES = ("fi", "done", "esac", "}")
_KEYWORDS = {*_OPENS, *_TURNS, *_CLOSES, "!", "function"}
# These fail, where all others are taken to succeed.
_FAIL = ("false", "read", "command", "grep", "which")
_COMPARE = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@dataclasses.dataclass
class Script:
    """What a script would run.

    **Attributes:**

    - `commands`: the words of each command, in their order.
    - `variables`: the words of each variable at the end; one that is no list has one.
    - `comments`: its lines that begin with `#`.
    - `wanted`: the files that it reads and that are not at hand.
    """

    commands: list[list[str]] = dataclasses.field(default_factory=list)
    variables: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    comments: list[str] = dataclasses.field(default_factory=list)
    wanted: list[str] = dataclasses.field(default_factory=list)


def run_script(
    text: str,
    outer: Sequence[Mapping[str, str]] = (),
    source: Callable[[str], str | None] = lambda name: None,
) -> Script:
    """Reads a script as a shell does, of whose branches only those are taken whose conditions hold.

    A command is taken to succeed, a file to exist; a loop goes once, over its first word; and what
    a function would do is done where it stands.

    **Arguments:**

    - `text`: the script.
    - `outer`: tables of values of variables that it does not assign, the first that has one counts.
    - `source`: the text of a file that the script reads, by its name.

    **Raises:**

    A `ValueError` of one clause if it cannot be split into words.
    """
    script = Script()
    _Run(script, Variables(script.variables, outer), source).run(text)
    return script


@dataclasses.dataclass
class _Block:
    """What is between two keywords: whether what surrounds it is run, and this is; whether another
    branch was; and for `case` the word that is compared.
    """

    outer: bool
    runs: bool
    taken: bool = False
    is_until: bool = False
    word: str | None = None

    def turn(self, condition: bool) -> None:
        """The next branch."""
        self.runs = self.outer and not self.taken and condition
        self.taken |= self.runs


@dataclasses.dataclass
class _Run:
    """A script, command by command.

    **Attributes:**

    - `script`: what is made of it.
    - `variables`: its variables.
    - `source`: as in `run_script`.
    - `depth`: how many scripts read each other.
    - `blocks`: those that the next command is in.
    - `succeeded`, `joint`: whether the last command succeeded, and the operator after it.
    - `negated`: whether the next command is to fail.
    """

    script: Script
    variables: Variables
    source: Callable[[str], str | None]
    depth: int = 1
    blocks: list[_Block] = dataclasses.field(default_factory=list)
    succeeded: bool = True
    joint: str = ""
    negated: bool = False

    def run(self, text: str) -> None:
        if self.depth > _DEEPEST:
            raise ValueError("scripts that read each other more than eight deep")
        self._tokens = tokens(text, self.script.comments)
        words: list[str] = []
        here = ""
        for kind, part in self._tokens:
            if kind == "here":
                here = part
            elif kind == "array":
                raw = self._until(")")
                if self._goes:
                    self._assign(part, self.variables.words(raw), is_list=True)
                    self.succeeded = True
            elif kind == "word" and not words and part in _KEYWORDS:
                self._keyword(part)
            elif kind == "word":
                words.append(part)
                if words == ["[["]:  # Operators within it are its own.
                    words += self._until("]]", kinds=("word", "operator"))
            elif re.match(r"\d?[<>]|&>", part):
                if not re.search(r"&(\d|-)$", part):  # The file that it is written to.
                    next(self._tokens, None)
            elif part == "(" and words:  # The name of a function.
                next(self._tokens, None)
                words = []
            else:
                self._command(words, here)
                if words or part != "\n":
                    self.joint = part if part in ("&&", "||") else ""
                words, here = [], here if part == "|" else ""
                if part == ";;" and self.blocks and self.blocks[-1].word is not None:
                    self._pattern(self.blocks[-1])

    @property
    def _goes(self) -> bool:
        """Whether the next command is run."""
        runs = self.blocks[-1].runs if self.blocks else True
        return runs and self.joint in ("", "&&" if self.succeeded else "||")

    def _until(self, stop: str, kinds: Sequence[str] = ("word",)) -> list[str]:
        """The words up to another one, or to an operator."""
        before = it.takewhile(lambda token: token.text != stop, self._tokens)
        return [text for kind, text in before if kind in kinds]

    def _assign(self, name: str, words: list[str], *, is_list: bool = False) -> None:
        name, appends = name.rstrip("+="), name.endswith("+=")
        self.variables.assign(name, words, appends=appends, is_list=is_list)

    def _keyword(self, word: str) -> None:
        blocks = self.blocks
        if word == "!":
            self.negated = True
            return
        if word == "function":
            next(self._tokens, None)
        elif word in _OPENS:
            goes = self._goes
            block = _Block(goes, goes, taken=word == "{", is_until=word == "until")
            blocks.append(block)
            if word == "case":
                compared = "".join(self._until("in")[:1])
                block.word = without_missing(self.variables.text(compared)) if block.runs else ""
                self._pattern(block)
        elif blocks and word in _CLOSES:
            block = blocks.pop()
            self.succeeded |= block.outer and not block.taken
        elif blocks and word == "elif":
            blocks[-1].runs = blocks[-1].outer and not blocks[-1].taken
        elif blocks:
            blocks[-1].turn(word == "else" or self.succeeded != blocks[-1].is_until)
        self.joint = ""

    def _pattern(self, block: _Block) -> None:
        """A pattern of `case`, up to its bracket."""
        patterns: list[str] = []
        for kind, text in self._tokens:
            if text == "esac":
                self.blocks.pop()
                return
            if text == ")":
                break
            if kind == "word":
                patterns.append(self.variables.text(text))
        block.turn(any(fnmatch.fnmatchcase(block.word or "", pattern) for pattern in patterns))

    def _command(self, words: list[str], here: str) -> None:
        """Runs a command, if it is to be run, with a here-document as a word."""
        if words[:1] == ["for"]:
            self.blocks.append(_Block(self._goes, self._goes))
            if self._goes:
                listed = self.variables.words(words[3:] if words[2:3] == ["in"] else [])
                self.succeeded = bool(listed)
                if listed:
                    self._assign(words[1], listed[:1])
        elif words and self._goes:
            self.succeeded = self._simple(words, here) != self.negated
        self.negated = False

    def _simple(self, words: list[str], here: str) -> bool:
        """Whether a command succeeds that is no keyword."""
        variables = self.variables
        declares = words[0] in _DECLARES
        while words and (declares or _ASSIGNMENT.match(words[0])):
            if match := _ASSIGNMENT.match(words[0]):
                self._assign(match[0], [variables.text(words[0][match.end() :])])
            words = words[1:]
        if not words:
            return True
        if words[0].startswith("((") and len(words) == 1:
            return variables.number(words[0][2:-2]) not in ("0", "")
        if words[0] in ("[", "[[", "test"):
            return self._holds(words[1 : -1 if words[-1] in ("]", "]]") else None])
        if words[0] == "unset":
            for name in words[1:]:
                self.script.variables.pop(name, None)
        elif words[0] == "read" and here:
            self._assign(words[-1], [variables.text(here).strip()])
        elif words[0] in ("source", ".") and len(words) > 1:
            name = variables.text(words[1])
            text = self.source(name)
            if text is None:
                self.script.wanted.append(without_missing(name))
            else:
                self._inner(text)
        else:
            self._program(variables.words(words), here)
        return words[0] not in _FAIL

    def _program(self, words: list[str], here: str) -> None:
        """A program that is run, or the script that it has a shell run."""
        if words[:1] == ["eval"]:
            self._inner(" ".join(words[1:]))
        elif "-c" in words[:-1] and any(re.search(r"(^|/)(ba|z)?sh$", word) for word in words):
            at = words.index("-c")
            self.script.commands.append(words[:at])
            self._inner(words[at + 1])
        elif here and words and re.search(r"(^|/)(sbatch|bash|sh)$", words[0]):
            self._inner(self.variables.text(here))
        elif words:
            self.script.commands.append(words)

    def _inner(self, text: str) -> None:
        _Run(self.script, self.variables, self.source, self.depth + 1).run(text)

    def _holds(self, words: list[str]) -> bool:
        """Whether a test is true: a comparison of two words, or a property of one, in which what is
        missing is empty.
        """
        for joint, join in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if joint in words:
                at = [-1, *(i for i, word in enumerate(words) if word == joint), len(words)]
                return join([self._holds(words[a + 1 : b]) for a, b in it.pairwise(at)])
        if words[:1] == ["!"]:
            return not self._holds(words[1:])
        match [without_missing(self.variables.text(word)) for word in words]:
            case [a, "=" | "==" | "!=" as by, b]:
                is_equal = fnmatch.fnmatchcase(a, b) if '"' not in words[2] else a == b
                return is_equal == (by != "!=")
            case [a, by, b]:
                numbers = all(re.fullmatch(r"(-?\d{1,18})?", word) for word in (a, b))
                return numbers and by in _COMPARE and _COMPARE[by](int(a or 0), int(b or 0))
            case ["-z", a]:
                return not a
            case [_, a]:
                return bool(a)
            case [a, *_]:
                return a not in ("", "-n", "-f", "-d", "-z")
        return False
