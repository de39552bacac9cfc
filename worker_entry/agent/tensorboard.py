"""Writes scalars into TensorBoard's event files, which are TFRecords of protocol buffers, without TensorFlow.

A file begins with an event that names its version. It is only appended to: TensorBoard reads on from where it stopped.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Optional

from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.orders import ScalarPoint, Scalars

VERSION = "brain.Event:2"
FILE_LIMIT = 16 << 20
"""Bytes of one file; nothing is appended to a longer one."""


class EventFiles:
    """One new file in each folder; those of earlier agents stay as they are."""

    def __init__(self) -> None:
        self._files: dict[str, _EventFile] = {}
        self._failed = False

    def write(self, order: Scalars) -> Optional[str]:
        """Appends the points. Returns why they could not be written, the first time."""
        try:
            os.makedirs(order.directory, exist_ok=True)  # with the default mode, because it is the user's own folder
            for point in order.points:
                folder = os.path.join(order.directory, point.folder)
                if folder not in self._files:
                    self._files[folder] = _EventFile(folder)
                self._files[folder].append(point)
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # the program has cleared the folder: begin again
                self._files.clear()
            if not self._failed:
                self._failed = True
                return f"{error.filename or order.directory}: {error.strerror}"
        return None


class _EventFile:
    """One file, made with its first point. It is open only while it is written: there may be a thousand files.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        make_private_directory(folder)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.distlaunch.{os.getpid()}"
        self._path = os.path.join(folder, name)
        self._size = 0

    def append(self, point: ScalarPoint) -> None:
        """Raises OSError if the point cannot be written completely; then nothing of it is left."""
        data = render_record(render_scalars(point))
        if not self._size:
            data = render_record(render_version(point.time)) + data
        if self._size + len(data) > FILE_LIMIT:
            return
        new = 0 if self._size else os.O_CREAT | os.O_EXCL
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | new, 0o600)
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError as error:
            # TensorBoard would never read past a torn record.
            os.ftruncate(descriptor, self._size)
            if not self._size:
                os.unlink(self._path)
            raise OSError(error.errno, error.strerror, self._path) from None
        finally:
            os.close(descriptor)
        self._size += len(data)


def render_version(moment: float) -> bytes:
    """The first event of a file."""
    return _double(1, moment) + _bytes(3, VERSION.encode())


def render_scalars(point: ScalarPoint) -> bytes:
    """An event with a summary; see event.proto and summary.proto of TensorBoard."""
    values = b"".join(
        _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in sorted(point.values.items())
    )
    return _double(1, point.time) + _key(2, 0) + _varint(point.step) + _bytes(5, values)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number is written as its complement
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _key(field, 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def render_record(data: bytes) -> bytes:
    """A TFRecord: length and data, each with its masked CRC-32C."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC; zlib has a different one."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRCS[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _make_crcs() -> list[int]:
    crcs = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 if crc & 1 else crc >> 1
        crcs.append(crc)
    return crcs


_CRCS = _make_crcs()
