import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._misc import quoted


# A letter of a token, and the phase that it stands for.
PHASES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
OVERLAPPED = "FB"
SEND_RECV = "SR"

# The most digits that an integer of NumPy holds.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_SINGLE = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")
_SINGLES = re.compile(f"(?:{_NUMBER}[FBIW]{_NUMBER} )*+")
_PAIR = re.compile(rf"\({_NUMBER}F{_NUMBER};{_NUMBER}B{_NUMBER}\)OVERLAP_F_B")
_BLANK_LETTERS = str.maketrans("FBIW", "    ")
_ONLY_LETTERS = str.maketrans("", "", "0123456789 ")


class Action(NamedTuple):
    """The contents of a token; `other_*` belong to the backward of an overlapped pair, else -1."""

    phase: str
    stage: int
    microbatch: int
    other_stage: int = -1
    other_microbatch: int = -1

    @property
    def token(self) -> str:
        if self.phase == OVERLAPPED:
            backward = f"{self.other_stage}B{self.other_microbatch}"
            return f"({self.stage}F{self.microbatch};{backward})OVERLAP_F_B"
        return f"{self.stage}{self.phase}{self.microbatch}"

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """The phase, stage and microbatch of each of the ops that run as this one."""
        if self.phase == OVERLAPPED:
            backward = ("B", self.other_stage, self.other_microbatch)
            return ("F", self.stage, self.microbatch), backward
        return ((self.phase, self.stage, self.microbatch),)


def parse_tokens(tokens: Sequence[object], rank: int) -> list[np.ndarray]:
    """Reads the tokens of a rank: an array for each field of their `Action`s."""
    words = [token for token in tokens if isinstance(token, str)]
    text = " ".join(words) + " "
    # Orders are long, and nearly all of single ops, which read much faster as one text.
    if text.count(" ") == len(words) == len(tokens) and _SINGLES.fullmatch(text):
        numbers = np.array(text.translate(_BLANK_LETTERS).split(), np.int64).reshape(-1, 2)
        letters = np.array([*text.translate(_ONLY_LETTERS)], "U2")
        return [letters, *numbers.T, *np.full((2, len(words)), -1)]
    actions = [parse_token(token, rank, i) for i, token in enumerate(tokens)]
    columns = zip(*actions, strict=True) if actions else [()] * len(Action._fields)
    dtypes = ["U2"] + [np.int64] * 4
    return [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]


def parse_token(token: object, rank: int, position: int) -> Action:
    """Reads a token; `rank` and `position` say in an error where it stands."""
    if isinstance(token, str):
        if single := _SINGLE.fullmatch(token):
            stage, phase, microbatch = single.groups()
            return Action(phase, int(stage), int(microbatch))
        if pair := _PAIR.fullmatch(token):
            stage, microbatch, other_stage, other_microbatch = map(int, pair.groups())
            return Action(OVERLAPPED, stage, microbatch, other_stage, other_microbatch)
    given = f"'{quoted(token)}'" if isinstance(token, str) else quoted(token)
    raise ValueError(
        f"Op {position} of rank {rank} is {given}, which is no token; write the stage, one of "
        "F, B, I and W, and the microbatch, as in `3F7`, or a pair as in `(0F3;7B1)OVERLAP_F_B`."
    )
