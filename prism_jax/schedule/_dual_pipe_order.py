"""The eight steps of the DualPipe algorithm, which DualPipe and DualPipeV share."""

from collections import deque


def dual_pipe_order(
    num_ranks: int, rank: int, num_microbatches: int, stages: tuple[int, int]
) -> list[str]:
    """The tokens of one rank, as in the public code of DeepSeek's DualPipe.

    **Arguments:**

    - `num_ranks`: how many ranks there are from an end of the pipeline to where it turns.
    - `rank`: how far this rank is from that end, from zero.
    - `num_microbatches`: the number of microbatches in each direction.
    - `stages`: the two stages of the rank: first that of the direction that enters at the near end,
        then the other.
    """
    forwards, backwards = [0, 0], [0, 0]
    put_off: deque[str] = deque()
    order: list[str] = []

    def forward(c: int) -> str:
        forwards[c] += 1
        return f"{stages[c]}F{forwards[c] - 1}"

    def backward(c: int, split: bool = False) -> str:
        microbatch = backwards[c]
        backwards[c] += 1
        if split:
            put_off.append(f"{stages[c]}W{microbatch}")
        return f"{stages[c]}{'I' if split else 'B'}{microbatch}"

    def both(c: int) -> str:
        return f"({forward(c)};{backward(1 - c)})OVERLAP_F_B"

    to_turn = num_ranks - 1 - rank
    order += [forward(0) for _ in range(2 * to_turn)]
    for _ in range(rank + 1):
        order += [forward(0), forward(1)]
    for _ in range(to_turn):
        order += [backward(1, split=True), put_off.popleft(), forward(1)]
    for i in range(num_microbatches - 2 * num_ranks + rank + 1):
        # Where the pipe turns, the first backward needs the end of this very forward.
        order += [forward(0), backward(1)] if i == 0 and to_turn == 0 else [both(0)]
        order.append(both(1))
    for _ in range(to_turn):
        order += [backward(1), both(1)]
    for i in range(rank + 1):
        # In the second half, weight gradients are put off.
        order.append(backward(1, split=2 * i > rank))
        order.append(backward(0, split=2 * i >= rank))
    for _ in range(to_turn):
        order += [put_off.popleft(), backward(0, split=True)]
    return order + list(put_off)
