"""Reads the state of the GPUs with NVIDIA's management library (NVML), through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Optional

from worker_entry.protocol.frozen import dataclass

LIBRARY = "libnvidia-ml.so.1"

_SUCCESS = 0
_FUNCTION_NOT_FOUND = 13
_INSUFFICIENT_SIZE = 7
_GPU_IS_LOST = 15
_TEMPERATURE_OF_GPU = 0
_UUID_SIZE = 96
_PROCESSES = 64
"""How many processes are expected at most; for more, the library is asked again."""


class _Use(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _FirstProcess(ctypes.Structure):
    """A process, in the first version of the function that lists them."""

    _fields_ = (("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """A process, in later versions."""

    _fields_ = (*_FirstProcess._fields_, ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint))


_LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", _Process),
    ("nvmlDeviceGetComputeRunningProcesses_v2", _Process),
    ("nvmlDeviceGetComputeRunningProcesses", _FirstProcess),
)


@dataclass(frozen=True)
class GpuReading:
    """The state of one GPU; None for unknown values. `use` is a share; `memory` and `memory_total` are bytes."""

    index: int
    uuid: str = ""
    use: Optional[float] = None
    memory: Optional[int] = None
    memory_total: Optional[int] = None
    power_w: Optional[float] = None
    celsius: Optional[float] = None


def is_called(reading: GpuReading, name: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES may have this name for the GPU; CUDA also accepts the beginning of a UUID."""
    return name == str(reading.index) or (name.startswith("GPU-") and reading.uuid.startswith(name))


class Nvml:
    """The loaded and initialised library. Its calls may block as long as the driver hangs.

    Raises:
        OSError: the library cannot be loaded, or the driver does not answer.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        status = self._call("nvmlInit_v2")
        if status != _SUCCESS:
            raise OSError(f"nvmlInit_v2 returned {status}")

    def read(self) -> list[GpuReading]:
        """Returns the readings of all GPUs that answer; empty if even the number of GPUs is unknown."""
        count = ctypes.c_uint()
        if self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)) != _SUCCESS:
            return []
        return [*self._read_all(count.value)]

    def read_processes(self, index: int) -> Optional[list[int]]:
        """Returns the pids that compute on a GPU; None if the driver does not report them."""
        device = self._find(index)
        for name, kind in _LISTS if device is not None else ():
            status, size = _INSUFFICIENT_SIZE, _PROCESSES
            while status == _INSUFFICIENT_SIZE:
                count, processes = ctypes.c_uint(size), (kind * size)()
                status = self._call(name, device, ctypes.byref(count), processes)
                size = max(2 * size, count.value)
            if status == _SUCCESS:
                return [process.pid for process in processes[: count.value]]
            if status != _FUNCTION_NOT_FOUND:
                break
        return None

    def _find(self, index: int) -> Optional[ctypes.c_void_p]:
        device = ctypes.c_void_p()
        status = self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        return device if status == _SUCCESS else None

    def _read_all(self, count: int) -> Iterator[GpuReading]:
        for index in range(count):
            device = self._find(index)
            reading = self._read_one(index, device) if device is not None else None
            if reading is not None:
                yield reading

    def _read_one(self, index: int, device: ctypes.c_void_p) -> Optional[GpuReading]:
        """Returns None if the GPU has fallen off the bus."""
        use, memory, uuid = _Use(), _Memory(), ctypes.create_string_buffer(_UUID_SIZE)
        milliwatts, celsius = ctypes.c_uint(), ctypes.c_uint()
        answers = [
            self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(use)),
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)),
            self._call("nvmlDeviceGetPowerUsage", device, ctypes.byref(milliwatts)),
            self._call("nvmlDeviceGetTemperature", device, ctypes.c_uint(_TEMPERATURE_OF_GPU), ctypes.byref(celsius)),
            self._call("nvmlDeviceGetUUID", device, uuid, ctypes.c_uint(_UUID_SIZE)),
        ]
        if _GPU_IS_LOST in answers:
            return None
        has_use, has_memory, has_power, has_celsius, has_uuid = (answer == _SUCCESS for answer in answers)
        return GpuReading(
            index,
            uuid=uuid.value.decode("ascii", "replace") if has_uuid else "",
            use=use.gpu / 100 if has_use else None,
            memory=memory.used if has_memory else None,
            memory_total=memory.total if has_memory else None,
            power_w=milliwatts.value / 1000 if has_power else None,
            celsius=float(celsius.value) if has_celsius else None,
        )

    def _call(self, name: str, *arguments: Any) -> int:
        """Calls a function and returns its status; older or newer drivers may lack some functions."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return _FUNCTION_NOT_FOUND
        return int(function(*arguments))
