"""Where operations of JAX that move elements take them from, and where they put them."""

import numpy as np


def pad_places(equation, shape):
    """Where padding puts an array: how large it is with the gaps between its elements, where these
    elements are in it, which part of it is kept, and where that is in the result.
    """
    config = equation.params["padding_config"]
    inner = [n + max(n - 1, 0) * gap for n, (_, _, gap) in zip(shape, config, strict=True)]
    elements = tuple(slice(None, None, gap + 1) for _, _, gap in config)
    kept, into = [], []
    for n, (low, high, _) in zip(inner, config, strict=True):  # Less than zero cuts.
        kept.append(slice(max(-low, 0), n - max(-high, 0)))
        into.append(slice(max(low, 0), max(low, 0) + max(n + min(low, 0) + min(high, 0), 0)))
    return inner, elements, tuple(kept), tuple(into)


def _places(shape, windows, indices, about) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The place in an array of each element of a gathered or scattered one, and whether there is
    such a place.

    **Arguments:**

    - `windows`: how much of each axis of the array a window takes.
    - `about`: the axes of the result that lie in windows; those of the array that windows lack;
        those that indices count; and batched axes of the array and of the indices.
    """
    in_windows, lacking, counted, batched, batched_indices = about
    lacking = {*lacking, *batched}
    batch = indices.shape[:-1]
    ndim = len(batch) + len(in_windows)
    in_batch = [i for i in range(ndim) if i not in in_windows]

    def spread(x, axes):
        kept = [1] * ndim
        for axis, size in zip(axes, np.shape(x), strict=True):
            kept[axis] = size
        return np.reshape(x, kept)

    axes = iter(in_windows)
    places, valid = [], np.ones((1,) * ndim, bool)
    for axis, size in enumerate(shape):
        start = np.zeros((1,) * ndim, np.int64)
        if axis in counted:
            start = spread(indices[..., counted.index(axis)].astype(np.int64), in_batch)
            valid = valid & (start >= 0) & (start <= size - windows[axis])
            start = np.clip(start, 0, size - windows[axis])
        elif axis in batched:
            of_indices = batched_indices[batched.index(axis)]
            start = spread(np.arange(size), [in_batch[of_indices]])
        if axis not in lacking:
            start = start + spread(np.arange(windows[axis]), [next(axes)])
        places.append(start)
    return tuple(places), valid


def places_of_gather(equation, x, indices) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The place in an array of each gathered element, and whether it is taken from there."""
    params, about = equation.params, equation.params["dimension_numbers"]
    places, valid = _places(
        x.shape,
        params["slice_sizes"],
        indices,
        (
            about.offset_dims,
            about.collapsed_slice_dims,
            about.start_index_map,
            about.operand_batching_dims,
            about.start_indices_batching_dims,
        ),
    )
    return places, valid | ("FILL" not in str(params["mode"]))


def places_of_scatter(equation, x, indices, updates) -> tuple[list[np.ndarray], np.ndarray]:
    """The place in an array of each update, and whether there is such a place."""
    about = equation.params["dimension_numbers"]
    lacking = {*about.inserted_window_dims, *about.operand_batching_dims}
    sizes = iter(updates.shape[i] for i in about.update_window_dims)
    windows = [1 if axis in lacking else next(sizes) for axis in range(x.ndim)]
    places, valid = _places(
        x.shape,
        windows,
        indices,
        (
            about.update_window_dims,
            about.inserted_window_dims,
            about.scatter_dims_to_operand_dims,
            about.operand_batching_dims,
            about.scatter_indices_batching_dims,
        ),
    )
    valid = np.broadcast_to(valid | ("CLIP" in str(equation.params["mode"])), updates.shape)
    return [np.broadcast_to(place, updates.shape) for place in places], valid
