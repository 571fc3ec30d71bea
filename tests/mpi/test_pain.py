"""Public bug reports about other software, by their number and what they showed: here each must go right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import gdcomm
from gdcomm.paths import Capabilities, choose


@pytest.fixture(params=["staged", "direct"])
def dcomm(request):
    return gdcomm.Communicator(path=request.param)


def ramp(rank, count, dtype="d"):
    """Values that differ by place and rank."""
    return ((np.arange(count) * 7 + rank * 3) % 13 + 1).astype(dtype)


def ramps(size, count, dtype="d"):
    return np.stack([ramp(rank, count, dtype) for rank in range(size)])


def test_pain_2_staging_must_not_hide_a_missing_wait(dcomm, device):
    """Wrong sums on the direct path only, since staging's copy waited by chance."""
    for size in (3, 40_000):
        x, y = device.empty(size), device.empty(size)
        with device.Stream() as stream:
            device.launch(stream, lambda view: np.copyto(view, ramp(dcomm.rank, view.size)), x)
            dcomm.Reduce(x, y, root=dcomm.size - 1)
            if dcomm.rank == dcomm.size - 1:
                assert (device.asnumpy(y) == ramps(dcomm.size, size).sum(0)).all()


def test_pain_4_in_place_allreduce_again_and_again(dcomm, device):
    with device.Stream() as stream:
        x = device.empty(100)
        device.fill(x, 1.0)
        for _ in range(20):
            dcomm.Allreduce(MPI.IN_PLACE, x)
            device.launch(stream, lambda view: np.divide(view, dcomm.size, out=view), x)
        assert (device.asnumpy(x) == 1.0).all()


@pytest.mark.parametrize("size", [10, 100_000])
def test_pain_5_a_temporary_lives_until_the_request_is_done(dcomm, device, size):
    right, left = (dcomm.rank + 1) % dcomm.size, (dcomm.rank - 1) % dcomm.size
    y = device.empty(size)
    request = dcomm.Irecv(y, left)
    sent = dcomm.Isend(device.array(np.repeat(ramp(dcomm.rank, size), 2))[::2], right)  # nobody else holds it
    for _ in range(5):
        device.fill(device.empty(2 * size), -1.0)  # would take its memory
    gdcomm.Request.Waitall([request, sent])
    assert (device.asnumpy(y) == ramp(left, size)).all()


@pytest.mark.parametrize("nbytes", [256 << 10, (256 << 10) + 8, 1 << 20])
def test_pain_9_large_results_are_there_on_a_stream_of_their_own(dcomm, device, nbytes):
    with device.Stream() as stream:
        x, y = device.array(ramp(0, nbytes // 8)), device.empty(nbytes // 8)
        dcomm.Bcast(x, 0)
        device.launch(stream, lambda a, b: np.copyto(b, 2 * a), x, y)
        assert (device.asnumpy(y) == 2 * ramp(0, nbytes // 8)).all()


def test_pain_10_every_element_is_reduced_every_time(dcomm, device):
    for turn in range(10):
        x, y = device.array(ramp(dcomm.rank + turn, 1000)), device.empty(1000)
        dcomm.Allreduce(x, y)
        assert (device.asnumpy(y) == sum(ramp(rank + turn, 1000) for rank in range(dcomm.size))).all()


@pytest.mark.parametrize("name", ["Ireduce", "Iallreduce", "Iscan", "Allreduce_init"])
def test_pain_25_nonblocking_reductions_are_not_given_to_an_mpi_that_crashes_in_them(name):
    """MPI's word that it knows device memory says nothing about its nonblocking reductions."""
    form = "persistent" if name.endswith("_init") else "request"
    can = Capabilities(frozenset({"p2p", "move", "reduce"}), "Open MPI reports CUDA support")
    transport, why = choose("auto", "reduce", form, name, can)
    assert transport == "staged"
    assert name in why


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN"])
def test_pain_41_bool_reductions_are_logical(dcomm, device, op):
    values = ramps(dcomm.size, 50, "i") % 3 == 1
    x, y = device.array(values[dcomm.rank]), device.empty(50, bool)
    dcomm.Allreduce(x, y, getattr(MPI, op))
    expected = values.any(0) if op in ("SUM", "MAX") else values.all(0)
    assert (device.asnumpy(y) == expected).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_pain_43_half_types_are_reduced(dcomm, device, dtype):
    x, y = device.array(ramp(dcomm.rank, 99, dtype)), device.empty(99, dtype)
    dcomm.Allreduce(x, y)
    assert (device.asnumpy(y).astype("d") == ramps(dcomm.size, 99).sum(0)).all()  # small whole numbers: exact


def test_pain_44_strides_of_axes_of_length_one_do_not_matter(dcomm, device):
    x = device.array(ramp(dcomm.rank, 64).reshape(16, 4))[::16, None, :]  # (1, 1, 4), odd strides
    y = device.empty((1, 1, 4))
    dcomm.Allreduce(x, y)
    assert (device.asnumpy(y).ravel() == ramps(dcomm.size, 64).sum(0)[:4]).all()


def test_pain_45_a_column_is_gathered_as_a_column(dcomm, device):
    table = ramp(dcomm.rank, 60).reshape(12, 5)
    gathered = device.empty((dcomm.size, 12))
    dcomm.Allgather(device.array(table)[:, 2], gathered)
    expected = ramps(dcomm.size, 60).reshape(dcomm.size, 12, 5)[:, :, 2]
    assert (device.asnumpy(gathered) == expected).all()


def test_pain_46_channels_last_keeps_its_logical_order(dcomm, device):
    image = ramp(dcomm.rank, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    stored = device.array(np.ascontiguousarray(image.transpose(0, 2, 3, 1)))  # NHWC in memory
    x = device.empty((dcomm.size, 2, 3, 4, 5))
    view = stored._like(stored._view.transpose(0, 3, 1, 2))  # NCHW by strides
    dcomm.Allgather(view, x)
    assert (device.asnumpy(x) == ramps(dcomm.size, 120).reshape(dcomm.size, 2, 3, 4, 5)).all()


@pytest.mark.parametrize("name", ["Scatter", "Bcast", "Reduce"])
def test_pain_47_every_second_element_and_values_that_differ(dcomm, device, name):
    size = dcomm.size
    x = device.array(np.repeat(ramp(dcomm.rank, 6 * size), 2))[::2]
    y = device.array(np.zeros(12 * size))[::2]
    if name == "Scatter":
        part = device.array(np.zeros(12))[::2]
        dcomm.Scatter(x if dcomm.rank == 0 else None, part, 0)
        assert (device.asnumpy(part) == ramp(0, 6 * size)[6 * dcomm.rank : 6 * dcomm.rank + 6]).all()
    elif name == "Bcast":
        dcomm.Bcast(x, size - 1)
        assert (device.asnumpy(x) == ramp(size - 1, 6 * size)).all()
    else:
        dcomm.Reduce(x, y if dcomm.rank == 0 else None, MPI.MAX, 0)
        if dcomm.rank == 0:
            assert (device.asnumpy(y) == ramps(size, 6 * size).max(0)).all()


def test_pain_49_fortran_to_c_is_reordered(dcomm, device):
    right, left = (dcomm.rank + 1) % dcomm.size, (dcomm.rank - 1) % dcomm.size
    y = device.empty((3, 4))
    request = dcomm.Irecv(y, left)
    dcomm.Send(device.array(ramp(dcomm.rank, 12).reshape(3, 4), order="F"), right)
    request.Wait()
    assert (device.asnumpy(y) == ramp(left, 12).reshape(3, 4)).all()


def test_pain_53_a_rank_may_send_nothing(dcomm, device):
    """Rank r sends r elements to each; rank 0 nothing at all."""
    size, rank = dcomm.size, dcomm.rank
    x, y = device.array(ramp(rank, rank * size)), device.empty(sum(range(size)))
    counts = list(range(size))
    starts = [sum(counts[:r]) for r in range(size)]
    dcomm.Alltoallv([x, ([rank] * size, [rank * r for r in range(size)])], [y, (counts, starts)])
    expected = [ramp(r, r * size)[r * rank : r * rank + r] for r in range(size)]
    assert (device.asnumpy(y) == np.concatenate(expected)).all()


def test_pain_57_counts_come_from_the_communicator_at_hand(dcomm, device):
    half = dcomm.Split(dcomm.rank % 2, dcomm.rank)
    gathered = device.empty((half.size, 5))
    half.Allgather(device.array(ramp(dcomm.rank, 5)), gathered)
    assert (device.asnumpy(gathered) == ramps(dcomm.size, 5)[dcomm.rank % 2 :: 2]).all()
    half.Free()


def test_pain_58_ragged_allgather_without_padding(dcomm, device):
    counts = [2 * rank + 1 for rank in range(dcomm.size)]
    gathered = device.empty(sum(counts))
    dcomm.Allgatherv(device.array(ramp(dcomm.rank, counts[dcomm.rank])), [gathered, counts])
    assert (device.asnumpy(gathered) == np.concatenate([ramp(r, c) for r, c in enumerate(counts)])).all()


def _free_memory() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.parametrize("name", ["Send", "Bcast", "Allreduce"])
def test_pain_51_and_52_more_elements_than_an_int_counts(dcomm, device, name):
    count = 2**31 + 5
    enough = dcomm.bcast(_free_memory() > dcomm.size * 4 * count)
    if dcomm.size != 2 or dcomm.path != "staged" or not enough:
        pytest.skip(f"run on 2 ranks of a machine with {8 * count >> 30} GiB free, once (path staged)")
    x = device.empty(count, "b")
    tail = np.arange(1, 8, dtype="b")
    if name != "Send" or dcomm.rank == 0:
        device.launch(None, lambda view: (view.fill(dcomm.rank + 1), np.copyto(view[-7:], tail)), x)
    if name == "Send":
        dcomm.Send(x, 1) if dcomm.rank == 0 else dcomm.Recv(x, 0)
        expected = (1, tail)
    elif name == "Bcast":
        dcomm.Bcast(x, 1)
        expected = (2, tail)
    else:
        dcomm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
        expected = (3, 2 * tail)
    device.synchronize(None)
    assert (x._view[:-7] == expected[0]).all()
    assert (x._view[-7:] == expected[1]).all()
