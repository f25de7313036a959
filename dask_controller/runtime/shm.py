"""Buffers handed over between processes of one machine without a socket.

Owns a pool of memory segments per sending process. A segment is anonymous memory with a file descriptor
(``memfd_create``), which the receiver opens through ``/proc/<pid>/fd``: it has no name, so nothing can be left behind
whatever way a process dies, and it does not count against the size of ``/dev/shm``, which is 64 MB in a container.
Segments are kept and used again, because filling fresh memory is slower than a socket, while a kept mapping is several
times faster. The receiver's tensors are views on the segment; it goes back to the pool when the last view is gone.

Everything here gives up quietly (None) where it cannot work: another machine, another container, no ``memfd``, the
limit reached. The caller then sends the bytes as it always could.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from distributed.protocol.serialize import to_serialize

from dask_controller.protocol.serialize import Packed

__all__ = ["Link", "SegmentPool", "attach", "fetch_link", "node_token", "own_pool", "own_pool_release", "process_token"]

#: Values with fewer bytes in buffers travel in the message: the detour would not pay.
MIN_BYTES = 1 << 20

_PAGE = mmap.PAGESIZE
#: Offsets inside a segment are multiples of this, so that any dtype and vector instruction finds its data aligned.
_ALIGN = 64
#: Mappings of other processes' segments that are kept.
_MAX_ATTACHED = 64


def node_token() -> str | None:
    """What two processes must have in common to share memory this way; None where the machine cannot do it."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            boot = stream.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie holds nothing any more.
    return None if fields[0] in "ZX" else fields[19]


def process_token() -> tuple[int, str]:
    """This process, told apart from a later one with the same id."""
    pid = os.getpid()
    return pid, _start_time(pid) or ""


def _is_alive(process: tuple[int, str]) -> bool:
    return _start_time(process[0]) == process[1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass
class _Segment:
    """One piece of memory and who looks at it."""

    number: int
    fd: int
    memory: mmap.mmap
    size: int
    inode: int
    #: The process that holds views on it, or None while it is free.
    holder: tuple[int, str] | None = None
    #: The link that handed it out.
    link: int = 0
    stamp: int = 0


@dataclass
class SegmentPool:
    """The segments of this process, for what it sends.

    Parameters
    ----------
    limit_nbytes : int
        Bytes that all segments may have together, in use or kept for the next time.
    """

    limit_nbytes: int
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Any = field(default_factory=itertools.count)
    _clock: Any = field(default_factory=itertools.count)
    _pid: int = field(default_factory=os.getpid)
    _probe: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def num_in_use(self) -> int:
        """Segments that some receiver still looks at."""
        return sum(segment.holder is not None for segment in self._segments.values())

    def write(self, packed: Packed, receiver: tuple[int, str], link: int = 0) -> dict[str, Any] | None:
        """Copy the frames of ``packed`` into a segment for ``receiver``.

        Parameters
        ----------
        packed : Packed
            A value; its frames stay as they are.
        receiver : (int, str)
            :func:`process_token` of the process that will read it.
        link : int
            Who hands it out, for :meth:`abandon`.

        Returns
        -------
        dict or None
            What :func:`attach` needs, to be sent instead of the frames; None to send them as they are.
        """
        sizes = [memoryview(frame).nbytes for frame in packed.frames]
        total = sum(_aligned(size) for size in sizes)
        if sum(sizes) < MIN_BYTES or self.limit_nbytes <= 0:
            return None
        segment = self._take(total, receiver)
        if segment is None:
            return None
        segment.link = link
        target = np.frombuffer(segment.memory, dtype=np.uint8)
        offset = 0
        for frame, size in zip(packed.frames, sizes, strict=True):
            if size:
                target[offset : offset + size] = np.frombuffer(memoryview(frame).cast("B"), dtype=np.uint8)
            offset += _aligned(size)
        pid, started = process_token()
        return {
            "header": packed.header,
            "pid": pid,
            "started": started,
            "fd": segment.fd,
            "inode": segment.inode,
            "segment": segment.number,
            "size": segment.size,
            "sizes": sizes,
        }

    def probe(self) -> tuple[int, int] | None:
        """Descriptor and inode of a page by which others find out whether they can open this process's memory."""
        with self._lock:
            if self._probe is None:
                try:
                    self._probe = os.memfd_create("dask-controller-probe", os.MFD_CLOEXEC)
                except OSError:
                    return None
            return self._probe, os.fstat(self._probe).st_ino

    def release(self, numbers: Sequence[int]) -> None:
        """The receiver has let go of these segments."""
        with self._lock:
            for number in numbers:
                segment = self._segments.get(number)
                if segment is not None:
                    segment.holder = None
                    segment.stamp = next(self._clock)

    def abandon(self, link: int) -> None:
        """Leave what this link has handed out, and nobody will give back, to the receivers that look at it."""
        with self._lock:
            for segment in list(self._segments.values()):
                if segment.link == link and segment.holder is not None:
                    self._drop(segment)

    def close(self) -> None:
        """Give all memory back; receivers keep what they look at."""
        with self._lock:
            for segment in list(self._segments.values()):
                self._drop(segment)
            if self._probe is not None:
                os.close(self._probe)
                self._probe = None

    def _take(self, nbytes: int, receiver: tuple[int, str]) -> _Segment | None:
        with self._lock:
            # Not one that is much too large: it would be missing when a large value comes.
            fitting = [s for s in self._free() if nbytes <= s.size <= max(4 * nbytes, 4 * MIN_BYTES)]
            if fitting:
                segment = min(fitting, key=lambda s: s.size)
                segment.holder = receiver
                return segment
            size = -(-max(nbytes + nbytes // 8, MIN_BYTES) // _PAGE) * _PAGE
            self._make_room(size)
            if self.nbytes + size > self.limit_nbytes:
                return None
            segment_or_none = self._create(size)
            if segment_or_none is not None:
                segment_or_none.holder = receiver
            return segment_or_none

    def _free(self) -> list[_Segment]:
        return [segment for segment in self._segments.values() if segment.holder is None]

    def _make_room(self, size: int) -> None:
        if self.nbytes + size <= self.limit_nbytes:
            return
        for segment in self._segments.values():
            # Its receiver died without a word.
            if segment.holder is not None and not _is_alive(segment.holder):
                segment.holder = None
        for segment in sorted(self._free(), key=lambda s: s.stamp):
            if self.nbytes + size <= self.limit_nbytes:
                return
            self._drop(segment)

    def _create(self, size: int) -> _Segment | None:
        try:
            fd = os.memfd_create("dask-controller", os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except (OSError, ValueError):
            os.close(fd)
            return None
        segment = _Segment(next(self._numbers), fd, memory, size, os.fstat(fd).st_ino)
        self._segments[segment.number] = segment
        return segment

    def _drop(self, segment: _Segment) -> None:
        self._segments.pop(segment.number, None)
        os.close(segment.fd)
        with contextlib.suppress(BufferError):
            segment.memory.close()


_own: SegmentPool | None = None
_own_lock = threading.Lock()


def own_pool(limit_nbytes: int) -> SegmentPool:
    """The pool of this process; a forked child gets one of its own."""
    global _own
    with _own_lock:
        if _own is None or _own._pid != os.getpid():
            _own = SegmentPool(limit_nbytes)
        _own.limit_nbytes = limit_nbytes
        return _own


def own_pool_release(value: dict[str, Any]) -> None:
    """Take back what :meth:`Link.encode` made, which was never sent."""
    if _own is not None:
        _own.release([value["shm"]["segment"]])


_link_numbers = itertools.count(1)


class Link:
    """Hand-over of values to and from one other process, by memory where that pays and is possible.

    Parameters
    ----------
    limit_nbytes : int
        See :class:`SegmentPool`; 0 turns the way by memory off.
    give_back : callable
        Tells the other process, from any thread, that a segment of its own is free again.
    """

    def __init__(self, limit_nbytes: int, give_back: Callable[[int], None] = lambda segment: None) -> None:
        self.limit_nbytes = limit_nbytes
        self.give_back = give_back
        #: The other process, once both are known to share memory.
        self.peer: tuple[int, str] | None = None
        self._number = next(_link_numbers)

    def hello(self) -> dict[str, Any]:
        """What the other process needs to know of this one."""
        pid, started = process_token()
        node = node_token() if self.limit_nbytes > 0 else None
        probe = None if node is None else own_pool(self.limit_nbytes).probe()
        return {"node": node, "pid": pid, "started": started, "probe": probe}

    def meet(self, hello: dict[str, Any]) -> None:
        """Take the other's :meth:`hello`, and try whether its memory can be opened from here."""
        mine = self.hello()
        if mine["node"] is None or hello["node"] != mine["node"] or hello["pid"] == mine["pid"]:
            return
        try:
            # A hardened kernel may refuse although all identities agree.
            os.close(_open(hello["pid"], *hello["probe"]))
        except (OSError, TypeError):
            return
        self.peer = (hello["pid"], hello["started"])

    def encode(self, packed: Packed) -> Any:
        """The form in which ``packed`` travels to the other process."""
        if self.peer is not None and packed.frames:
            description = own_pool(self.limit_nbytes).write(packed, self.peer, self._number)
            if description is not None:
                return {"shm": description}
        return to_serialize(packed) if packed.frames else packed.header

    def decode(self, value: Any) -> Packed:
        """Undo :meth:`encode` of the other process."""
        if isinstance(value, Packed):
            return value
        if isinstance(value, dict):
            return attach(value["shm"], self.give_back)
        return Packed(bytes(value), [], [])

    def free(self, numbers: Sequence[int]) -> None:
        """The other process has given segments of this one back."""
        own_pool(self.limit_nbytes).release(numbers)

    def close(self) -> None:
        """The conversation is over. What either side still looks at stays with it, and goes when that goes."""
        if self.peer is None:
            return
        own_pool(self.limit_nbytes).abandon(self._number)
        with _attached_lock:
            for key in [key for key in _attached if key[:2] == self.peer]:
                del _attached[key]


def fetch_link(limit_nbytes: int, loop: asyncio.AbstractEventLoop, release: Callable[[int], Awaitable[Any]]) -> Link:
    """A link for one fetched value: ``release`` is awaited on ``loop`` when the last view on a segment is gone."""

    async def quietly(segment: int) -> None:
        with contextlib.suppress(OSError):  # the producer is gone, and its memory with it
            await release(segment)

    def give_back(segment: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(quietly(segment)))

    return Link(limit_nbytes, give_back)


# ---------------------------------------------------------------------- the receiving side

_attached: OrderedDict[tuple[int, str, int, int], mmap.mmap] = OrderedDict()
_attached_lock = threading.Lock()


def attach(description: dict[str, Any], on_release: Callable[[int], None]) -> Packed:
    """The value that another process wrote with :meth:`SegmentPool.write`.

    Parameters
    ----------
    description : dict
        What ``write`` returned.
    on_release : callable
        Called with the segment's number, from any thread, when the last view on it is gone.

    Returns
    -------
    Packed
        Its frames are writable views on the sender's segment.

    Raises
    ------
    OSError
        The sender is gone, or cannot be reached through ``/proc``.
    """
    memory = _mapping(description)
    base = np.frombuffer(memory, dtype=np.uint8, count=description["size"])
    # Everything made from the frames keeps ``base`` alive through the buffer protocol.
    weakref.finalize(base, on_release, description["segment"]).atexit = False
    view = memoryview(cast(Any, base))
    frames = []
    offset = 0
    for size in description["sizes"]:
        frames.append(view[offset : offset + size])
        offset += _aligned(size)
    return Packed(description["header"], frames)


def _open(pid: int, number: int, inode: int) -> int:
    """Open the memory behind a descriptor of another process."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise OSError(f"process {pid} has closed that memory")
    return fd


def _mapping(description: dict[str, Any]) -> mmap.mmap:
    key = (description["pid"], description["started"], description["fd"], description["inode"])
    with _attached_lock:
        memory = _attached.get(key)
        if memory is not None:
            _attached.move_to_end(key)
            return memory
        fd = _open(description["pid"], description["fd"], description["inode"])
        try:
            memory = mmap.mmap(fd, description["size"])
        finally:
            os.close(fd)
        _attached[key] = memory
        while len(_attached) > _MAX_ATTACHED:
            # Views that are still about keep the mapping itself alive.
            _attached.popitem(last=False)
        return memory
