"""Classes whose options are filled in and whose first argument is still to come."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def direct(make: Callable[..., T]) -> Callable[..., T]:
    """The same, without the parser's functions around the class, which cannot be pickled.

    >>> direct(partial(lambda call, cls, *args, **options: call(cls, *args, **options), map, dict, a=1))
    functools.partial(<class 'dict'>, a=1)
    """
    if isinstance(make, partial) and not inspect.isclass(make.func) and make.args and inspect.isclass(make.args[-1]):
        cls: Any = make.args[-1]
        return partial(cls, **make.keywords)
    return make
