"""One rank's memory: a sealed memfd with a header page, a write-once area and two banks.

    [header 4096][write-once area][bank 0][bank 1]
    bank of an owner:  [blob area][unique area][replicated area]
    bank of a holder:  [blob area][unique area]

The agent creates a segment; the worker maps the same one from the descriptor it is passed. Nothing
here decides which bank is used, and nothing here locks: a bank has one writer at a time.

[Note: header updates]
Every header field is one aligned 8-byte word, written by a single store. Two processes share it
without a lock, so the order is the protocol: `begin` makes the bank WRITING first and changes its
version, `complete` writes COMPLETE last. A process killed in between leaves a bank that is not
COMPLETE. A reader trusts a bank only if version and state are the same before and after it read the
bytes. x86 keeps the order of stores; on ARM the flag is no barrier, so there "captured" counts only
when it arrived over the socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

from deadpool.core.types import Name
from deadpool.errors import LayoutMismatch, SnapshotError
from deadpool.store.checksum import checksum_of

PAGE_BYTES = 4096
BANKS = (0, 1)

_MAGIC = 0x4450534547303031  # "DPSEG001"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BANK_WORDS = 32
_PREFAULT_BYTES = 4 << 20  # about 4 ms of zeroing


class _Word(IntEnum):
    """Header words of the whole segment."""

    MAGIC = 0
    KIND = 1
    ONCE_BYTES = 2
    BLOB_CAPACITY = 3
    UNIQUE_BYTES = 4
    REPLICATED_BYTES = 5
    ONCE_SEALED = 6
    ONCE_LEN = 7
    ONCE_CHECKSUM = 8


class _BankWord(IntEnum):
    """Header words of one bank, counted from its first word."""

    STATE = 0
    VERSION = 1
    GENERATION = 2
    STEP = 3
    BLOB_LEN = 4
    SENT_BYTES = 5
    CHECKSUM = 6
    CHECKSUM_VERSION = 7  # version the checksum belongs to; 0 = none


class BankState(IntEnum):
    """Only COMPLETE counts."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


class SegmentKind(IntEnum):
    """OWN: of a rank of this host. HELD: replica of a rank of another host."""

    OWN = 1
    HELD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """Sizes of an OWNER's segment; a holder keeps the same values and leaves out the replicated area."""

    once_bytes: int
    blob_capacity: int
    unique_bytes: int
    replicated_bytes: int

    def bank_bytes(self, kind: SegmentKind) -> int:
        travels = _whole_pages(self.blob_capacity) + _whole_pages(self.unique_bytes)
        return travels + (_whole_pages(self.replicated_bytes) if kind is SegmentKind.OWN else 0)

    def segment_bytes(self, kind: SegmentKind) -> int:
        return PAGE_BYTES + _whole_pages(self.once_bytes) + len(BANKS) * self.bank_bytes(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class BankInfo:
    """What the header says of one bank. `name` is trusted only while the state is COMPLETE."""

    state: BankState
    name: Name | None = None
    blob_len: int = 0
    sent_bytes: int = 0
    checksum: int | None = None  # of blob and unique area; None: not computed yet
    version: int = 0

    @property
    def complete_name(self) -> Name | None:
        return self.name if self.state is BankState.COMPLETE else None


class Segment:
    """A mapped segment. Make one with `create` (agent) or `attach` (worker)."""

    def __init__(self, fd: int, mapping: mmap.mmap, layout: SegmentLayout, kind: SegmentKind) -> None:
        self.fd = fd
        self.layout = layout
        self.kind = kind
        self._mapping = mapping
        self._whole = memoryview(mapping)
        self._words = self._whole[:PAGE_BYTES].cast("Q")
        self._views: dict[tuple[int, int], memoryview] = {}
        self._once_end = PAGE_BYTES + _whole_pages(layout.once_bytes)

    @classmethod
    def create(
        cls, label: str, layout: SegmentLayout, *, kind: SegmentKind = SegmentKind.OWN, prefault: bool = True
    ) -> Segment:
        """Make a new, empty segment whose size can never change.

        Args:
            label: shown in /proc/<pid>/maps; it names nothing in the file system.
            layout: sizes of the owner's segment.
            kind: a HELD segment has no replicated area.
            prefault: touch every page now; untouched pages copy ten times slower.

        Raises:
            SnapshotError: the host has no memory for it.
        """
        size_bytes = layout.segment_bytes(kind)
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _map(fd, size_bytes, prefault)
        except OSError as error:
            os.close(fd)
            raise SnapshotError(
                f"no memory for segment {label} of {size_bytes} bytes: {error.strerror}; "
                "lower the state per host or raise its memory limit"
            ) from error
        segment = cls(fd, mapping, layout, kind)
        words = segment._words
        words[_Word.KIND] = kind
        words[_Word.ONCE_BYTES] = layout.once_bytes
        words[_Word.BLOB_CAPACITY] = layout.blob_capacity
        words[_Word.UNIQUE_BYTES] = layout.unique_bytes
        words[_Word.REPLICATED_BYTES] = layout.replicated_bytes
        for bank in BANKS:
            segment._set(bank, _BankWord.VERSION, 1)
        words[_Word.MAGIC] = _MAGIC
        return segment

    @classmethod
    def attach(cls, fd: int, *, prefault: bool = True) -> Segment:
        """Map a segment that another process made. Takes over `fd`, unless it raises.

        Raises:
            LayoutMismatch: the descriptor is no segment of this version of DeadPool.
        """
        size_bytes = os.fstat(fd).st_size
        if size_bytes < PAGE_BYTES or not _is_sealed(fd):
            raise LayoutMismatch(f"descriptor {fd} is no segment: {size_bytes} bytes or not sealed")
        with mmap.mmap(fd, PAGE_BYTES) as header, memoryview(header) as page, page.cast("Q") as words:
            magic, kind_word = words[_Word.MAGIC], words[_Word.KIND]
            layout = SegmentLayout(
                once_bytes=words[_Word.ONCE_BYTES],
                blob_capacity=words[_Word.BLOB_CAPACITY],
                unique_bytes=words[_Word.UNIQUE_BYTES],
                replicated_bytes=words[_Word.REPLICATED_BYTES],
            )
        if magic != _MAGIC or kind_word not in tuple(SegmentKind):
            raise LayoutMismatch(f"descriptor {fd} is no segment of this version of DeadPool")
        kind = SegmentKind(kind_word)
        if layout.segment_bytes(kind) != size_bytes:
            raise LayoutMismatch(f"segment of {size_bytes} bytes whose header says {layout}")
        return cls(fd, _map(fd, size_bytes, prefault), layout, kind)

    @property
    def size_bytes(self) -> int:
        return len(self._mapping)

    # -- areas

    def once_view(self) -> memoryview:
        return self._view(PAGE_BYTES, self.layout.once_bytes)

    def blob_view(self, bank: int) -> memoryview:
        return self._view(self._bank_start(bank), self.layout.blob_capacity)

    def unique_view(self, bank: int) -> memoryview:
        start = self._bank_start(bank) + _whole_pages(self.layout.blob_capacity)
        return self._view(start, self.layout.unique_bytes)

    def replicated_view(self, bank: int) -> memoryview:
        if self.kind is not SegmentKind.OWN:
            raise LayoutMismatch("a held segment has no replicated area: fetch it from its owner")
        start = self._bank_start(bank) + _whole_pages(self.layout.blob_capacity)
        return self._view(start + _whole_pages(self.layout.unique_bytes), self.layout.replicated_bytes)

    # -- banks

    def begin(self, bank: int, name: Name) -> None:
        """Open a bank for writing: whatever it held counts no more."""
        self._set(bank, _BankWord.STATE, BankState.WRITING)
        self._set(bank, _BankWord.VERSION, self._get(bank, _BankWord.VERSION) + 1)
        self._set(bank, _BankWord.SENT_BYTES, 0)
        self._set(bank, _BankWord.BLOB_LEN, 0)
        self._set(bank, _BankWord.STEP, name.step)
        self._set(bank, _BankWord.GENERATION, name.generation)

    def complete(self, bank: int, *, blob_len: int, checksum: int | None = None) -> None:
        """Say that every byte of the bank is written."""
        if self._get(bank, _BankWord.STATE) != BankState.WRITING:
            raise SnapshotError(f"bank {bank} is completed without being begun")
        if not 0 <= blob_len <= self.layout.blob_capacity:
            raise LayoutMismatch(f"blob of {blob_len} bytes, capacity {self.layout.blob_capacity}")
        self._set(bank, _BankWord.BLOB_LEN, blob_len)
        if checksum is not None:
            self.set_checksum(bank, self._get(bank, _BankWord.VERSION), checksum)
        self._set(bank, _BankWord.STATE, BankState.COMPLETE)

    def empty(self, bank: int) -> None:
        """Forget what the bank holds."""
        self._set(bank, _BankWord.STATE, BankState.EMPTY)
        self._set(bank, _BankWord.VERSION, self._get(bank, _BankWord.VERSION) + 1)
        self._set(bank, _BankWord.SENT_BYTES, 0)

    def bank_info(self, bank: int) -> BankInfo:
        for _ in range(8):
            version, state = self._get(bank, _BankWord.VERSION), self._get(bank, _BankWord.STATE)
            step, generation = self._get(bank, _BankWord.STEP), self._get(bank, _BankWord.GENERATION)
            blob_len, sent_bytes = self._get(bank, _BankWord.BLOB_LEN), self._get(bank, _BankWord.SENT_BYTES)
            checksum = self._get(bank, _BankWord.CHECKSUM)
            has_checksum = self._get(bank, _BankWord.CHECKSUM_VERSION) == version
            if (version, state) == (self._get(bank, _BankWord.VERSION), self._get(bank, _BankWord.STATE)):
                return BankInfo(
                    state=BankState(state),
                    name=None if state == BankState.EMPTY else Name(step=step, generation=generation),
                    blob_len=blob_len,
                    sent_bytes=sent_bytes,
                    checksum=checksum if has_checksum else None,
                    version=version,
                )
        # It changed under every look at it, so somebody is writing it.
        return BankInfo(state=BankState.WRITING)

    def bank_of(self, name: Name) -> int | None:
        """The bank in which `name` is complete."""
        for bank in BANKS:
            if self.bank_info(bank).complete_name == name:
                return bank
        return None

    def set_sent_bytes(self, bank: int, sent_bytes: int) -> None:
        """Progress of the stream that reads this bank, for status."""
        self._set(bank, _BankWord.SENT_BYTES, sent_bytes)

    def set_checksum(self, bank: int, version: int, checksum: int) -> None:
        """Remember the checksum of what the bank held at `version`; a later `begin` voids it."""
        self._set(bank, _BankWord.CHECKSUM_VERSION, 0)
        self._set(bank, _BankWord.CHECKSUM, checksum)
        self._set(bank, _BankWord.CHECKSUM_VERSION, version)

    def has_intact_bytes(self, bank: int) -> bool:
        """Recompute the checksum of a complete bank; true if it matches or none is known yet."""
        info = self.bank_info(bank)
        if info.checksum is None:
            return info.state is BankState.COMPLETE
        areas = (self.blob_view(bank)[: info.blob_len], self.unique_view(bank))
        actual = checksum_of(areas)
        return actual == info.checksum and self.bank_info(bank) == info

    # -- write-once area

    def write_once(self, record: bytes) -> None:
        """Fill and seal the write-once area.

        Raises:
            LayoutMismatch: the record does not fit.
        """
        if len(record) > self.layout.once_bytes:
            room_bytes = self.layout.once_bytes
            raise LayoutMismatch(f"write-once record of {len(record)} bytes, room for {room_bytes}")
        self.unseal_once()
        self.once_view()[: len(record)] = record
        self.seal_once(len(record))

    def seal_once(self, once_len: int, checksum: int | None = None) -> None:
        """Say that the first `once_len` bytes of the write-once area are final."""
        content = self.once_view()[:once_len]
        self._words[_Word.ONCE_LEN] = once_len
        self._words[_Word.ONCE_CHECKSUM] = checksum_of((content,)) if checksum is None else checksum
        self._words[_Word.ONCE_SEALED] = 1

    def unseal_once(self) -> None:
        self._words[_Word.ONCE_SEALED] = 0

    @property
    def once_is_sealed(self) -> bool:
        """Without its write-once area no copy counts. A segment that has no such area is born sealed."""
        return self.layout.once_bytes == 0 or self._words[_Word.ONCE_SEALED] == 1

    @property
    def once_len(self) -> int:
        return self._words[_Word.ONCE_LEN]

    @property
    def once_checksum(self) -> int:
        return self._words[_Word.ONCE_CHECKSUM]

    def close(self) -> None:
        """Unmap and close. Memory is returned when the last mapping of the last process goes."""
        for view in (*self._views.values(), self._words, self._whole):
            # A tensor made from a view still points into the mapping, which lives until it goes.
            with contextlib.suppress(BufferError):
                view.release()
        self._views.clear()
        with contextlib.suppress(BufferError):
            self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- helpers

    def _bank_start(self, bank: int) -> int:
        if bank not in BANKS:
            raise ValueError(f"bank {bank}; a segment has banks 0 and 1")
        return self._once_end + bank * self.layout.bank_bytes(self.kind)

    def _view(self, start: int, length: int) -> memoryview:
        view = self._views.get((start, length))
        if view is None:
            view = self._views[(start, length)] = self._whole[start : start + length]
        return view

    def _get(self, bank: int, word: _BankWord) -> int:
        return self._words[_BANK_WORDS * (1 + bank) + word]

    def _set(self, bank: int, word: _BankWord, value: int) -> None:
        self._words[_BANK_WORDS * (1 + bank) + word] = value


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK != 0
    except OSError:
        return False


def _map(fd: int, size_bytes: int, prefault: bool) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes)
    if not prefault:
        return mapping
    try:
        # In pieces: Python holds the GIL during madvise, and heartbeats share this process.
        for start in range(0, size_bytes, _PREFAULT_BYTES):
            piece_bytes = min(_PREFAULT_BYTES, size_bytes - start)
            try:
                mapping.madvise(_MADV_POPULATE_WRITE, start, piece_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                for offset in range(start, start + piece_bytes, PAGE_BYTES):  # a kernel before 5.14
                    mapping[offset]  # a read fault of shared memory allocates and maps the page too
    except OSError:
        mapping.close()
        raise
    return mapping
