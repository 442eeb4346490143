"""The irrevocable restrictions of a program. The order matters: each step needs rights that a later one removes.

1. A separate session, and no file descriptors except its pipes.
2. Limits: CPU time, address space, files, processes, no core dumps.
3. Another user, when started by root, and no capabilities.
4. Landlock (unless bubblewrap built a separate file system), then the filter over system calls.

Landlock: a program may read some folders and write nothing. Where the kernel supports it, TCP (ABI 4), ioctl on devices (5), abstract sockets
and signals (6) are refused too; the filter refuses the same on every kernel.

The filter is classic BPF: calls in `ALLOWED` pass; those in `CONDITIONAL` pass with harmless arguments; those in `FATAL` kill the process
(SIGSYS); every other call fails with EPERM. There is no fork, no exec and no socket, so a program stays one process that has only its pipes;
signals reach only itself, and not SIGKILL (a SIGKILL must come from another process). The tables list system calls as ``name:x86_64:aarch64``,
``-`` if a machine does not have the call, by the kernel's numbers (asm/unistd_64.h, asm-generic/unistd.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ALLOWED = """
    read:0:63 write:1:64 close:3:57 open:2:- openat:257:56 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79
    statx:332:291 lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233 brk:12:214
    msync:26:227 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
    rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128 pause:34:-
    pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 access:21:- faccessat:269:48 faccessat2:439:439
    readlink:89:- readlinkat:267:78 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50
    statfs:137:43 fstatfs:138:44 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 select:23:- pselect6:270:72
    poll:7:- ppoll:271:73 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
    epoll_pwait:281:22 epoll_pwait2:441:441 eventfd2:290:19 fsync:74:82 fdatasync:75:83 fadvise64:221:223
    sched_yield:24:124 sched_getaffinity:204:123 getcpu:309:168 nanosleep:35:101 clock_nanosleep:230:115
    clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153 getitimer:36:102
    setitimer:38:103 alarm:37:- getpid:39:172 gettid:186:178 getppid:110:173 getpgrp:111:- getpgid:121:155
    getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148
    getresgid:120:150 uname:63:160 sysinfo:99:179 umask:95:166 getrlimit:97:163 setrlimit:160:164 getrusage:98:165
    arch_prctl:158:- set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100
    getrandom:318:278 rseq:334:293 membarrier:324:283 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
    sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockopt:55:209 getsockname:51:204
    getpeername:52:205 close_range:436:436
"""

# allowed with these arguments only, see `_conditions`
CONDITIONAL = """
    kill:62:129 tgkill:234:131 clone:56:220 ioctl:16:29 fcntl:72:25 prctl:157:167 prlimit64:302:261
    socketpair:53:199 clone3:435:435 futex:202:98
"""

# programs that solve a task do not make these calls: a process that does is killed at once
FATAL = """
    ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 kcmp:312:272
    bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425 io_uring_enter:426:426
    io_uring_register:427:427 keyctl:250:219 add_key:248:217 request_key:249:218 mount:165:40 umount2:166:39
    pivot_root:155:41 chroot:161:51 unshare:272:97 setns:308:268 fsopen:430:430 fsconfig:431:431 fsmount:432:432
    fspick:433:433 move_mount:429:429 open_tree:428:428 mount_setattr:442:442 open_by_handle_at:304:265
    name_to_handle_at:303:264 init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104
    kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225 iopl:172:- ioperm:173:- modify_ldt:154:-
    personality:135:92 pidfd_open:434:434 pidfd_getfd:438:438 pidfd_send_signal:424:424 acct:163:89 quotactl:179:60
    settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171 sethostname:170:161
    setdomainname:171:162 syslog:103:116 vhangup:153:58 lookup_dcookie:212:18 memfd_secret:447:447
    rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 vmsplice:278:75
"""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_LOAD, _EQUAL, _AT_LEAST, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)  # the flags that pthread_create of glibc and musl passes to clone
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
# duplicate and flags; not F_SETOWN, which sends signals, and no record locks, which other programs see
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
_PRIVATE, _CLOCK = 0x80, 0x100
# Within the process every operation; across processes (pages of files are shared) waiting alone, as pthread_join does.
_FUTEXES = (0, 9, 9 | _CLOCK, *(op | _PRIVATE | clock for clock in (0, _CLOCK) for op in range(14)))
_PRCTLS = (15, 16, 0x53564D41)  # names of threads and mappings
_AF_UNIX, _SOCK_STREAM = 1, 1
_SIGKILL = 9
_Line = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_CREATE_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # the rights that each ABI can restrict
_LATEST = 5
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS = 1, 4, 8, 38
_CAP_DAC_READ_SEARCH = 2
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_V3 = 0x20080522
_OPEN_FILES = 64


def call_numbers(table: str, machine: str) -> dict[str, int]:
    column = {"x86_64": 1, "aarch64": 2}[machine]
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def machine_name() -> str:
    """Return the machine's name in the tables; raises OSError if they do not have it."""
    name = os.uname().machine
    if name not in ARCHITECTURES or sys.maxsize < 2**32:
        raise OSError(f"no table of system calls for {name}; supported: {', '.join(ARCHITECTURES)}")
    return name


def seccomp_filter(name: str, pid: int) -> bytes:
    """Return the filter for process ``pid`` on a machine, as an array of struct sock_filter."""
    conditional = call_numbers(CONDITIONAL, name)
    lines: list[_Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[name]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in call_numbers(ALLOWED, name).values():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number in call_numbers(FATAL, name).values():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _KILL)]
    lines += [(_EQUAL, 0, 1, conditional["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # libc then uses clone
    for call, checks in _conditions(pid).items():
        block = _block(checks)
        lines += [(_EQUAL, 0, len(block), conditional[call]), *block]
    lines.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _conditions(pid: int) -> dict[str, list[tuple[int, int, tuple[int, ...], bool]]]:
    """Return the conditions on the arguments of each call: (argument, mask, values, whether it must be one of them)."""
    pid_condition = (0, 0xFFFFFFFF, (pid,), True)
    return {
        "kill": [pid_condition, (1, 0xFFFFFFFF, (_SIGKILL,), False)],
        "tgkill": [pid_condition, (2, 0xFFFFFFFF, (_SIGKILL,), False)],
        "clone": [(0, 0xFFFFFFFF, _THREAD_FLAGS, True)],
        "ioctl": [(1, 0xFFFFFFFF, _IOCTLS, True)],
        "fcntl": [(1, 0xFFFFFFFF, _FCNTLS, True)],
        "futex": [(1, 0xFFFFFFFF, _FUTEXES, True)],
        "prctl": [(0, 0xFFFFFFFF, _PRCTLS, True)],
        "prlimit64": [(0, 0xFFFFFFFF, (0, pid), True)],
        # used by asyncio to wake its loop
        "socketpair": [(0, 0xFFFFFFFF, (_AF_UNIX,), True), (1, 0xF, (_SOCK_STREAM,), True)],
    }


def _block(checks: list[tuple[int, int, tuple[int, ...], bool]]) -> list[_Line]:
    refuse: _Line = (_RETURN, 0, 0, _ERRNO | _EPERM)
    lines: list[_Line] = []
    for argument, mask, values, wanted in checks:
        lines += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_MASK, 0, 0, mask)]
        rest = len(values)
        if wanted:  # a match skips the other comparisons and the refusal
            lines += [(_EQUAL, rest - place, 0, value) for place, value in enumerate(values)]
        else:  # a match reaches the refusal; if none matches, it is skipped
            lines += [(_EQUAL, rest - 1 - place, int(place == rest - 1), value) for place, value in enumerate(values)]
        lines.append(refuse)
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def apply_seccomp(libc: ctypes.CDLL, name: str) -> None:
    """Apply the filter to this process, irrevocably; needs no_new_privs. Raises OSError."""
    code = seccomp_filter(name, os.getpid())
    lines = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: unsigned short len, then an aligned pointer
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(lines))
    if libc.syscall(_SYS_SECCOMP[name], 1, 0, ctypes.create_string_buffer(header, len(header))):
        raise OSError(ctypes.get_errno(), "seccomp refused the filter")


def landlock_version(libc: ctypes.CDLL) -> int:
    """Return the kernel's Landlock ABI, 0 if it has none."""
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _CREATE_VERSION)))


def landlock_rules(libc: ctypes.CDLL, readable: Sequence[str], writable: Sequence[str]) -> int:
    """Return a ruleset's descriptor: read beneath ``readable``, write the files ``writable``. Raises OSError."""
    abi = landlock_version(libc)
    if abi < 1:
        raise OSError("this kernel has no Landlock; use Linux 5.13 or later with Landlock enabled")
    rights = struct.pack("=QQQ", _FILE_RIGHTS[min(abi, _LATEST)], _TCP * (abi >= 4), _SCOPES * (abi >= 6))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = libc.syscall(_CREATE, rights[:size], ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in readable:
        _allow_beneath(libc, rules, path, _READ_FILE)
    for path in writable:
        _allow_beneath(libc, rules, path, _READ_FILE | _WRITE_FILE)
    return rules


def _allow_beneath(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights |= _READ_DIR if os.path.isdir(path) else 0  # noqa: PTH112 pathlib costs every start 3 ms
        rule = struct.pack("=Qi", rights, folder)
        if libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule: {path}")
    finally:
        os.close(folder)


def apply_landlock(libc: ctypes.CDLL, rules: int) -> None:
    """Apply the rules to this process, irrevocably; needs no_new_privs. Raises OSError."""
    if libc.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program; the service enforces those on wall time and output itself."""

    cpu_s: float
    memory_bytes: int
    tasks: int  # threads; there are no other processes


class Confinement:
    def __init__(self, *, readable: Sequence[str], uid: int | None, landlocked: bool) -> None:
        """``uid`` is the user to switch to, None to keep the current one. Raises OSError if the kernel lacks a feature."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._machine = machine_name()
        self._uid = uid
        paths = [path for path in readable if not path.startswith("/dev/")]
        devices = [path for path in readable if path == "/dev/null"]
        others = [path for path in readable if path not in paths and path not in devices]
        self._rules = landlock_rules(self._libc, [*paths, *others], devices) if landlocked else -1
        self._unseen = 0 if uid is not None else _unseen_tasks()
        # A folder above the interpreter may be unreadable to other users (/root). Landlock still confines reads.
        self._reads_past_modes = landlocked and not all(_open_to_others(path) for path in paths)

    def enter(self, limits: Limits, pipes: Sequence[int]) -> None:
        """Confine this process to ``pipes``, which become descriptors 0, 1, 2, ...; raises OSError."""
        os.setsid()
        self._keep_only(pipes)
        # the kernel counts tasks per user; a dedicated user has no others
        _limit(limits, others=0 if self._uid is not None else _visible_tasks() + self._unseen)
        if self._uid is not None:
            self._become(self._uid)
        self._prctl(_SET_PDEATHSIG, signal.SIGKILL)
        self._prctl(_SET_DUMPABLE, 0)
        self._prctl(_SET_NO_NEW_PRIVS, 1)
        os.chdir("/")
        if self._rules >= 0:
            apply_landlock(self._libc, self._rules)
            os.close(self._rules)
        apply_seccomp(self._libc, self._machine)

    def _keep_only(self, pipes: Sequence[int]) -> None:
        rules = self._rules
        wanted = [*pipes, rules] if rules >= 0 else list(pipes)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _OPEN_FILES) for fd in wanted]
        for place, fd in enumerate(moved):
            os.dup2(fd, place)
        os.closerange(len(wanted), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))
        self._rules = len(wanted) - 1 if rules >= 0 else -1

    def _become(self, uid: int) -> None:
        if self._reads_past_modes:
            self._prctl(_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kept = 1 << _CAP_DAC_READ_SEARCH if self._reads_past_modes else 0
        header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
        if self._libc.syscall(_CAPSET[self._machine], header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)):
            raise OSError(ctypes.get_errno(), "capset")

    def _prctl(self, option: int, value: int) -> None:
        if self._libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def _limit(limits: Limits, *, others: int) -> None:
    seconds = max(1, math.ceil(limits.cpu_s))
    hard = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NOFILE: (_OPEN_FILES, _OPEN_FILES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (64, 64),
        resource.RLIMIT_NPROC: (others + limits.tasks, others + limits.tasks),
    }
    for which, (soft, most) in hard.items():
        allowed = resource.getrlimit(which)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, most = min(soft, allowed), min(most, allowed)
        resource.setrlimit(which, (soft, most))


def _unseen_tasks() -> int:
    """Return a lower bound of this user's tasks that /proc does not show, such as those of other containers.

    Found by raising the limit until a fork succeeds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    try:
        for more in (0, 64, 256, 1024, 4096, 16384):
            allowed = _visible_tasks() + more + 1
            if hard != resource.RLIM_INFINITY and allowed > hard:
                break
            resource.setrlimit(resource.RLIMIT_NPROC, (allowed, hard))
            with contextlib.suppress(BlockingIOError):
                if (pid := os.fork()) == 0:
                    os._exit(0)
                os.waitpid(pid, 0)
                return more
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    raise OSError(
        "this user has so many tasks that no limit for a program can be set; run the service as a user of its own"
    )


def _visible_tasks() -> int:
    uid, count = os.getuid(), 0
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 no pathlib in here
    except OSError:
        return 0
    for pid in pids:
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid:  # noqa: PTH116
                count += len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
        except OSError:
            continue  # it has exited
    return count


def _open_to_others(path: str) -> bool:
    while path != "/":
        path = os.path.dirname(path)  # noqa: PTH120
        if not os.stat(path).st_mode & 0o001:  # noqa: PTH116
            return False
    return True
