"""Divides the CPU into several devices, so that a machine without GPUs behaves like one with several."""

from __future__ import annotations

from types import ModuleType

from worker_entry.hooks.import_hooks import after_import


def install(count: int) -> None:
    """Divides the CPU right after TensorFlow's import: devices can be configured only before TensorFlow uses them."""

    def divide(tensorflow: ModuleType) -> None:
        config = tensorflow.config
        if not config.list_physical_devices("GPU"):
            cpu = config.list_physical_devices("CPU")[0]
            config.set_logical_device_configuration(cpu, [config.LogicalDeviceConfiguration()] * count)

    after_import("tensorflow", divide)
