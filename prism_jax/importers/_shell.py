"""The commands of a shell script with the values of its variables. Nothing is executed: what only a
run would tell, such as the output of a command, is a missing value.
"""

import dataclasses
import fnmatch
import itertools as it
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from ._arithmetic import arithmetic
from ._shell_tokens import HERE, NAME, Token, end_of, tokens


# A value that is missing stands as its name between these two, which no text file has.
_BEGIN, _END = "\ue000", "\ue001"
_MISSING = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
# Values may double from line to line, and scripts may read each other.
_MOST_LETTERS, _DEEPEST = 2**23, 8
_PLAIN = re.compile(r"[^\\\"'$`]+")
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}


def missing(text: str) -> list[str]:
    """The names of the variables without a value that a text stands for."""
    return _MISSING.findall(text)


def without_missing(text: str) -> str:
    """A text without what is missing in it."""
    return _MISSING.sub("", text)


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
    shell = _Shell(outer, source)
    shell.run(text)
    return shell.script


class _Shell:
    def __init__(
        self, outer: Sequence[Mapping[str, str]], source: Callable[[str], str | None]
    ) -> None:
        self.script = Script()
        self._outer, self._source = outer, source
        self._left, self._depth = _MOST_LETTERS, 0

    def run(self, text: str) -> None:
        if self._depth >= _DEEPEST:
            raise ValueError("scripts that read each other more than eight deep")
        self._depth += 1
        _Reading(self, [*tokens(text, self.script.comments)]).all()
        self._depth -= 1

    def assign(self, name: str, words: list[str], *, appends: bool, is_list: bool) -> None:
        old = self.script.variables.get(name, [])
        if appends:
            words = old + words if is_list else [("".join(old[:1])) + "".join(words), *old[1:]]
        self._count(words)
        self.script.variables[name] = words

    def _count(self, words: list[str]) -> None:
        self._left -= sum(map(len, words)) + len(words)
        if self._left < 0:
            raise ValueError("values of variables that grow beyond eight million letters")

    def value(self, name: str) -> list[str] | None:
        """The words of a variable, or `None` if it has no value."""
        words = self.script.variables.get(name)
        if words is None or (len(words) == 1 and _MISSING.fullmatch(words[0])):
            words = next(([table[name]] for table in self._outer if name in table), None)
        return words

    def number(self, text: str) -> str:
        """The value of an arithmetic expression, or what it misses."""
        text = self.text(text)
        try:
            return str(arithmetic(text, lambda name: "".join(self.value(name) or [])))
        except ValueError:
            names = (name for name in re.findall(NAME, text) if self.value(name) is None)
            name = next(iter(missing(text)), None) or next(names, f"(({text.strip()}))")
            return absent(name)

    def text(self, word: str) -> str:
        """A word with its variables, not split."""
        return " ".join(self.words([word], splits=False))

    def words(self, raw: Sequence[str], *, splits: bool = True) -> list[str]:
        """Words with the values of their variables, without quotation marks."""
        words = [part for word in raw for part in self._expanded(word, splits)]
        self._count(words)
        return words

    def _expanded(self, word: str, splits: bool) -> list[str]:
        parts: list[str] = []
        is_open = False  # Whether what follows belongs to the last part.

        def put(values: Sequence[str], quoted: bool) -> None:
            nonlocal is_open
            pieces = [*values]
            if not quoted and splits:
                value = " ".join(values)
                is_open &= not value[:1].isspace()
                pieces = value.split()
            for number, piece in enumerate(pieces):
                if number or not is_open:
                    parts.append("")
                parts[-1] += piece
                is_open = True
            if not quoted and splits and " ".join(values)[-1:].isspace():
                is_open = False

        i, in_quotes = 0, False
        while i < len(word):
            letter = word[i]
            if letter == "\\" and i + 1 < len(word):
                kept = (
                    word[i : i + 2] if in_quotes and word[i + 1] not in '"\\$`\n' else word[i + 1]
                )
                put([kept.strip("\n")], quoted=True)
                i += 2
            elif letter == '"':
                in_quotes = not in_quotes
                if in_quotes and not word.startswith("$", i + 1):
                    put([""], quoted=True)  # A word, even if nothing is in the quotation marks.
                i += 1
            elif letter == "'" and not in_quotes:
                stop = word.find("'", i + 1) % (len(word) + 1)
                put([word[i + 1 : stop]], quoted=True)
                i = stop + 1
            elif letter in "$`":
                values, i = self._parameter(word, i)
                put(values, in_quotes)
            else:
                text = _PLAIN.match(word, i)
                put([text[0] if text else letter], quoted=True)
                i += len(text[0]) if text else 1
        return parts

    def _parameter(self, word: str, i: int) -> tuple[list[str], int]:
        """The words that stand at `$` or a grave accent, and where the text goes on."""
        if word.startswith("$((", i):
            stop = end_of(word, i + 3, ")")
            return [self.number(word[i + 3 : stop])], stop + 2
        if word[i] == "`" or word.startswith("$(", i):
            start = i + (1 if word[i] == "`" else 2)
            stop = word.find("`", start) if word[i] == "`" else end_of(word, start, ")")
            if stop < 0:
                raise ValueError("a grave accent is not closed")
            return [self._output(word[start:stop])], stop + 1
        if word.startswith("${", i):
            stop = end_of(word, i + 2, "}")
            return self._in_braces(word[i + 2 : stop]), stop + 1
        match = re.compile(rf"\$({NAME}|\d|[@*#?$!-])").match(word, i)
        if match is None:
            return ["$"], i + 1
        return self._in_braces(match[1]), match.end()

    def _output(self, command: str) -> str:
        """What a command would print, of `cat` with a here-document, `echo` and `expr`."""
        match = re.match(r"\s*(echo|expr|cat)\b(?:\s+-[en]+\b)*((?:[^|;&<>]|\\.)*)$", command)
        if match and match[1] == "echo":
            return " ".join(self.words([match[2].strip()]))
        if match and match[1] == "expr":
            return self.number(match[2].replace("\\", ""))
        if match := re.match(
            rf"\s*cat\s+{HERE.pattern}\s*\n(.*?)\n?[ \t]*\2\s*$", command, re.DOTALL
        ):
            return match[3] if match[1] else self.text(_quoted(match[3]))
        return absent(f"({command.strip()[:40]})")

    def _in_braces(self, text: str) -> list[str]:
        match = re.fullmatch(
            rf"(#?)({NAME}|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*)|(.+))?",
            text,
            re.DOTALL,
        )
        if match is None:
            return [absent(text)]
        length, name, index, given, other, more = match.groups()
        words = self.value(name) or {"#": ["0"], "@": [], "*": []}.get(name)
        if words is not None and index not in (None, "@", "*"):
            at = self.number(index)
            words = (
                [words[int(at)]]
                if at.lstrip("-").isdigit() and -len(words) <= int(at) < len(words)
                else []
            )
        elif words is not None and index is None and name not in "@*":
            words = words[:1]
        has = words is not None and (any(words) or (given or "")[:1] != ":")
        if given and given[-1] in "-=" and not has:
            words = self.words([other], splits=False)
            if given[-1] == "=":
                self.assign(name, words, appends=False, is_list=False)
        elif given and given[-1] == "+":
            words = self.words([other], splits=False) if has else []
        if words is None:
            return [absent(name)]
        if length == "#":
            return [str(len(words) if index else len(words[0]))]
        return [absent(text)] if more else words

    def holds(self, words: Sequence[str]) -> bool:
        """Whether a condition is true: a test, or a command, which is taken to succeed."""
        if words[:1] == ["!"]:
            return not self.holds(words[1:])
        if len(words) == 1 and words[0].startswith("(("):
            return self.number(words[0][2:-2]) not in ("0", "")
        if not words or words[0] not in ("[", "[[", "test"):
            return bool(words) and words[0] not in ("false", "read", "command", "grep", "which")
        inner = [*words[1:]]
        if inner and inner[-1] in ("]", "]]"):
            inner.pop()
        for joint, join in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if joint in inner:
                at = [-1, *(i for i, word in enumerate(inner) if word == joint), len(inner)]
                parts = (inner[a + 1 : b] for a, b in it.pairwise(at))
                return join([self.holds(["[", *part]) for part in parts])
        if inner[:1] == ["!"]:
            return not self.holds(["[", *inner[1:]])
        operands = [without_missing(self.text(word)) for word in inner]
        return _tests(operands, inner)


def _tests(operands: list[str], raw: list[str]) -> bool:
    """A comparison of two words, or a property of one, in which what is missing is empty."""
    if len(operands) == 3:
        a, by, b = operands
        if by in ("=", "==", "!="):
            return (fnmatch.fnmatchcase(a, b) if '"' not in raw[2] else a == b) == (by != "!=")
        compare = {
            f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
        }
        numbers = all(re.fullmatch(r"(-?\d{1,18})?", word) for word in (a, b))
        return numbers and by in compare and compare[by](int(a or 0), int(b or 0))
    if len(operands) == 2:
        return (not operands[1]) if operands[0] == "-z" else bool(operands[1])
    return bool(operands and operands[0]) and operands[0] not in ("-n", "-f", "-d", "-z")


def absent(name: str) -> str:
    return f"{_BEGIN}{re.sub(f'[{_BEGIN}{_END}]', '', name)}{_END}"


def _quoted(text: str) -> str:
    """A here-document as a word in double quotes."""
    return '"' + text.replace('"', '\\"') + '"'


class _Block:
    """A branch or a loop: whether what surrounds it is run, whether one of its branches was, and
    whether this one is; for `case` also the word that is compared.
    """

    def __init__(self, outer: bool, runs: bool, word: str | None = None) -> None:
        self.outer, self.taken, self.runs, self.word = outer, runs, outer and runs, word
        self.at_pattern = word is not None

    def turn(self, condition: bool) -> None:
        """The next branch."""
        self.runs = self.outer and not self.taken and condition
        self.taken |= self.runs


class _Reading:
    """A script's tokens, command by command."""

    def __init__(self, shell: _Shell, tokens: list[Token]) -> None:
        self._shell, self._tokens, self._i = shell, tokens, 0
        self._blocks: list[_Block] = []

    @property
    def _runs(self) -> bool:
        return self._blocks[-1].runs if self._blocks else True

    def all(self) -> None:
        succeeded, joint = True, ""
        while self._i < len(self._tokens):
            if self._blocks and self._blocks[-1].at_pattern:
                self._pattern(self._blocks[-1])
                continue
            words, arrays, here, ends = self._command()
            if words and self._keyword(words):
                joint = ""
                continue
            if (words or arrays) and self._runs and joint in ("", "&&" if succeeded else "||"):
                self._simple(words, arrays, here)
                succeeded = self._shell.holds(words) if words else True
            joint = ends if ends in ("&&", "||") else ""

    def _pattern(self, block: _Block) -> None:
        """A pattern of `case`, up to its bracket."""
        patterns: list[str] = []
        while self._i < len(self._tokens):
            kind, text = self._tokens[self._i]
            self._i += 1
            if (kind, text) == ("word", "esac"):
                self._blocks.pop()
                return
            if (kind, text) == ("operator", ")"):
                break
            if kind == "word":
                patterns.append(self._shell.text(text))
        word = block.word or ""
        block.turn(any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns))
        block.at_pattern = False

    def _command(self) -> tuple[list[str], dict[str, list[str]], str | None, str]:
        """The raw words up to the next operator, lists that are assigned, a here-document, and the
        operator.
        """
        words: list[str] = []
        arrays: dict[str, list[str]] = {}
        here = None
        while self._i < len(self._tokens):
            kind, text = self._tokens[self._i]
            self._i += 1
            if kind == "array":
                arrays[text] = self._list()
            elif kind == "word":
                words.append(text)
                is_test = words[0] in ("[[", "if", "elif", "while") and "[[" in words
                while is_test and self._i < len(self._tokens) and words[-1] != "]]":
                    words.append(self._tokens[self._i].text)
                    self._i += 1
                if text in ("then", "else", "do", "{", "in") and self._is_key(words):
                    return words, arrays, here, ""
            elif kind == "operator" and re.match(r"\d?[<>]|&>", text):
                if not re.search(r"&(\d|-)$", text):  # The file that it is written to.
                    self._i += 1
            elif kind == "operator" and text == "(" and words:
                self._i += 1  # The other bracket of a function.
            elif kind == "operator" and text == ")" and words[:1] == ["("]:
                continue
            elif kind == "operator":
                while self._i < len(self._tokens) and self._tokens[self._i].kind.endswith("here"):
                    kind, body = self._tokens[self._i]
                    here = body if kind == "plain here" else self._shell.text(_quoted(body))
                    self._i += 1
                if text == ";;" and self._blocks and self._blocks[-1].word is not None:
                    self._blocks[-1].at_pattern = True
                return words, arrays, here, text
        return words, arrays, here, "\n"

    def _is_key(self, words: list[str]) -> bool:
        return len(words) == 1 or words[0] in ("case", "function") or words[-1] == "{"

    def _list(self) -> list[str]:
        raw: list[str] = []
        while self._i < len(self._tokens):
            kind, text = self._tokens[self._i]
            self._i += 1
            if (kind, text) == ("operator", ")"):
                break
            if kind == "word":
                raw.append(text)
        return raw if self._runs else []

    def _keyword(self, words: list[str]) -> bool:
        """Whether a command begins or ends a branch, and does so."""
        first, blocks = words[0], self._blocks
        if first in ("if", "while", "until", "elif"):
            holds = self._runs or first == "elif"
            holds = holds and self._condition(words[1:], ends="do" if first[0] in "wu" else "then")
            if first == "elif" and blocks:
                blocks[-1].turn(holds)
            else:
                blocks.append(_Block(self._runs, holds != (first == "until")))
        elif first == "for":
            values = self._shell.words(words[3:]) if self._runs and words[2:3] == ["in"] else []
            if self._runs and values and len(words) > 1:
                self._shell.assign(words[1], values[:1], appends=False, is_list=False)
            blocks.append(_Block(self._runs, bool(values)))
        elif first == "case":
            word = self._shell.text(words[1]) if len(words) > 1 and self._runs else ""
            blocks.append(_Block(self._runs, False, without_missing(word)))
        elif first == "else" and blocks:
            blocks[-1].turn(True)
        elif first in ("fi", "done", "}", "esac"):
            if blocks:
                blocks.pop()
        elif words[-1] == "{":
            blocks.append(_Block(self._runs, True))
        elif first not in ("then", "do"):
            return False
        return True

    def _condition(self, words: list[str], ends: str) -> bool:
        """Whether a list of commands up to `then` or `do` succeeds."""
        value, joint = True, ""
        operator = ";"
        # The operator that ended the first command was read with it.
        operator = self._tokens[self._i - 1].text
        while True:
            if words and joint in ("", "&&" if value else "||"):
                value = self._shell.holds(words)
            joint = operator if operator in ("&&", "||") else ""
            if self._i >= len(self._tokens) or self._tokens[self._i].text in (ends, "fi", "done"):
                return value
            words, _, _, operator = self._command()
            if words[:1] == [ends]:
                return value

    def _simple(self, words: list[str], arrays: dict[str, list[str]], here: str | None) -> None:
        shell = self._shell
        for name, raw in arrays.items():
            values, appends = shell.words(raw), name.endswith("+=")
            shell.assign(name.rstrip("+="), values, appends=appends, is_list=True)
        while words and words[0] in _DECLARES:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (match := re.match(rf"({NAME})(\+?)=", words[0])):
            value = [shell.text(words[0][match.end() :])]
            shell.assign(match[1], value, appends=bool(match[2]), is_list=False)
            words = words[1:]
        if not words:
            return
        if words[0] == "unset":
            for name in words[1:]:
                shell.script.variables.pop(name, None)
        elif words[0] == "read" and here is not None:
            shell.assign(words[-1], [here], appends=False, is_list=False)
        elif words[0] in ("source", ".") and len(words) > 1:
            name = shell.text(words[1])
            text = shell._source(name)
            if text is None:
                shell.script.wanted.append(without_missing(name))
            else:
                shell.run(text)
        else:
            self._command_of(shell.words(words), here)

    def _command_of(self, words: list[str], here: str | None) -> None:
        """A command, or the script that it has a shell run."""
        shell = self._shell
        if words[:1] == ["eval"]:
            shell.run(" ".join(words[1:]))
        elif "-c" in words[:-1] and any(re.search(r"(^|/)(ba|z)?sh$", word) for word in words):
            at = words.index("-c")
            shell.script.commands.append(words[:at])
            shell.run(words[at + 1])
        elif here is not None and words and re.search(r"(^|/)(sbatch|bash|sh)$", words[0]):
            shell.run(here)
        elif words:
            shell.script.commands.append(words)
