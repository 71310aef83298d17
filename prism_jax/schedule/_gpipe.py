from typing import ClassVar

from ._one_stage import AbstractOneStage


class GPipe(AbstractOneStage):
    """All forwards, then all backwards, one stage per rank.

    The backwards run in the same order of microbatches as the forwards, as in PyTorch. (In the
    paper they run in reverse order; the makespan is the same if all microbatches cost the same.)
    """

    kind: ClassVar[str] = "gpipe"

    def orders(self) -> list[list[str]]:
        microbatches = range(self.num_microbatches)
        return [
            [f"{stage}F{m}" for m in microbatches] + [f"{stage}B{m}" for m in microbatches]
            for stage in range(self.num_ranks)
        ]
