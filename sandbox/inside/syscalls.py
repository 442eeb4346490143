"""The system calls that a program may make: ``name:x86_64:aarch64``, ``-`` if a machine does not have the call.

The numbers are from the kernel (asm/unistd_64.h, asm-generic/unistd.h). Calls in no list fail with EPERM.
"""

from __future__ import annotations

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

# allowed with these arguments only, see `seccomp`
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


def numbers(table: str, machine: str) -> dict[str, int]:
    """Return the call numbers of a table by name, for ``machine`` (``x86_64`` or ``aarch64``)."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
