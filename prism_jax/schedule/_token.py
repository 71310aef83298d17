import re
from typing import NamedTuple


# A letter of a token, and the phase that it stands for.
PHASES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
OVERLAPPED = "FB"
SEND_RECV = "SR"

_NUMBER = "(0|[1-9][0-9]*)"
_SINGLE = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")
_PAIR = re.compile(rf"\({_NUMBER}F{_NUMBER};{_NUMBER}B{_NUMBER}\)OVERLAP_F_B")


class Action(NamedTuple):
    """What a token says; `other_*` are those of the backward of an overlapped pair, else -1."""

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


def parse_token(token: object, rank: int, position: int) -> Action:
    """Reads a token; `rank` and `position` say in an error where it stands."""
    if isinstance(token, str):
        if single := _SINGLE.fullmatch(token):
            stage, phase, microbatch = single.groups()
            return Action(phase, int(stage), int(microbatch))
        if pair := _PAIR.fullmatch(token):
            stage, microbatch, other_stage, other_microbatch = map(int, pair.groups())
            return Action(OVERLAPPED, stage, microbatch, other_stage, other_microbatch)
    raise ValueError(
        f"Op {position} of rank {rank} is {token!r}, which is no token; write the stage, one of "
        "F, B, I and W, and the microbatch, as in `3F7`, or a pair as in `(0F3;7B1)OVERLAP_F_B`."
    )
