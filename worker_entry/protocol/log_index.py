"""The index of a log, `worker-0.log.index`: it dates the log's growth, so the log itself needs no timestamps.

A record is two integers: an offset, and a moment in microseconds of Unix time by which everything before the offset was
written. Moments increase. The offset RESTART means that the program has cut its log, so earlier records no longer
apply. A record whose end is missing (the disk was full, or the machine stopped) is ignored, and overwritten by the next
record.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from typing import Optional

from worker_entry.protocol.field_limits import Count
from worker_entry.protocol.frozen import dataclass

SUFFIX = ".index"
RESTART = -1
RECORD = struct.Struct("<qq")
SPACING_S = 0.05
"""While a log grows, it gets one record per this time."""


MARKS = 256
"""The maximum number of marks sent with one piece of a log."""


@dataclass(frozen=True)
class Mark:
    """One record: everything before the offset was written by this moment, in Unix seconds.

    A piece of a log that is sent again has the same marks with the same times.
    """

    offset: Count
    time: float


class LogIndex:
    """Writes the index at `path`; appends to an existing index.

    A write error never stops the run: records that cannot be written are omitted.
    """

    def __init__(self, path: str) -> None:
        self.offset = 0
        """The offset of the last record; 0 if there is none."""
        self.first = 0
        """The number of the first record since this object saw the log cut; 0 if it never did."""
        self.count = 0
        """The number of records."""
        self._micros = 0
        self._descriptor: Optional[int] = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.count = os.fstat(self._descriptor).st_size // RECORD.size
            last = self.read(self.count - 1, 1) if self.count else []
        except OSError:
            return
        if last:
            self.offset, self._micros = max(last[0].offset, 0), _to_micros(last[0].time)

    @property
    def time(self) -> float:
        """The moment of the last record; 0 if there is none."""
        return self._micros / 1e6

    def note(self, offset: int, time: float) -> None:
        """Adds a record, unless the last record has the same offset; a smaller offset means that the log was cut."""
        if offset == self.offset:
            return
        self._micros = max(_to_micros(time), self._micros + 1)
        record = RECORD.pack(offset, self._micros)
        if offset < self.offset:
            record = RECORD.pack(RESTART, self._micros) + record
            self.first = self.count + 1
        self.offset = offset
        self._append(record)

    def read(self, number: int, limit: int) -> list[Mark]:
        """Returns up to `limit` records, beginning with this number.

        Raises:
            OSError: the file cannot be read.
        """
        if self._descriptor is None:
            return []
        data = os.pread(self._descriptor, limit * RECORD.size, number * RECORD.size)
        whole = len(data) // RECORD.size * RECORD.size
        return [Mark(offset, micros / 1e6) for offset, micros in RECORD.iter_unpack(data[:whole])]

    def find(self, offset: int) -> int:
        """Returns the number of the first record above this offset since the log was last cut.

        Raises:
            OSError: the file cannot be read.
        """
        low, high = self.first, self.count
        while low < high:
            middle = (low + high) // 2
            marks = self.read(middle, 1)
            if marks and marks[0].offset <= offset:
                low = middle + 1
            else:
                high = middle
        return low

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, record: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            # At the record's place, not at the end: this overwrites a record that a full disk has cut.
            written = os.pwrite(self._descriptor, record, self.count * RECORD.size)
        except OSError:
            return
        self.count += written // RECORD.size


def parse_index(data: bytes) -> tuple[array[int], array[int]]:
    """Returns the offsets and moments (microseconds) in an index's bytes, RESTART records included."""
    values = array("q")
    values.frombytes(data[: len(data) // RECORD.size * RECORD.size])
    if sys.byteorder == "big":
        values.byteswap()
    return values[0::2], values[1::2]


def _to_micros(time: float) -> int:
    return int(time * 1e6)
