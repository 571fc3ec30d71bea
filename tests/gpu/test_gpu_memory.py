"""Pinned, registered and mapped memory on a real GPU, and what CUDA says of each kind. Run by pytest, alone."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys

import numpy as np
import pytest
from gpu import cupy, slow

import gdcomm
from gdcomm import devices
from gdcomm.memory import budget
from gdcomm.memory.pinned import note_use, pool_of
from gdcomm.memory.registered import pieces, registry_of

pytestmark = pytest.mark.gpu

runtime = cupy.cuda.runtime
H2D, D2H = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
MIB, PAGE = 1 << 20, mmap.PAGESIZE


@pytest.fixture
def device():
    return devices.cuda_device()


def settle(device):
    cupy.cuda.get_current_stream().synchronize()
    gc.collect()
    return pool_of(device).stats()


def round_trip(host, stream=None):
    """Copy all bytes of host memory, piece by piece, to the GPU and back."""
    target = cupy.empty(host.nbytes, "u1")
    stream = stream or cupy.cuda.get_current_stream()
    for address, nbytes in pieces(host.ctypes.data, host.nbytes):
        offset = address - host.ctypes.data
        runtime.memcpyAsync(target.data.ptr + offset, address, nbytes, H2D, stream.ptr)
    stream.synchronize()
    return target.get().tobytes()


def whole_pages(nbytes):
    block = np.zeros(nbytes + PAGE, np.uint8)
    return block[-block.ctypes.data % PAGE :][:nbytes]


@pytest.mark.parametrize("nbytes", [8, 100_000, 5 * MIB, 300 * MIB])
@pytest.mark.parametrize("options", [{}, {"write_combined": True}, {"mapped": True}], ids=str)
def test_pinned_arrays_are_page_locked_and_copy_rightly(device, nbytes, options):
    values = np.arange(nbytes, dtype=np.uint8)
    made = gdcomm.pinned_empty(nbytes, "u1", **options)
    made[...] = values
    kinds = {"write_combined": "write-combined", "mapped": "mapped"}
    assert gdcomm.memory_kind(made) == kinds.get(next(iter(options), ""), "pinned")
    for offset in (0, nbytes // 2, nbytes - 1):
        assert runtime.pointerGetAttributes(made.ctypes.data + offset).type == 1
    assert round_trip(made) == values.tobytes()


def test_a_dropped_array_is_used_again_after_its_copies(device):
    side = cupy.cuda.Stream(non_blocking=True)
    target = cupy.zeros(100_000, "u1")
    cupy.cuda.get_current_stream().synchronize()
    source = gdcomm.pinned_zeros(100_000, "u1")
    address = source.ctypes.data
    source[...] = 5
    with side:
        busy = slow()
        runtime.memcpyAsync(target.data.ptr, address, source.nbytes, H2D, side.ptr)
    note_use(address, source.nbytes, device.record(side.ptr))
    del source
    other = gdcomm.pinned_zeros(100_000, "u1")
    other[...] = 9
    assert other.ctypes.data != address
    side.synchronize()
    del busy
    assert (target.get() == 5).all()


def test_the_pool_gives_memory_back_and_trims(device):
    pool = pool_of(device)
    before = budget.of_process().used
    made = gdcomm.pinned_empty(200 * MIB, "u1")
    address = made.ctypes.data
    del made
    assert settle(device)["idle"] >= 200 * MIB
    again = gdcomm.pinned_empty(200 * MIB, "u1")
    assert again.ctypes.data == address
    del again
    settle(device)
    pool.trim()
    assert pool.stats()["idle"] == 0
    assert budget.of_process().used <= before
    assert runtime.pointerGetAttributes(address).type != 1


def test_numa_nodes(device):
    node = device.properties().numa_node
    assert node is None or gdcomm.pinned_empty(10, numa=node).size == 10
    with pytest.raises(gdcomm.BufferSpecError, match="NUMA"):
        gdcomm.pinned_empty(10, numa=999)


def test_over_the_budget(device):
    with pytest.raises(MemoryError, match="GDCOMM_PINNED_LIMIT"):
        gdcomm.pinned_empty(1 << 50, "u1")


@pytest.mark.parametrize("offset", [0, 1, 4000])
@pytest.mark.parametrize("nbytes", [1, 100_000, 64 * MIB])
def test_registered_arrays(device, offset, nbytes):
    whole = np.arange(nbytes + offset, dtype=np.uint8)
    array = whole[offset:]
    assert gdcomm.memory_kind(array) == "pageable"
    with gdcomm.registered(array):
        assert gdcomm.memory_kind(array) == "registered"
        assert round_trip(array) == array.tobytes()
    assert gdcomm.memory_kind(array) == "pageable"
    assert not registry_of(device)._starts


def test_overlapping_registrations(device):
    whole = whole_pages(64 * PAGE)
    whole[...] = np.random.default_rng(1).integers(0, 255, whole.size)
    first, second = whole[100 : 40 * PAGE], whole[20 * PAGE + 50 :]
    gdcomm.register(first)
    gdcomm.register(second)
    gdcomm.register(first)
    assert len(pieces(whole.ctypes.data, whole.nbytes)) > 1
    for _ in range(2):
        assert round_trip(whole[100:]) == whole[100:].tobytes()
        gdcomm.unregister(first)
    assert gdcomm.memory_kind(second) == "registered"
    assert round_trip(second) == second.tobytes()
    gdcomm.unregister(second)
    assert gdcomm.memory_kind(whole) == "pageable"


def test_arrays_that_share_a_page(device):
    whole = whole_pages(4 * PAGE)
    whole[...] = np.arange(whole.size, dtype=np.uint8)
    left, right = whole[: PAGE + 100], whole[PAGE + 200 :]
    with gdcomm.registered(left):
        with gdcomm.registered(right):
            assert round_trip(right) == right.tobytes()
        assert round_trip(left) == left.tobytes()


def test_memory_pinned_by_others_is_left_alone(device):
    block = cupy.cuda.alloc_pinned_memory(10_000)
    array = np.frombuffer(block, np.uint8, 10_000)
    with gdcomm.registered(array):
        pass
    assert gdcomm.memory_kind(array) == "pinned"


def test_read_only_files_are_registered_or_refused(device, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(2).bytes(1 << 20))
    for mode in ("r", "c", "r+"):
        array = np.memmap(path, np.uint8, mode)
        try:
            with gdcomm.registered(array):
                assert round_trip(array) == path.read_bytes()
        except gdcomm.DeviceError as error:
            print(f"np.memmap {mode!r}: {error}")
            assert mode != "c"
        assert round_trip(array) == path.read_bytes()


def test_arrays_freed_while_registered(device):
    array = np.zeros(64 * MIB, np.uint8)
    address = array.ctypes.data
    gdcomm.register(array)
    del array
    gc.collect()
    assert not registry_of(device)._starts
    assert runtime.pointerGetAttributes(address).type != 1


def test_a_page_registered_twice_by_hand_is_refused(device):
    whole = whole_pages(8 * PAGE)
    device.host_register(whole.ctypes.data + PAGE, PAGE)
    with pytest.raises(gdcomm.DeviceError, match="another library"):
        gdcomm.register(whole)
    device.host_unregister(whole.ctypes.data + PAGE)
    with pytest.raises(gdcomm.DeviceError, match="not registered"):
        device.host_unregister(whole.ctypes.data + PAGE)
    with gdcomm.registered(whole):
        pass


FORK = """
import os
import numpy as np
import gdcomm

array = np.zeros(1000)
with gdcomm.registered(array):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            gdcomm.unregister(array)
        except gdcomm.DeviceError as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert "parent of this process" in os.read(read, 1000).decode()
    assert gdcomm.memory_kind(array) == "registered"
print("end")
"""


def test_a_forked_child_has_no_registrations():
    """In a process of its own: the libraries of other tests have threads, and warn when the process is forked."""
    command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_mapped_memory_is_one_memory(device):
    both = gdcomm.mapped_empty((300, 70), "f4")
    both.host[...] = 1
    assert isinstance(both.device, cupy.ndarray)
    assert gdcomm.memory_kind(both.device) == gdcomm.memory_kind(both.host) == "mapped"
    both.device *= 3
    both.device[5] += cupy.arange(70, dtype="f4")
    cupy.cuda.get_current_stream().synchronize()
    assert (both.host[5] == 3 + np.arange(70)).all()
    assert (both.host[6] == 3).all()
    both.host[...] = 7
    assert float(both.device.sum()) == 7 * 21_000


def test_mapped_memory_outlives_either_view(device):
    both = gdcomm.mapped_empty(10 * MIB, "u1", write_combined=False)
    both.host[...] = 2
    view = both.device[5:1000]
    del both
    gc.collect()
    other = gdcomm.mapped_empty(10 * MIB, "u1")
    other.host[...] = 9
    assert int(view.sum()) == 2 * 995


def test_kernels_end_before_mapped_memory_is_used_again(device):
    seen = cupy.zeros(100_000, "u1")
    both = gdcomm.mapped_empty(100_000, "u1")
    both.host[...] = 7
    busy = slow()
    seen[...] = both.device
    del both
    gdcomm.pinned_zeros(100_000, "u1")[...] = 1
    assert (seen.get() == 7).all()
    del busy


def test_kinds_of_device_memory(device):
    assert gdcomm.memory_kind(cupy.zeros(10)) == "device 0"
    managed = cupy.ndarray(10, "f4", cupy.cuda.malloc_managed(40))
    assert gdcomm.memory_kind(managed).name == "managed"
    if device.properties().memory_pools:
        pooled = cupy.ndarray(10, "f4", cupy.cuda.malloc_async(40))
        assert gdcomm.memory_kind(pooled) == "async-pool (device 0)"


def test_kinds_of_torch_memory():
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        tensor = torch.zeros(100, dtype=dtype)
        assert gdcomm.memory_kind(tensor) == "pageable"
        assert gdcomm.memory_kind(tensor.pin_memory()) in ("pinned", "registered")
        assert gdcomm.memory_kind(tensor.cuda()) == "device 0"
    shared = torch.from_numpy(gdcomm.pinned_zeros(10))
    assert gdcomm.memory_kind(shared) == "pinned"
    assert shared.is_pinned()


def test_properties(device):
    properties = device.properties()
    assert properties.name
    assert properties.can_map_host_memory
    assert properties.pci_bus_id.count(":") == 2
    assert properties is device.properties()
