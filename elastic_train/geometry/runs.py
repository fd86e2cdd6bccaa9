"""Fast path for tensors that are cut along one dim alone, as almost all are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastic_train.geometry.fragments import Fragments


def cut_in_runs(fragments: Fragments) -> npt.NDArray[np.bool_]:
    """By key: whether its boxes follow one another along one dim, from end to end, and are all of the others.

    Such a tensor is tiled. Of another nothing is said.
    """
    count = len(fragments.names)
    if not len(fragments) or not fragments.offsets.shape[1]:
        return np.zeros(count, dtype=np.bool_)
    dims = fragments.offsets.shape[1]
    shapes = np.ones((count, dims), dtype=np.int64)
    for number, shape in enumerate(fragments.shapes):
        shapes[number, : len(shape)] = shape
    key = fragments.key.astype(np.int64)
    partly = np.zeros((count, dims), dtype=np.bool_)
    for dim in range(dims):
        part = (fragments.offsets[:, dim] != 0) | (fragments.sizes[:, dim] != shapes[key, dim])
        partly[:, dim] = np.bincount(key[part], minlength=count) > 0
    along = np.argmax(partly, axis=1)
    rows = np.arange(len(key))
    low, size = fragments.offsets[rows, along[key]], fragments.sizes[rows, along[key]]
    order = np.lexsort((low, key))
    low, size, key = low[order], size[order], key[order]
    heads = np.ones(len(key), dtype=np.bool_)
    heads[1:] = key[1:] != key[:-1]
    right = np.where(heads, low == 0, True)
    right[1:] &= heads[1:] | (low[1:] == low[:-1] + size[:-1])
    right &= size > 0
    ends = np.append(heads[1:], True)
    right &= ~ends | (low + size == shapes[key, along[key]])
    wrong = np.bincount(key[~right], minlength=count)
    there = np.bincount(key, minlength=count)
    return (partly.sum(axis=1) <= 1) & (wrong == 0) & (there > 0)
