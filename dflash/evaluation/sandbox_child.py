"""Runs one Python program under limits that it cannot lift; started as `python -I -B sandbox_child.py LIMITS PROGRAM`.

It imports only the standard library, so it starts in milliseconds. On every POSIX system it limits CPU seconds,
address space and the size of a file, and forbids core dumps and new processes. On Linux a system-call filter, which
binds root too and allows threads, forbids processes, programs, signals to others, files opened for writing, and
sockets.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import runpy
import struct
import sys


# By machine: its number in the kernel, and those of the system calls that are refused: always, if they open a file for writing
# (by flags in the argument of that place), if they clone more than a thread.
with open(os.path.join(os.path.dirname(__file__), "system_calls.json"), encoding="ascii") as _file:
    REFUSED = json.load(_file)
WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
THREAD = 0x00010000  # CLONE_THREAD
OTHER_ABI = 0x40000000  # x86_64's 32-bit twins of the calls above have numbers from here on

# The kernel's filter: instructions, actions, and where a call's number and arguments are.
LOAD, EQUALS, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


def limit(limits: dict[str, int], may_have_threads: bool) -> None:
    """Sets the kernel's limits; beyond them the program is killed or a call fails."""
    wanted = [
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ]
    if not may_have_threads:  # the count is over all processes of the user, so 0 is exceeded already
        wanted.append((resource.RLIMIT_NPROC, 0))
    for kind, value in wanted:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def call_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter's program: instruction, steps to skip if true and if false, operand."""
    calls = REFUSED[machine]
    cloning = calls["cloning"]
    program = [(LOAD, 0, 0, MACHINE_AT), (EQUALS, 1, 0, calls["number"]), (RETURN, 0, 0, KILL)]
    program += [(LOAD, 0, 0, NUMBER_AT), (AT_LEAST, 0, 1, OTHER_ABI), (RETURN, 0, 0, UNKNOWN)]
    for number in calls["refused"].values():
        program += [(EQUALS, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    for number, place in calls["opening"].values():
        flags = ARGUMENTS_AT + 8 * place
        program += [(EQUALS, 0, 4, number), (LOAD, 0, 0, flags), (ANY_BIT, 0, 1, WRITING), (RETURN, 0, 0, REFUSE)]
        program.append((RETURN, 0, 0, ALLOW))
    # The C library asks for a thread by clone where there is no clone3, whose flags no filter can read.
    program += [(EQUALS, 0, 1, cloning["clone3"]), (RETURN, 0, 0, UNKNOWN), (EQUALS, 0, 3, cloning["clone"])]
    program += [(LOAD, 0, 0, ARGUMENTS_AT), (ANY_BIT, 1, 0, THREAD), (RETURN, 0, 0, REFUSE)]
    return [*program, (RETURN, 0, 0, ALLOW)]


def filter_calls() -> bool:
    """Refuses those calls from now on; False if this kernel or machine has no such filter."""
    if sys.platform != "linux" or platform.machine() not in REFUSED:
        return False
    program = call_filter(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0) == 0


def main() -> None:
    """Reads both arguments, confines this process and becomes the program."""
    limits, path = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv = [path]
    limit(limits, may_have_threads=True)
    if not filter_calls():
        limit(limits, may_have_threads=False)
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
