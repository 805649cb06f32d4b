"""The type that keys and values are stored in: rounded when they are stored, widened when they are read.

What is read back is what is stored, also of the newest token, so that a row's bits depend on its positions alone.
"""

import mlx.core as mx

AUTO = mx.float16
BY_NAME = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def name_of(dtype: mx.Dtype) -> str:
    """What the setting calls it."""
    return next(name for name, each in BY_NAME.items() if each == dtype)


def chosen(asked: str, *, compiled: bool) -> mx.Dtype | None:
    """The type for `--cache-dtype`, or None: that of the model's keys.

    `compiled` says whether the kernels attend, which widen as they read; elsewhere every step would copy them all.
    """
    if asked == "auto":
        return AUTO if compiled else None
    return BY_NAME[asked]


def rounded(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """`array` as `dtype`, to nearest even; what is beyond the type's largest number becomes that, not infinite."""
    if array.dtype == dtype:
        return array
    if dtype != mx.float32:
        most = mx.finfo(dtype).max
        array = mx.clip(array, -most, most)
    return array.astype(dtype)
