def turns(num_microbatches: int, virtual_stages: int, group_size: int) -> list[tuple[int, int]]:
    """The virtual stages and microbatches of a rank in the order of its forwards.

    A whole group of microbatches runs through each of the rank's stages in turn.
    """
    return [
        (virtual_stage, microbatch)
        for start in range(0, num_microbatches, group_size)
        for virtual_stage in range(virtual_stages)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]
