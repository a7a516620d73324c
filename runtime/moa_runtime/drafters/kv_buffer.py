"""Arrays that grow by rows."""

from __future__ import annotations

import numpy as np

from moa_runtime.drafters.base import Float32

_FIRST_CAPACITY = 256


class GrowingRows:
    """Keys and values of positions ``0..length-1`` in arrays that double when full.

    The valid part is a prefix of each array, so it is contiguous and reaches the backend without a copy.

    Args:
        kv_shape: ``(kv_heads, head_dim)``.
    """

    def __init__(self, kv_shape: tuple[int, int]) -> None:
        self.length = 0
        self._keys = np.zeros((_FIRST_CAPACITY, *kv_shape), np.float32)
        self._values = np.zeros((_FIRST_CAPACITY, *kv_shape), np.float32)

    def write(self, start: int, keys: Float32, values: Float32) -> None:
        """Put rows at ``start``; what was held from there on is replaced.

        Raises:
            ValueError: a gap before ``start``, or another shape than ``[n, kv_heads, head_dim]``.
        """
        expected = (len(keys), *self._keys.shape[1:])
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"rows have shapes {keys.shape} and {values.shape}, expected {expected}")
        if not 0 <= start <= self.length:
            raise ValueError(f"rows start at position {start}, but only {self.length} are held: a gap")
        stop = start + len(keys)
        if stop > len(self._keys):
            capacity = max(stop, 2 * len(self._keys))
            self._keys = _grown(self._keys, self.length, capacity)
            self._values = _grown(self._values, self.length, capacity)
        self._keys[start:stop] = keys
        self._values[start:stop] = values
        self.length = stop

    def truncate(self, length: int) -> None:
        """Forget positions ``length`` and above."""
        self.length = max(0, min(self.length, length))

    def first(self, count: int) -> tuple[Float32, Float32]:
        """Views of the first ``count`` keys and values, ``[count, kv_heads, head_dim]`` each."""
        return self._keys[:count], self._values[:count]


def _grown(array: Float32, used: int, capacity: int) -> Float32:
    larger = np.zeros((capacity, *array.shape[1:]), np.float32)
    larger[:used] = array[:used]
    return larger
