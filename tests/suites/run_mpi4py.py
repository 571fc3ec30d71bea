"""Run mpi4py's own test suite with a gdcomm Communicator in place of COMM_WORLD and COMM_SELF.

    mpirun -n 2 python tests/suites/run_mpi4py.py --source DIR --array numpy|emulated|cupy|raw [--path PATH] MODULE ...

`--array raw` runs the suite untouched: the baseline. `emulated` and `cupy` add (and keep only) that kind of
array, and lift the skips that mpi4py makes for GPU arrays on Open MPI. The sources are mpi4py's sdist
of the installed version (tests/run.py downloads it).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpi4py import MPI

DEVICE_KINDS = ("emulated", "cupy")
NOT_OURS = [
    "testReduceLocal",  # a method of MPI.Op, not of a communicator
    "Bottom",  # device memory by absolute addresses in datatypes: no array to recognise
    "testConstructor",  # copies of request objects by their class's name, which is ours here
]

NOT_OURS_CUPY = [
    "TestMessageRMA",  # windows are mpi4py's own, and MPI copies device memory with the CPU
    "SimpleCuPy.testNotContiguous",  # asks for an error; strided arrays are served
    "Numba",  # Numba's own assignment fails in the suite's order of imports; tests/gpu has Numba arrays
]


def emulated_backend(arrayimpl, numpy):  # type: ignore[no-untyped-def]
    """An array kind for mpi4py's registry: elements are read and written through host copies."""
    import gdcomm.testing

    device = gdcomm.testing.emulate()

    class Elements(gdcomm.testing.EmulatedArray):
        """Raw device array for the tests that read elements of `as_raw()`."""

        def __getitem__(self, i):
            return device.asnumpy(self)[i]

        def __iter__(self):
            return iter(device.asnumpy(self))

    class Flat:
        def __init__(self, array):
            self.array = array

        def __iter__(self):
            return iter(device.asnumpy(self.array).flat)

        def __len__(self):
            return self.array.size

        def __getitem__(self, i):
            return device.asnumpy(self.array).flat[i]

        def __setitem__(self, i, v):
            device.launch(None, lambda view: view.flat.__setitem__(i, v), self.array)

    class Emulated(arrayimpl.ArrayNumPy):
        backend = "emulated"

        def __init__(self, arg, typecode, shape=None):
            super().__init__(arg, typecode, shape)
            self.shape = self.array.shape
            made = device.array(self.array)
            self.array = Elements(device, made._view, made._base)

        def as_raw(self):
            return self.array

        def __getitem__(self, i):
            return device.asnumpy(self.array)[i]

        def __setitem__(self, i, v):
            device.launch(None, lambda view: view.__setitem__(i, v), self.array)

        def __iter__(self):
            return iter(device.asnumpy(self.array))

        @property
        def address(self):
            return self.array.ptr

        @property
        def typecode(self):
            return self.array.dtype.char

        @property
        def flat(self):
            return Flat(self.array)

        @property
        def size(self):
            return self.array.size

    return Emulated


def wrap_around(backend):  # type: ignore[no-untyped-def]
    """-1 in an unsigned CuPy array raises with NumPy 2: convert first, as the suite's NumPy arrays do."""
    import numpy

    init = backend.__init__

    def converted(self, arg, typecode, shape=None, **options):
        scalar = isinstance(arg, (int, float, complex))
        values = numpy.array(arg if scalar else list(arg)).astype(typecode)
        init(self, values.item() if scalar else values, typecode, shape, **options)

    backend.__init__ = converted


def accept_subclasses() -> None:
    """MPI.Comm.fromint makes mpi4py's own class; the suite asks for the very class that it was given."""
    import test_comm_topo

    def check_handle(self, oldcomm):  # type: ignore[no-untyped-def]
        handle = oldcomm.toint()
        if handle != -1:
            newcomm = MPI.Comm.fromint(handle)
            self.assertEqual(newcomm, oldcomm)
            self.assertIsInstance(oldcomm, type(newcomm))

    test_comm_topo.BaseTestTopo.checkHandle = check_handle


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True)
    parser.add_argument("--array", choices=("raw", "numpy", "emulated", "cupy"), default="numpy")
    parser.add_argument("--path", default="auto")
    parser.add_argument("-x", action="append", default=[])
    parser.add_argument("-v", action="store_true")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()

    sys.path.insert(0, str(Path(options.source) / "test"))
    if options.array == "emulated":
        import gdcomm.testing

        gdcomm.testing.emulate()
    if options.array != "raw":
        import gdcomm

        MPI.COMM_WORLD = gdcomm.Communicator(MPI.COMM_WORLD, path=options.path)
        MPI.COMM_SELF = gdcomm.Communicator(MPI.COMM_SELF, path=options.path)
    if options.array != "cupy":
        sys.modules["cupy"] = None  # type: ignore[assignment]
    import arrayimpl
    import main as suite
    import mpiunittest

    if options.array != "raw":
        accept_subclasses()
    if options.array in DEVICE_KINDS:
        # Started and probed through their class's own name: device requests need gdcomm's.
        MPI.Prequest, MPI.Request = gdcomm.Prequest, gdcomm.Request
        attach = MPI.Attach_buffer
        # MPI itself writes into an attached buffer, on the host: device memory can't serve.
        MPI.Attach_buffer = lambda memory: attach(bytearray(1 << 20))
        mpiunittest.is_mpi_gpu = lambda *args: False
        if options.array == "emulated":
            import numpy

            arrayimpl.ArrayBackends[:] = [emulated_backend(arrayimpl, numpy)]
        else:
            arrayimpl.ArrayBackends[:] = [b for b in arrayimpl.ArrayBackends if "cupy" in str(b.backend)]
            for backend in arrayimpl.ArrayBackends:
                wrap_around(backend)
    arguments = [word for name in options.modules for word in ("-i", rf"\b{name}\b")]
    extra = ["--cupy"] if options.array == "cupy" else []
    if options.array != "raw":
        # mpi4py pickles its own COMM_WORLD by name, and the name is rebound here; tests/mpi pickles ours.
        options.x.append("test_comm.*.testPickle")
    if options.array in DEVICE_KINDS:
        options.x += NOT_OURS
    if options.array == "cupy":
        options.x += NOT_OURS_CUPY
    extra += [word for name in options.x for word in ("-x", name)] + (["-v"] if options.v else [])
    sys.argv = ["main.py", "--no-builddir", *extra, *arguments]
    suite.main(module=None)


if __name__ == "__main__":
    main()
