"""How the making of pictures shares processors: in turns so short that nobody waits for one to end.

Being "nice" alone is not enough beside a rank that computes in many short bursts: Linux lets a nice thread finish its
turn of some milliseconds after the rank has woken up. Since Linux 6.12 a thread may ask for shorter turns.
"""

from __future__ import annotations

import ctypes
import os
import platform

TURN_NS = 100_000
"""The shortest there is."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call, for which C libraries have no function


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), as it was at first."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),  # of a turn
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_turns() -> bool:
    """From now on this thread's turns are short; False: the system has no such thing, and all is as before."""
    call = _SCHED_SETATTR.get(platform.machine())
    if call is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _SchedAttr(size=ctypes.sizeof(_SchedAttr), policy=os.SCHED_OTHER, nice=nice, runtime=TURN_NS)
    return bool(ctypes.CDLL(None).syscall(call, 0, ctypes.byref(wanted), 0) == 0)
