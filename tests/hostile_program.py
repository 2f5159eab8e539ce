"""What a scored program may try; `tests/hostile_evaluator.py` runs it confined, with a line before it that sets `FACTS`.

It prints, by name, the error of each attack, or "done" if there was none.
"""

import ctypes
import errno
import fcntl
import json
import os
import struct
import sys


FACTS: dict = globals()["FACTS"]
PARENT: int = FACTS["parent"]
VICTIM: bytes = FACTS["victim"].encode()
MADE: bytes = os.path.join(FACTS["folder"], "made").encode()
AT_FDCWD = -100

libc = ctypes.CDLL(None, use_errno=True)
number_of = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name


def call(name, *arguments):
    """A system call, without the C library's own ways."""
    number = number_of(name.encode())
    if number < 0:
        raise LookupError(name)
    whole = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = libc.syscall(ctypes.c_long(number), *whole)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def opened():
    """The victim, for reading where that is allowed; else the program's own file, whose owner is the same."""
    try:
        return os.open(VICTIM, os.O_RDONLY)
    except PermissionError:
        return os.open(__file__, os.O_RDONLY)


def write_by_handle():
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    call("name_to_handle_at", AT_FDCWD, VICTIM, handle, ctypes.create_string_buffer(4), 0)
    mount = os.open(FACTS["folder"], os.O_RDONLY)
    os.write(call("open_by_handle_at", mount, handle, os.O_RDWR), b"HACKED")


def take_descriptors():
    process = call("pidfd_open", PARENT, 0)
    for number in FACTS["open_files"]:
        os.write(call("pidfd_getfd", process, number, 0), b"FORGED")


def take_descriptors_unasked():
    """As if `pidfd_open` were not needed."""
    call("pidfd_getfd", 0, FACTS["open_files"][0], 0)


def read(path):
    def attack():
        with open(path, "rb") as file:
            file.read(1)

    return attack


def reopen_for_writing():
    for number in FACTS["open_files"]:
        os.write(os.open(f"/proc/{PARENT}/fd/{number}", os.O_WRONLY), b"FORGED")


def inherit_descriptors():
    """The evaluator's are inheritable. Allowed are the standard three, each one way, and the channel of the tests."""
    numbers = [number for number in range(256) if is_open(number)]
    modes = [fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE for number in numbers]
    if modes == [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY, os.O_RDWR]:
        raise PermissionError(errno.EPERM, "there are no others")


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def write_own_output_anew():
    os.open("/proc/self/fd/1", os.O_RDWR)


def read_memory():
    target = ctypes.create_string_buffer(8)
    vector = struct.pack("PN", ctypes.addressof(target), 8)
    call("process_vm_readv", PARENT, vector, 1, vector, 1, 0)


def set_flags(flags):
    """FS_IOC_SETFLAGS."""
    call("ioctl", opened(), 0x40086602, ctypes.create_string_buffer(struct.pack("N", flags)))


def type_into_terminal():
    """TIOCSTI, also with bits above the 32 that the kernel reads."""
    call("ioctl", 0, 0x5412 | 1 << 32, ctypes.create_string_buffer(b"x"))


XATTR = (b"user.hacked", b"x", 1, 0)
TIMES = struct.pack("NNNN", 0, 0, 0, 0)
ACL = struct.pack("=QIIQ", 0, 0, 0, 0)
QUEUE = struct.pack("NNNN", 0, 10, 10, 0) + bytes(32)
OPEN_HOW = struct.pack("QQQ", os.O_WRONLY | os.O_CREAT, 0o600, 0)
LOCK = struct.pack("hhNNi", fcntl.F_WRLCK, 0, 0, 0, 0) + bytes(16)
LIMIT = struct.pack("NN", 10**6, 10**6)

ATTACKS = {
    "inherit descriptors": inherit_descriptors,  # first, before others leave some open
    # Files
    "write by handle": write_by_handle,
    "open for writing": lambda: os.open(VICTIM, os.O_WRONLY),
    "open for both": lambda: os.open(VICTIM, os.O_RDWR),
    "open to append": lambda: os.open(VICTIM, os.O_WRONLY | os.O_APPEND),
    "open and truncate": lambda: os.open(VICTIM, os.O_RDONLY | os.O_TRUNC),
    "open and create": lambda: os.open(MADE, os.O_RDONLY | os.O_CREAT),
    "open with access mode 3": lambda: os.open(VICTIM, os.O_ACCMODE),
    "open nameless": lambda: os.open(FACTS["folder"], os.O_TMPFILE | os.O_RDWR),
    "open with high bits": lambda: call("openat", AT_FDCWD, VICTIM, os.O_RDWR | 1 << 40, 0),
    "openat2": lambda: call("openat2", AT_FDCWD, MADE, OPEN_HOW, len(OPEN_HOW)),
    "creat": lambda: call("creat", MADE, 0o600),
    "write in its own folder": lambda: open("a", "w").write("x"),  # noqa: SIM115
    "write its own output anew": write_own_output_anew,
    "truncate": lambda: call("truncate", VICTIM, 0),
    "ftruncate": lambda: call("ftruncate", 1, 0),
    "fallocate": lambda: call("fallocate", 1, 0, 0, 10**9),
    "unlink": lambda: call("unlinkat", AT_FDCWD, VICTIM, 0),
    "rmdir": lambda: call("unlinkat", AT_FDCWD, FACTS["folder"].encode(), 0x200),
    "rename": lambda: call("renameat2", AT_FDCWD, VICTIM, AT_FDCWD, MADE, 0),
    "mkdir": lambda: call("mkdirat", AT_FDCWD, MADE, 0o700),
    "mknod": lambda: call("mknodat", AT_FDCWD, MADE, 0o010600, 0),
    "link": lambda: call("linkat", AT_FDCWD, VICTIM, AT_FDCWD, MADE, 0),
    "symlink": lambda: call("symlinkat", VICTIM, AT_FDCWD, MADE),
    # What a file is, through its name and through a descriptor opened to read
    "chmod": lambda: call("fchmodat", AT_FDCWD, VICTIM, 0o777),
    "fchmod": lambda: call("fchmod", opened(), 0o777),
    "fchmodat2": lambda: call("fchmodat2", AT_FDCWD, VICTIM, 0o777, 0),
    "chown": lambda: call("fchownat", AT_FDCWD, VICTIM, 1, 1, 0),
    "fchown": lambda: call("fchown", opened(), 1, 1),
    "utime": lambda: call("utime", VICTIM, TIMES),
    "utimes": lambda: call("utimes", VICTIM, TIMES),
    "futimesat": lambda: call("futimesat", AT_FDCWD, VICTIM, TIMES),
    "utimensat": lambda: call("utimensat", AT_FDCWD, VICTIM, TIMES, 0),
    "utimensat of a descriptor": lambda: call("utimensat", opened(), 0, TIMES, 0),
    "setxattr": lambda: call("setxattr", VICTIM, *XATTR),
    "lsetxattr": lambda: call("lsetxattr", VICTIM, *XATTR),
    "fsetxattr": lambda: call("fsetxattr", opened(), *XATTR),
    "removexattr": lambda: call("removexattr", VICTIM, b"user.kept"),
    "fremovexattr": lambda: call("fremovexattr", opened(), b"user.kept"),
    "setxattrat": lambda: call("setxattrat", AT_FDCWD, VICTIM, 0, b"user.hacked", ACL, len(ACL)),
    "removexattrat": lambda: call("removexattrat", AT_FDCWD, VICTIM, 0, b"user.kept"),
    "chattr +i": lambda: set_flags(0x10),  # root's
    "chattr +d": lambda: set_flags(0x40),  # the owner's
    "a lock": lambda: call("fcntl", opened(), fcntl.F_SETLK, LOCK),
    "a lease": lambda: call("fcntl", opened(), fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "flock": lambda: call("flock", opened(), fcntl.LOCK_EX),
    # The evaluator's files, sockets, memory and environment
    "take descriptors": take_descriptors,
    "take descriptors unasked": take_descriptors_unasked,
    "reopen descriptors": reopen_for_writing,
    "read its environment": read(f"/proc/{PARENT}/environ"),
    "read its memory map": read(f"/proc/{PARENT}/maps"),
    "read its memory": read(f"/proc/{PARENT}/mem"),
    "see a descriptor": lambda: os.readlink(f"/proc/{PARENT}/fd/0"),
    "process_vm_readv": read_memory,
    "ptrace": lambda: call("ptrace", 0x4206, PARENT, 0, 0),  # PTRACE_SEIZE
    "kcmp": lambda: call("kcmp", PARENT, PARENT, 0, 0, 0),
    "read its limits": lambda: call("prlimit64", PARENT, 7, 0, ctypes.create_string_buffer(16)),
    "set its limits": lambda: call("prlimit64", PARENT, 7, LIMIT, 0),
    # Signals and processes
    "kill": lambda: call("kill", PARENT, 0),
    "kill all": lambda: call("kill", -1, 0),
    "tkill": lambda: call("tkill", PARENT, 0),
    "tgkill": lambda: call("tgkill", PARENT, PARENT, 0),
    "rt_sigqueueinfo": lambda: call("rt_sigqueueinfo", PARENT, 0, bytes(128)),
    "signal by a descriptor's owner": lambda: call("fcntl", 0, fcntl.F_SETOWN, PARENT),
    "fork": os.fork,
    "clone": lambda: call("clone", 17, 0, 0, 0, 0),
    "clone with a pidfd": lambda: call("clone", 0x3D0F00 | 0x1000, 0, 0, 0, 0),
    "clone a namespace": lambda: call("clone", 0x3D0F00 | 0x10000000, 0, 0, 0, 0),
    "clone3": lambda: call("clone3", bytes(64), 64),
    "start a program": lambda: os.execv(sys.executable, [sys.executable, "-c", "print('started')"]),
    "execveat": lambda: call("execveat", AT_FDCWD, sys.executable.encode(), 0, 0, 0),
    "setsid": os.setsid,
    # Its limits
    "setrlimit": lambda: call("setrlimit", 7, LIMIT),
    "prlimit64": lambda: call("prlimit64", 0, 7, LIMIT, 0),
    "prctl of who may trace": lambda: call("prctl", 4, 1, 0, 0, 0),
    "prctl of a signal": lambda: call("prctl", 1, 9, 0, 0, 0),
    "prctl with high bits": lambda: call("prctl", 15 << 32 | 4, 1, 0, 0, 0),
    # Ways out of the process, and what outlives it
    "socket": lambda: call("socket", 2, 1, 0),
    "socketpair": lambda: call("socketpair", 1, 1, 0, ctypes.create_string_buffer(8)),
    "io_uring": lambda: call("io_uring_setup", 1, ctypes.create_string_buffer(120)),
    "mq_open": lambda: call("mq_open", FACTS["key"].encode(), os.O_CREAT | os.O_RDWR, 0o600, QUEUE),
    "msgget": lambda: call("msgget", int(FACTS["key"]), 0o1600),
    "semget": lambda: call("semget", int(FACTS["key"]), 1, 0o1600),
    "shmget": lambda: call("shmget", int(FACTS["key"]), 4096, 0o1600),
    "memfd_create": lambda: call("memfd_create", b"x", 0),
    "type into the terminal": type_into_terminal,
}
# What the user whom the program has may read: denied by Landlock alone.
READS = {
    "read a secret": read(FACTS["secret"]),
    "list the evaluator's descriptors": lambda: os.listdir(f"/proc/{PARENT}/fd"),
    "list its folder": lambda: os.listdir(FACTS["folder"]),
    "read the users": read("/etc/passwd"),
    "read another process": read("/proc/1/status"),
    "read the system's log": read("/dev/kmsg"),
}
# These take no argument, so wrong ones do not hold them up where the filter fails.
NOT_SWEPT = ("fork", "setsid", "vfork", "vhangup")
PROBES = (335, 336)  # on x86_64 the kernel's own probes call them; no filter sees them, and a program dies of them


def error_of(attack):
    try:
        attack()
    except OSError as error:
        return errno.errorcode[error.errno]
    except LookupError:
        return "no such call"
    return "done"


def swept():
    """The errors of all calls by number, with arguments that every one of them finds wrong."""
    skipped = {number_of(name.encode()) for name in (*FACTS["allowed"], *NOT_SWEPT)}
    errors = {}
    for number in set(range(600)) - skipped.union(PROBES):
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        errors[number] = errno.errorcode[ctypes.get_errno()] if result == -1 else "done"
    return errors


def capabilities():
    """Those that it could use or regain; `None` where it cannot see them."""
    try:
        with open("/proc/self/status") as status:
            return [line.split()[1] for line in status if line.startswith(("CapPrm", "CapEff", "CapInh", "CapAmb"))]
    except PermissionError:
        return None


if __name__ == "__main__":
    report = {
        "attacks": {name: error_of(attack) for name, attack in ATTACKS.items()},
        "reads": {name: error_of(attack) for name, attack in READS.items()},
        "sees": error_of(lambda: os.stat(FACTS["secret"])),
        "swept": swept(),
        "user": os.geteuid(),
        "group": os.getegid(),
        "groups": os.getgroups(),
        "capabilities": capabilities(),
    }
    sys.stdout.write(json.dumps(report))
