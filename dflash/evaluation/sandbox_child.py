"""Confines this process and becomes one Python program; started as `python -I -B sandbox_child.py LIMITS CHANNEL PROGRAM`.

It imports only the standard library, so it starts in milliseconds. Besides limits it uses three means of the kernel:

- A filter that allows system calls by a list and refuses all others. libseccomp makes it: that library comes with every
  usual Linux distribution and knows the numbers of the calls on each machine. Its packages on PyPI only wrap it.
- Landlock, which denies all files but the program's own, Python's modules and the system's libraries.
- Another user without capabilities, where root started it.

The filter is required. The other two are used where the kernel has them. Namespaces (unshare, bubblewrap) are not used,
because many systems and containers do not permit them.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import struct
import sys
import types
from builtins import compile, exec  # a program may replace those of `builtins` before its tests run
from collections.abc import Sequence
from typing import Any


# What CPython and its extension modules ask of the kernel. Names that this machine does not know are skipped.
ALLOWED = [
    "read", "readv", "pread64", "write", "writev", "lseek", "close", "dup", "dup2", "dup3", "pipe", "pipe2", "poll",
    "ppoll", "select", "pselect6", "stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "access",
    "faccessat", "readlink", "readlinkat", "getcwd", "chdir", "fchdir", "getdents64", "mmap", "munmap", "mremap",
    "mprotect", "madvise", "brk", "futex", "set_robust_list", "rseq", "sched_yield", "sched_getaffinity", "getcpu",
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "restart_syscall", "pause", "alarm", "getitimer",
    "setitimer", "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time", "getrandom",
    "getpid", "getppid", "gettid", "getuid", "geteuid", "getgid", "getegid", "getgroups", "uname", "sysinfo",
    "getrusage", "times", "getrlimit", "exit", "exit_group",
]  # fmt: skip
# The C library and CPython fall back on other calls, but only after these errors.
FALLBACKS = {"clone3": errno.ENOSYS, "openat2": errno.ENOSYS, "faccessat2": errno.ENOSYS, "ioctl": errno.ENOTTY}
MACHINES = ("x86_64", "aarch64")  # elsewhere `clone` may take its arguments in another order
WHOLE = 0xFFFFFFFF  # all bits of an `int`
WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x00010000
THREAD_FLAGS = 0x007D0F00  # all that a C library sets for a thread
PR_SET_NAME, PR_GET_NAME, PR_SET_NO_NEW_PRIVS = 15, 16, 38

# Calls that are allowed with certain arguments: the place of each, those of its bits that count, and what they must be.
CONDITIONAL: list[tuple[Any, ...]] = [
    ("open", (1, WRITING, os.O_RDONLY)),
    ("openat", (2, WRITING, os.O_RDONLY)),
    ("clone", (0, WHOLE ^ THREAD_FLAGS | CLONE_THREAD, CLONE_THREAD)),
    ("prlimit64", (0, WHOLE, 0), (2, 2**64 - 1, 0)),  # getrlimit() of its own
    ("prctl", (0, WHOLE, PR_SET_NAME)),
    ("prctl", (0, WHOLE, PR_GET_NAME)),
    ("fcntl", (1, WHOLE, fcntl.F_DUPFD)),
    ("fcntl", (1, WHOLE, fcntl.F_DUPFD_CLOEXEC)),
    ("fcntl", (1, WHOLE, fcntl.F_GETFD)),
    ("fcntl", (1, WHOLE, fcntl.F_SETFD)),
    ("fcntl", (1, WHOLE, fcntl.F_GETFL)),
]

# libseccomp.
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
FOREIGN_CALLS = 2  # the attribute that says what happens to calls in another machine's numbering
MASKED_EQUAL = 7

# Landlock. Its calls have the same numbers on every machine.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NUM_RIGHTS = (13, 14, 15, 15, 16)  # of files, in version 1 and after
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3

NOBODY = 65534
CAPABILITY_VERSION = 0x20080522
SYSTEM_FILES = (
    "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/etc/localtime",
    "/dev/null", "/dev/urandom",
)  # fmt: skip


def limit(kind: int, value: int) -> None:
    """Sets a limit of the kernel, which the process cannot raise."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def confine(program: str) -> None:
    """Takes from this process all that a program does not need; OSError with the reason where that cannot be."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(f"{sys.platform} on {platform.machine()} has no filter for system calls that is known here")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    paths = readable_paths(program)
    deny_other_files(libc, paths)
    drop_root(libc, paths)
    filter_calls()


def readable_paths(program: str) -> list[str]:
    """The program's folder, Python's modules and the libraries that they load."""
    paths = [
        os.path.dirname(program),
        *sys.path,
        os.path.join(sys.prefix, "lib"),
        os.path.join(sys.base_prefix, "lib"),
        *SYSTEM_FILES,
    ]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def deny_other_files(libc: ctypes.CDLL, paths: Sequence[str]) -> None:
    """Denies all files but those at and below `paths`, and changes of any file; does nothing on a kernel without Landlock."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    num_rights = NUM_RIGHTS[min(version, len(NUM_RIGHTS)) - 1]
    all_rights = 2**num_rights - 1
    ruleset = libc.syscall(CREATE_RULESET, struct.pack("Q", all_rights), 8, 0)
    for path in paths:
        rights = READ_FILE
        if os.path.isdir(path):
            rights |= READ_FOLDER
        place = os.open(path, os.O_PATH)
        libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    if libc.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(f"Landlock cannot be used here: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def drop_root(libc: ctypes.CDLL, paths: Sequence[str]) -> None:
    """Gives up all capabilities, and the user root for one that owns nothing.

    Where that user cannot read `paths`, as with an interpreter below /root, the user stays root, without capabilities.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container may know no other user
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, 0, 0)  # `access` answers for the first of the three
            user = NOBODY
            for path in paths:
                if not os.access(path, os.R_OK):
                    user = 0
            os.setresuid(user, user, user)
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(f"capabilities cannot be dropped here: {os.strerror(ctypes.get_errno())}")


def filter_calls() -> None:
    """Refuses all system calls but those of [`add_rules`]."""
    try:
        seccomp = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise OSError("libseccomp.so.2 is not installed (Debian, Ubuntu: apt install libseccomp2)") from error
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(REFUSE | errno.EPERM))
    add_rules(seccomp, rules)
    if seccomp.seccomp_load(rules) != 0:
        raise OSError("the kernel takes no filter for system calls")


def add_rules(seccomp: ctypes.CDLL, rules: ctypes.c_void_p) -> None:
    """Fills libseccomp's `rules`: calls that are allowed, some of them only with certain arguments."""
    seccomp.seccomp_attr_set(rules, FOREIGN_CALLS, KILL)
    for name in ALLOWED:
        _add_rule(seccomp, rules, ALLOW, name)
    for name, error in FALLBACKS.items():
        _add_rule(seccomp, rules, REFUSE | error, name)
    for name, *conditions in CONDITIONAL:
        _add_rule(seccomp, rules, ALLOW, name, *conditions)
    _add_rule(seccomp, rules, ALLOW, "tgkill", (0, WHOLE, os.getpid()))  # abort()


def _add_rule(
    seccomp: ctypes.CDLL, rules: ctypes.c_void_p, action: int, name: str, *conditions: tuple[int, int, int]
) -> None:
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    if number == -1:  # newer than this libseccomp
        return
    packed = b""
    for place, bits, value in conditions:
        packed += struct.pack("IIQQ", place, MASKED_EQUAL, bits, value)
    error = seccomp.seccomp_rule_add_array(rules, action, number, len(conditions), packed)
    if error != 0:
        raise OSError(f"libseccomp takes no rule for {name}: {os.strerror(-error)}")


def run(path: str, channel: int) -> None:
    """Runs a program; then asks for its tests, runs them in its names, and sends the word that comes after them.

    Neither the tests nor the word are in this process while the program runs, and the word waits in the kernel until the
    tests have ended.
    """
    with open(path, "rb") as file:
        source = file.read()
    program = types.ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)
    os.write(channel, b"?")
    size = int.from_bytes(os.read(channel, 8), "big")
    tests = b""
    while len(tests) < size:
        tests += os.read(channel, size - len(tests))
    exec(compile(tests, "tests", "exec", dont_inherit=True), program.__dict__)
    os.write(channel, os.read(channel, 16))


def main() -> None:
    """Reads the arguments, confines this process and becomes the program."""
    limits = json.loads(sys.argv[1])
    channel = int(sys.argv[2])
    path = sys.argv[3]
    sys.argv = [path]
    limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    limit(resource.RLIMIT_AS, limits["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    limit(resource.RLIMIT_CORE, 0)
    try:
        confine(path)
    except OSError as problem:
        if not limits["unsafe_code"]:
            sys.exit(str(problem))
        # No new process, and no thread either. The count is over all processes of the user, so 0 is exceeded already.
        limit(resource.RLIMIT_NPROC, 0)
    run(path, channel)


if __name__ == "__main__":
    main()
