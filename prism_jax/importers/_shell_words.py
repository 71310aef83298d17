"""The words of a shell with the values of their variables."""

import itertools as it
import re
from collections.abc import Mapping, Sequence

from ._arithmetic import arithmetic
from ._shell_tokens import NAME, end_of, tokens


# A value that is missing stands as its name between the first two, which no text file has; words
# are between the third, and the last is within each that stays if it is empty.
_BEGIN, _END, _BREAK, _KEPT = "\ue000", "\ue001", "\ue002", "\ue003"
_MISSING = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
# Values may double from line to line.
_MOST_LETTERS = 2**23
_PLAIN = re.compile(r"[^\\\"'$`]+")
_PARAMETER = re.compile(rf"\$({NAME}|\d|[@*#?$!-])")
_BRACES = re.compile(
    rf"(#?)({NAME}|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(?:(:?)([-=+?])(.*)|(.+))?", re.DOTALL
)


def missing(text: str) -> list[str]:
    """The names of the variables without a value that a text stands for."""
    return _MISSING.findall(text)


def without_missing(text: str) -> str:
    """A text without what is missing in it."""
    return _MISSING.sub("", text)


def absent(name: str) -> str:
    """What stands for the value of a variable without one."""
    return f"{_BEGIN}{re.sub(f'[{_BEGIN}{_END}]', '', name)}{_END}"


class Variables:
    """The variables of a script, by whose values words are expanded.

    **Attributes:**

    - `assigned`: the words of each variable; one that is no list has one.
    - `outer`: tables of values of others, the first that has one counts.
    """

    def __init__(self, assigned: dict[str, list[str]], outer: Sequence[Mapping[str, str]]) -> None:
        self.assigned, self.outer = assigned, outer
        self._left = _MOST_LETTERS

    def assign(self, name: str, words: list[str], *, appends: bool, is_list: bool) -> None:
        old = self.assigned.get(name, [])
        if appends:
            words = old + words if is_list else [("".join(old[:1])) + "".join(words), *old[1:]]
        self._count(words)
        self.assigned[name] = words

    def _count(self, words: list[str]) -> None:
        self._left -= sum(map(len, words)) + len(words)
        if self._left < 0:
            raise ValueError("values of variables that grow beyond eight million letters")

    def value(self, name: str) -> list[str] | None:
        """The words of a variable, or `None` if it has no value."""
        words = self.assigned.get(name)
        if words is None or (len(words) == 1 and _MISSING.fullmatch(words[0])):
            words = next(([table[name]] for table in self.outer if name in table), None)
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
        marked = (part for word in raw for part in self._marked(word, splits).split(_BREAK))
        words = [part.replace(_KEPT, "") for part in marked if part]
        self._count(words)
        return words

    def _marked(self, word: str, splits: bool) -> str:
        """What becomes of a word, with marks between and within those that it is split into."""
        marked, i, in_quotes = "", 0, False
        while i < len(word):
            letter, after = word[i], word[i + 1 : i + 2]
            if letter in "$`":
                values, i = self._parameter(word, i)
                if in_quotes or not splits:
                    marked += _BREAK.join(_KEPT + value for value in values)
                else:
                    marked += re.sub(r"\s+", _BREAK, " ".join(values))
                continue
            stop, text = i + 1, letter
            if letter == "\\" and after:
                stop, text = i + 2, after.strip("\n")
                if in_quotes and after not in '"\\$`\n':
                    text = letter + after
            elif letter == '"':
                in_quotes = not in_quotes
                # A word, even if nothing is in the quotation marks.
                text = _KEPT if in_quotes and after != "$" else ""
            elif letter == "'" and not in_quotes:
                stop = word.find("'", i + 1) % (len(word) + 1) + 1
                text = _KEPT + word[i + 1 : stop - 1]
            elif plain := _PLAIN.match(word, i):
                stop, text = plain.end(), plain[0]
            marked, i = marked + text, stop
        return marked

    def _parameter(self, word: str, i: int) -> tuple[list[str], int]:
        """The words that stand at `$` or a grave accent, and where the text goes on."""
        if word.startswith("$((", i):
            stop = end_of(word, i + 3, ")")
            return [self.number(word[i + 3 : stop])], stop + 2
        if word.startswith("${", i):
            stop = end_of(word, i + 2, "}")
            return self._in_braces(word[i + 2 : stop]), stop + 1
        if word[i] == "`" or word.startswith("$(", i):
            start, closes = (i + 1, "`") if word[i] == "`" else (i + 2, ")")
            stop = end_of(word, start, closes)
            return [self._output(word[start:stop])], stop + 1
        match = _PARAMETER.match(word, i)
        return (self._in_braces(match[1]), match.end()) if match else (["$"], i + 1)

    def _output(self, command: str) -> str:
        """What a command would print, of `cat` with a here-document, `echo` and `expr`."""
        parts = [*tokens(command, [])] if re.match(r"\s*(echo|expr|cat)\b", command) else []
        words = [text for kind, text in parts if kind == "word"]
        here = [text for kind, text in parts if kind == "here"]
        if not any(kind == "operator" and text != "\n" for kind, text in parts):
            match words:
                case ["cat"] if here:
                    return self.text(here[0]).removesuffix("\n")
                case ["echo", *_]:
                    echoed = it.dropwhile(re.compile("-[en]+$").match, words[1:])
                    return " ".join(self.words([*echoed]))
                case ["expr", *_]:
                    return self.number(" ".join(words[1:]).replace("\\", ""))
        return absent(f"({command.strip()[:40]})")

    def _in_braces(self, text: str) -> list[str]:
        """The words of `${name}`, with an index, another value, or a length; `${!name}` names the
        variable that is meant.
        """
        if text.startswith("!"):
            meant = self.text(f"${{{text[1:]}}}") if re.fullmatch(NAME, text[1:]) else text
            return self._in_braces(meant) if re.fullmatch(NAME, meant) else [absent(meant)]
        match = _BRACES.fullmatch(text)
        if match is None:
            return [absent(text)]
        length, name, index, or_empty, operation, default, more = match.groups()
        words = self.value(name)
        if words is None:
            words = {"#": ["0"], "@": [], "*": []}.get(name)
        elif index is None and name not in "@*":
            words = words[:1]
        elif index not in (None, "@", "*"):
            at = self.number(index)
            is_argument = at.lstrip("-").isdigit() and -len(words) <= int(at) < len(words)
            words = [words[int(at)]] if is_argument else []
        has = words is not None and (any(words) or not or_empty)
        if operation == "+":
            words = self.words([default], splits=False) if has else []
        elif operation in ("-", "=") and not has:
            words = self.words([default], splits=False)
            if operation == "=":
                self.assign(name, words, appends=False, is_list=False)
        if words is None:
            return [absent(name)]
        if length == "#":
            return [str(len(words if index or name in "@*" else "".join(words)))]
        return [absent(text)] if more else words
