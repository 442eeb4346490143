"""Hostile programs: the attack of each, and the reasons with which it may fail.

``ESCAPED`` in the output means that an attack succeeded. ``W`` holds the objects outside (`test_sandbox_attacks.World`),
``call(name, ...)`` makes a system call and raises OSError when it fails.
"""

from __future__ import annotations

from penstock.sandbox.zygote_process import Reason

R, F, C = Reason.RAISED, Reason.FORBIDDEN, Reason.CRASHED
M, CPU, WALL, OUT, WRONG = Reason.MEMORY, Reason.CPU_TIME, Reason.WALL_TIME, Reason.OUTPUT, Reason.WRONG

PRELUDE = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = libc.syscall(N[name], *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result
"""

# Each is one or more statements; output after the statement that must fail proves an escape.
NETWORK = {
    "tcp4": "socket.create_connection(('127.0.0.1', W['tcp4']), 2)",
    "tcp6": "socket.create_connection(('::1', W['tcp6']), 2)",
    "udp4": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', W['udp4']))",
    "tcp_listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "dns": "socket.getaddrinfo('penstock.example', 80)",
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:%d' % W['tcp4'], timeout=2)",
    "asyncio_connect": "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', W['tcp4']))",
    "unix_stream": "s = socket.socket(socket.AF_UNIX); s.connect(W['unix'])",
    "unix_datagram_pair": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'out', W['unix_datagram'])"
    ),
    "unix_stream_pair_sends_away": "a, b = socket.socketpair(); a.sendto(b'out', W['unix_datagram'])",
    "unix_pair_connects_away": "a, b = socket.socketpair(); a.connect(W['unix'])",
    "unix_abstract": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + W['abstract'])",
    "raw_socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet_socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "native_socket": "call('socket', 2, 1, 0)",
}
READING = {
    "canary_file": "print(open(W['file']).read())",
    "canary_by_folder_descriptor": "d = os.open(W['folder'], os.O_PATH); os.open('secret', os.O_RDONLY, dir_fd=d)",
    "passwd": "open('/etc/passwd').read()",
    "shadow": "open('/etc/shadow').read()",
    "list_folder_of_the_service": "os.listdir(W['home'])",
    "list_tmp": "assert any(name.startswith('penstock-world') for name in os.listdir('/tmp'))",
    "list_home": "os.listdir('/home')",
    "list_canary_folder": "os.listdir(W['folder'])",
    "proc_self_environ": "open('/proc/self/environ').read()",
    "proc_self_mem": "open('/proc/self/mem', 'rb')",
    "proc_self_maps": "open('/proc/self/maps').read()",
    "proc_parent_environ": "open('/proc/%d/environ' % os.getppid()).read()",
    "proc_victim_environ": "open('/proc/%d/environ' % W['victim']).read()",
    "proc_victim_mem": "open('/proc/%d/mem' % W['victim'], 'rb')",
    "proc_victim_descriptors": "os.listdir('/proc/%d/fd' % W['victim'])",
    "proc_victim_root": "os.listdir('/proc/%d/root' % W['victim'])",
    "device_mem": "open('/dev/mem', 'rb')",
    "device_kmsg": "open('/dev/kmsg', 'rb')",
    "device_tty": "open('/dev/tty', 'rb')",
    "kernel_settings": "open('/sys/kernel/uevent_seqnum').read()",
    "dot_dot": "open('../../../../../../' + W['file'].lstrip('/')).read()",
    "handle_of_a_file": "call('open_by_handle_at', -100, 0, 0)",
    "load_a_library_from_outside": "ctypes.CDLL(W['file'])",
    "import_from_outside": "sys.path.insert(0, W['folder']); import penstock_canary_module",
}
WRITING = {
    "overwrite": "open(W['file'], 'w').write('altered')",
    "append": "open(W['file'], 'a').write('altered')",
    "truncate": "os.truncate(W['file'], 0)",
    "truncate_on_open": "os.open(W['file'], os.O_RDONLY | os.O_TRUNC)",
    "unlink": "os.unlink(W['file'])",
    "rename": "os.rename(W['file'], W['file'] + '.moved')",
    "create": "open(W['folder'] + '/new', 'w')",
    "create_unnamed": "os.open(W['folder'], os.O_TMPFILE | os.O_RDWR)",
    "create_in_tmp": "open('/tmp/attack-of-penstock', 'w')",
    "create_in_shm": "open('/dev/shm/attack-of-penstock', 'w')",
    "create_in_var_tmp": "open('/var/tmp/attack-of-penstock', 'w')",
    "create_in_root": "open('/attack-of-penstock', 'w')",
    "create_here": "open('attack-of-penstock', 'w')",
    "temporary_file": "import tempfile; tempfile.TemporaryFile()",
    "poison_the_standard_library": "import os as o; open(o.path.dirname(o.__file__) + '/attack_of_penstock.py', 'w')",
    "mkdir": "os.mkdir(W['folder'] + '/new')",
    "symlink": "os.symlink('/etc', W['folder'] + '/new')",
    "symlink_in_tmp": "os.symlink('/etc', '/tmp/attack-of-penstock')",
    "hardlink": "os.link(W['file'], W['folder'] + '/new')",
    "fifo": "os.mkfifo(W['folder'] + '/new')",
    "device_node": "os.mknod(W['folder'] + '/new', 0o60666, os.makedev(7, 0))",
    "chmod": "os.chmod(W['file'], 0o4777)",
    "chown": "os.chown(W['file'], os.getuid(), os.getgid())",
    "utime": "os.utime(W['file'], (0, 0))",
    "setxattr": "os.setxattr(W['file'], 'user.penstock', b'x')",
    "shared_memory": "from multiprocessing import shared_memory; shared_memory.SharedMemory(create=True, size=4096)",
    "sysv_shared_memory": "call('shmget', 0, 4096, 0o1666)",
    "message_queue": "call('mq_open', b'penstock', 0o102, 0o666, 0)",
    "memory_file": "os.memfd_create('x')",
}
PROCESSES = {
    "fork": "os.fork()",
    "double_fork": "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(60)",
    "fork_bomb": "while True: os.fork()",
    "patient_fork_bomb": (
        "n = 0\nfor i in range(2000):\n    try:\n        os.fork(); n += 1\n    except OSError: pass\nassert n"
    ),
    "vfork": "assert libc.vfork() >= 0",
    "native_clone": "call('clone', 17, 0, 0, 0, 0)",
    "native_clone3": "call('clone3', ctypes.create_string_buffer(88), 88)",
    "native_clone_new_user": "call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
    "thread_in_a_new_user_namespace": "call('clone', 0x10000000 | 0x3D0F00, 0, 0, 0, 0)",
    "exec": "os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "exec_with_preload": "os.execve('/bin/true', ['true'], {'LD_PRELOAD': W['file']})",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "system": "assert os.system('true') == 0",
    "popen": "assert os.popen('echo hi').read()",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "multiprocessing": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "pty": "import pty; pty.fork()",
    "setsid": "os.setsid()",
    "setpgid": "os.setpgid(0, os.getppid())",
    "thread_bomb": (
        "import threading\nheld = threading.Event()\n"
        "for i in range(5000): threading.Thread(target=held.wait, daemon=True).start()"
    ),
}
SIGNALS = {
    "kill_victim": "os.kill(W['victim'], signal.SIGKILL)",
    "stop_victim": "os.kill(W['victim'], signal.SIGSTOP)",
    "kill_parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kill_service": "os.kill(W['service'], signal.SIGTERM)",
    "kill_init": "os.kill(1, signal.SIGTERM)",
    "kill_everybody": "os.kill(-1, signal.SIGKILL)",
    "kill_group": "os.kill(0, signal.SIGKILL)",
    "kill_group_of_victim": "os.killpg(W['victim'], signal.SIGKILL)",
    "kill_self_for_an_error": "os.kill(os.getpid(), signal.SIGKILL)",
    "kill_own_thread": "call('tkill', os.getpid(), 9)",
    "kill_thread_of_victim": "call('tgkill', W['victim'], W['victim'], 9)",
    "queue_signal": "call('rt_sigqueueinfo', W['victim'], 9, ctypes.create_string_buffer(128))",
    "process_descriptor": "os.pidfd_open(W['victim'])",
    "process_descriptor_signal": "call('pidfd_send_signal', 0, 9, 0, 0)",
    "signal_by_file_owner": (
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, W['victim'])\n"
        "fcntl.fcntl(r, 10, signal.SIGKILL)\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')"
    ),
}
KERNEL = {
    "ptrace": "call('ptrace', 16, W['victim'], 0, 0)",
    "ptrace_parent": "call('ptrace', 16, os.getppid(), 0, 0)",
    "read_other_memory": "call('process_vm_readv', W['victim'], 0, 0, 0, 0, 0)",
    "write_other_memory": "call('process_vm_writev', os.getppid(), 0, 0, 0, 0, 0)",
    "io_uring": "call('io_uring_setup', 8, ctypes.create_string_buffer(120))",
    "bpf": "call('bpf', 0, ctypes.create_string_buffer(72), 72)",
    "userfaultfd": "call('userfaultfd', 1)",
    "keyctl": "call('keyctl', 0, -4, 1)",
    "add_key": "call('add_key', b'user', b'penstock', b'x', 1, -4)",
    "mount": "call('mount', b'none', b'/', b'tmpfs', 0, 0)",
    "umount": "call('umount2', b'/', 2)",
    "new_mount": "call('fsopen', b'tmpfs', 0)",
    "unshare_user": "call('unshare', 0x10000000)",
    "unshare_network": "call('unshare', 0x40000000)",
    "setns": "call('setns', 0, 0)",
    "pivot_root": "call('pivot_root', b'/', b'/')",
    "chroot": "call('chroot', b'/')",
    "perf_events": "call('perf_event_open', ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "kexec": "call('kexec_load', 0, 0, 0, 0)",
    "reboot": "call('reboot', 0xfee1dead, 672274793, 0, 0)",
    "personality": "call('personality', 0x0040000)",
    "load_module": "call('init_module', 0, 0, b'')",
    "kernel_log": "call('syslog', 3, ctypes.create_string_buffer(100), 100)",
    "clock": "call('settimeofday', ctypes.create_string_buffer(16), 0)",
    "host_name": "call('sethostname', b'x', 1)",
    "swap": "call('swapoff', b'/swapfile')",
    "secret_memory": "call('memfd_secret', 0)",
    "compare_kernel_objects": "call('kcmp', os.getpid(), W['victim'], 0, 0, 0)",
    "filter_of_its_own": "call('seccomp', 1, 0, ctypes.create_string_buffer(16))",
    "become_root": "os.setuid(0)",
    "become_root_by_native_code": "call('setresuid', 0, 0, 0)",
    "capabilities": "call('capset', ctypes.create_string_buffer(8), ctypes.create_string_buffer(24))",
    "traceable": "call('prctl', 4, 1, 0, 0, 0)",
    "tracer_of_its_own": "call('prctl', 0x59616d61, -1, 0, 0, 0)",
    "survive_the_zygote": "call('prctl', 1, 0, 0, 0, 0)",
    "raise_cpu_limit": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (600, 600))",
    "raise_memory_limit": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
    "raise_task_limit": "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (9999, 9999))",
    "raise_core_limit": "import resource as r; r.setrlimit(r.RLIMIT_CORE, (9999, 9999))",
    "limits_of_the_parent": "import resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (0, 0))",
    "limits_of_the_victim": "import resource as r; r.prlimit(W['victim'], r.RLIMIT_CPU, (0, 0))",
    "priority": "os.nice(-5)",
    "priority_of_the_victim": "os.setpriority(os.PRIO_PROCESS, W['victim'], 19)",
    "terminal_input": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
}
# Ways by which a program could reach another one that runs at the same time.
CHANNELS = {
    "record_lock": "import fcntl; fcntl.lockf(open('/dev/null', 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "record_lock_seen": (
        "import fcntl, struct; fcntl.fcntl(open('/dev/null', 'r+b'), fcntl.F_GETLK, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))"
    ),
    "record_lock_waited_for": "import fcntl; fcntl.lockf(open('/dev/zero', 'rb'), fcntl.LOCK_SH)",
    "lock_of_a_description": (
        "import fcntl, struct; fcntl.fcntl(open('/dev/null', 'r+b'), 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))"
    ),
    "lock_of_a_file": "import fcntl; fcntl.flock(open('/dev/null'), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "lock_of_the_standard_library": "import fcntl; fcntl.lockf(open(os.__file__, 'rb'), fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "lease": "import fcntl; fcntl.fcntl(open(os.__file__, 'rb'), 1024, 0)",
    "notification": "import fcntl; fcntl.fcntl(os.open('/', os.O_RDONLY), 1026, 1)",
    "watch_of_a_file": "assert libc.inotify_add_watch(libc.inotify_init1(0), b'/dev/null', 0x20) >= 0",
    "futex_across_processes": "word = ctypes.c_int(); call('futex', ctypes.byref(word), 1, 1, 0, 0, 0)",
}
EVERYTHING_THAT_FAILS = CHANNELS | NETWORK | READING | WRITING | PROCESSES | SIGNALS | KERNEL

_SEARCH = """
import gc
found = []
def look(thing, depth):
    if isinstance(thing, (str, bytes)) and REVERSED_ANSWER in str(thing)[::-1]:
        found.append(thing)
    elif isinstance(thing, dict) and depth:
        for item in list(thing.items()):
            look(item[0], depth - 1), look(item[1], depth - 1)
    elif isinstance(thing, (list, tuple, set)) and depth:
        for item in list(thing):
            look(item, depth - 1)
"""
# Statement, and the reasons with which it may fail: attacks on limits, on the interpreter, on the verdict.
EXCESSES: dict[str, tuple[str, set[Reason]]] = {
    "bytearray": ("x = bytearray(4 << 30)", {M}),
    "list": ("x = []\nwhile True: x.append(bytes(1 << 20))", {M}),
    "anonymous_mapping": ("import mmap; m = mmap.mmap(-1, 4 << 30)", {R, M}),
    "private_mapping": ("import mmap; m = mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | 0x20)", {R, M}),
    "zip_bomb": (
        "import zlib; z = zlib.compress(bytes(200 << 20), 1); x = [zlib.decompress(z) for _ in range(9)]",
        {M, CPU},
    ),
    "long_text": ("x = 'x' * (2 << 30)", {M}),
    "swallowed_memory_errors": (
        "x = []\nfor i in range(20000):\n    try: x.append(bytearray(1 << 20))\n    except MemoryError: pass\n"
        "assert len(x) > 1000",
        {R, M, CPU},
    ),
    "locked_memory": ("m = ctypes.create_string_buffer(1 << 20)\ncall('mlock', m, 1 << 20)", {R}),
    "endless_loop": ("while True: pass", {CPU}),
    "endless_loop_that_ignores_signals": (
        "for s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        {CPU},
    ),
    "slow_pattern": ("import re; re.match('(a|a)*$', 'a' * 60 + 'b')", {CPU}),
    "big_number": ("x = 7 ** (10 ** 9)", {CPU, M}),
    "sleep": ("time.sleep(600)", {WALL}),
    "sleep_that_ignores_sigterm": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", {WALL}),
    "stop_itself": ("os.kill(os.getpid(), signal.SIGSTOP)", {WALL}),
    "never_ending_thread": ("import threading; threading.Thread(target=time.sleep, args=(600,)).start()", {WALL}),
    "output_flood": ("while True: print('x' * 65536)", {OUT}),
    "error_flood": ("while True: sys.stderr.write('x' * 65536)", {OUT}),
    "flood_of_answers": ("while True: os.write(4, b'x' * 65536)", {OUT}),
    "unicode_bomb": ("while True: print(chr(0x1F4A3) * 65536)", {OUT}),
    "descriptor_bomb": ("while True: os.dup(0)", {R}),
    "pipe_bomb": ("p = []\nwhile True: p.append(os.pipe())", {R}),
    "deep_recursion": ("sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", {C, M, R, CPU}),
    "deep_source": ("eval('(' * 100000 + ')' * 100000)", {R, M}),
    "deep_repr": ("x = []\nfor i in range(10 ** 5): x = [x]\nrepr(x)", {R, C, CPU}),  # deeper than any stack
    "null_pointer": ("ctypes.string_at(0)", {C}),
    "abort": ("os.abort()", {C}),
    "wild_pickle": (
        "import pickle; pickle.loads(b'cos\\nsystem\\n(S\\'echo ESCAPED\\'\\ntR.'); raise SystemExit(3)",
        {R, C},
    ),
    "exit_with_success": ("sys.exit(0)", {WRONG}),
    "leave_with_success": ("os._exit(0)", {WRONG}),
    "claim_success": ('print(\'{"ok": true, "passed": 1}\'); os.write(4, b\'{"ok": true}\\n\')', {WRONG}),
    "write_into_every_descriptor": (
        'for fd in range(1, 64):\n    try: os.write(fd, b\'{"ok": true, "done": true}\\n\')\n    except OSError: pass',
        {WRONG},
    ),
    "close_every_descriptor": ("os.closerange(0, 64)\nos._exit(0)", {WRONG}),
    "descriptors_it_should_not_have": (
        "extra = []\nfor fd in range(5, 64):\n    try: os.fstat(fd); extra.append(fd)\n    except OSError: pass\n"
        "if extra: print('ESCAPED', extra)",
        {WRONG},
    ),
    "environment": (
        "if set(os.environ) - {'PATH', 'LANG', 'PYTHONUTF8', 'PYTHONHASHSEED', 'HOME', 'MALLOC_ARENA_MAX', 'PWD', 'LC_CTYPE'}: "
        "print('ESCAPED', dict(os.environ))",
        {WRONG},
    ),
    "search_of_all_objects": (
        _SEARCH + "for o in gc.get_objects(): look(o, 3)\nif found: print('ESCAPED', found)",
        {WRONG},
    ),
    "search_of_frames": (
        _SEARCH
        + "f = sys._getframe()\nwhile f:\n    look(dict(f.f_locals), 3); look(dict(f.f_globals), 3); f = f.f_back\n"
        "if found: print('ESCAPED', found)",
        {WRONG},
    ),
    "trace_of_the_runner": (
        _SEARCH
        + "def t(frame, event, a):\n    look(dict(frame.f_locals), 3)\n    if found: os.write(1, b'ESCAPED')\n    return t\n"
        "sys.settrace(t); f = sys._getframe()\nwhile f:\n    f.f_trace = t; f = f.f_back",
        {WRONG},
    ),
    "last_word": ("import atexit; atexit.register(lambda: os.write(1, b'42 passed\\n'))", {WRONG}),
    "patched_runner": (
        "import json\njson.dumps = json.loads = lambda *a, **k: 'passed'\nsys.exit = os._exit = print\n"
        "for m in list(sys.modules.values()):\n    if hasattr(m, 'run'): m.run = lambda *a: 0",
        {WRONG, R},
    ),
}

MACHINE_CODE = """
import mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write(bytes.fromhex(CODE))
ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
"""
ONLY_ON_X86 = {
    # mov eax, 20 (getpid); int 0x80; ret
    "calls_of_32_bit_programs": MACHINE_CODE.replace("CODE", "'b814000000cd80c3'"),
    # mov eax, 0x40000027 (getpid of x32); syscall; ret
    "calls_of_x32_programs": MACHINE_CODE.replace("CODE", "'b8270000400f05c3'"),
}

# Programs that try to pass test code without the answer: f(3) must be 4242, which they do not contain.
FORGERIES = {
    "always_equal": "class E:\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(x): return E()",
    "always_equal_number": "class E(int):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(x): return E(1)",
    "always_equal_text": "class E(str):\n    def __eq__(s, o): return True\ndef f(x): return E('a')",
    "reflected_equality": "class E(float):\n    def __req__(s, o): return True\n    __eq__ = __req__\ndef f(x): return E()",
    "contains_everything": "class E(list):\n    def __contains__(s, o): return True\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "leave": "import os\ndef f(x): os._exit(0)",
    "exit": "def f(x): raise SystemExit(0)",
    "interrupt": "def f(x): raise KeyboardInterrupt",
    "stop_iteration": "def f(x): raise StopIteration",
    "skip": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "generator_exit": "def f(x): raise GeneratorExit",
    "exception_group": "def f(x): raise BaseExceptionGroup('x', [SystemExit(0)])",
    "leave_at_once": "import os\nos._exit(0)",
    "patched_builtins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\nbuiltins.abs = lambda x: 0\ndef f(x): return 1",
    "shadowed_builtins": "def abs(x): return 0\ndef len(x): return 4242\ndef isinstance(a, b): return True\ndef f(x): return 1",
    "patched_unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 1",
    "verdict_into_every_descriptor": (
        'import os\nline = b\'{"test": 0, "ok": true, "why": ""}\\n{"done": true}\\n\'\ndef f(x):\n'
        "    for fd in range(64):\n        try: os.write(fd, line)\n        except OSError: pass\n    return 1"
    ),
    "many_answers": (
        'import os\ndef f(x):\n    for i in range(9): os.write(4, b\'{"value": %d, "changed": []}\\n\' % i)\n    return 1'
    ),
    "answer_that_is_a_handle": 'import json\njson.dumps = lambda *a: \'{"value": {"~": "handle", "v": 0}}\'\ndef f(x): return 1',
    "answer_that_is_nonsense": 'import json\njson.dumps = lambda *a: \'{"value": {"~": "os.system", "v": "id"}}\'\ndef f(x): return 1',
    "answer_that_is_too_long": "def f(x): return 'x' * (64 << 20)",
    "answer_that_is_too_deep": "import json\njson.dumps = lambda *a: '{\"value\":' + '[' * 100000 + ']' * 100000 + '}'\ndef f(x): return 1",
    "searches_the_expected_value": (
        "import gc\nback = '2424'\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, (list, tuple)) and int(back[::-1]) in list(o): return int(back[::-1])\n    return 1"
    ),
    "renamed_check": "def check(candidate): pass\ndef f(x): return 1",
}
