"""What the programs of the mutation test share: arrays that are filled late, comparisons that wait for no more than
they must, and how a program tells `mutate.py` in which way it failed."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gdcomm
from gdcomm import devices

__all__ = ["Produced", "WrongError", "check", "queued", "ramp", "require", "run"]


class WrongError(AssertionError):
    """A result is not what gdcomm promises."""


class Produced:
    """A device array whose interface names its stream, as arrays of several libraries do."""

    def __init__(self, array: Any, stream: Any) -> None:
        self._array, self.dtype, self.shape = array, array.dtype, array.shape
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.ptr}


def ramp(size: int, start: float) -> np.ndarray[Any, Any]:
    """Values that differ from place to place, and by `start` from rank to rank and from case to case."""
    return start + np.arange(float(size))


def queued(values: Any, order: Any) -> Any:
    """A device array that `order` fills when its queue runs; it was used before, so it holds other data."""
    device: Any = devices.current()
    array = device.empty(np.shape(values))
    device.fill(array, -1.0, order)
    device.launch(order, lambda view: np.copyto(view, values), array)
    return array


def check(what: str, array: Any, expected: Any, order: Any = None) -> None:
    """Compare at the very end; waits for `order` only."""
    device: Any = devices.current()
    got = array if isinstance(array, np.ndarray) else device.asnumpy(array, order)
    if not np.array_equal(got, np.broadcast_to(expected, got.shape)):
        bad = np.flatnonzero(np.ravel(got != expected))
        raise WrongError(f"{what}: {bad.size} of {got.size} wrong, first {np.ravel(got)[bad[:3]]} at {bad[:3]}")


def require(what: str, condition: Any) -> None:
    if not condition:
        raise WrongError(what)


def run(main: Callable[[], None], give_up: Callable[[], Any]) -> None:
    """Run a program on the package that is asked for.

    Args:
        main: the program.
        give_up: ends the process after a failure: a thread or another rank may be stuck.
    """
    try:
        wanted = os.environ.get("GDCOMM_MUTANT", "/")
        if not Path(gdcomm.__file__).is_relative_to(wanted):
            raise ImportError(f"gdcomm comes from {gdcomm.__file__}, not from {wanted}")
        main()
    except BaseException as error:
        kind = "wrong" if isinstance(error, WrongError) else "exception"
        print(f"MUTANT {kind}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
        sys.stderr.flush()
        give_up()
    faulthandler.cancel_dump_traceback_later()
