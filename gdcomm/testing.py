"""For tests without a GPU: the emulated device.

```python
device = gdcomm.testing.emulate()          # before the Communicator is made
x = device.array(numpy.arange(4.0))        # behaves like a CuPy array on a very lazy GPU
```
"""

from __future__ import annotations

import os

from gdcomm import devices
from gdcomm.devices.emulated import EmulatedArray, EmulatedDevice, EmulatedStream

__all__ = ["EmulatedArray", "EmulatedDevice", "EmulatedStream", "emulate", "emulate_if_asked"]


def emulate(seed: int = 0) -> EmulatedDevice:
    """Install the emulated device in this process and return it; later calls return the same one."""
    for device in devices.installed():
        if isinstance(device, EmulatedDevice):
            return device
    device = EmulatedDevice(seed)
    devices.install(device)
    return device


def emulate_if_asked() -> EmulatedDevice | None:
    """Install the emulated device if the environment says GDCOMM_DEVICE=emulated."""
    return emulate() if os.environ.get("GDCOMM_DEVICE", "").lower() == "emulated" else None
