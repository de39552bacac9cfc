"""Prints a program's view of its own process as JSON: the values of expressions, by expression."""

import json
import os
import sys

EXPRESSIONS = """
sys.argv
sys.orig_argv[1:]
sys.flags
sys.warnoptions
sys._xoptions
sys.path
sys.executable
sys.prefix
sys.pycache_prefix
sys.dont_write_bytecode
sys.getrecursionlimit()
sys.getswitchinterval()
sys.getdlopenflags()
sys.getfilesystemencoding()
sys.getprofile(), sys.gettrace()
sys.excepthook is sys.__excepthook__
sys.displayhook is sys.__displayhook__
sys.unraisablehook is sys.__unraisablehook__
sys.breakpointhook is sys.__breakpointhook__
sys.get_asyncgen_hooks()
sys.exc_info()
hasattr(sys, "last_value"), hasattr(sys, "last_exc"), hasattr(sys, "ps1")
any(type(finder).__module__.startswith("worker_entry") for finder in sys.meta_path)
len(sys.path_hooks)
[(stream.name, stream.encoding, stream.errors, stream.line_buffering) for stream in (sys.stdin, sys.stdout, sys.stderr)]
sys.stdin.isatty(), os.get_blocking(0), os.get_blocking(1)
sorted(main)
__name__, __doc__, __package__, __spec__, __file__
script_frame.f_back is None
logging.LogRecord("a", 1, "b", 1, "c", (), None).relativeCreated < 1000 * age
logging.root.handlers, logging.root.level, logging.root.manager.disable, logging.lastResort.level
logging.raiseExceptions, logging.getLoggerClass(), logging.getLogRecordFactory()
len(logging._handlerList)
time.tzname, time.timezone, time.localtime(0)[:6]
time.process_time() < age
resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
threading.active_count()
threading.current_thread() is threading.main_thread(), threading.current_thread().name
threading.main_thread().ident == threading.get_ident()
threading.main_thread().native_id == threading.get_native_id() == os.getpid()
threading.Thread(target=print).name
threading.excepthook is threading.__excepthook__
threading.stack_size()
tempfile.tempdir
tempfile.gettempdir()
multiprocessing.current_process().name, multiprocessing.current_process().pid == os.getpid()
multiprocessing.parent_process(), multiprocessing.active_children()
multiprocessing.get_start_method(allow_none=True)
multiprocessing.process.ORIGINAL_DIR
[name for name, handler in {s.name: signal.getsignal(s) for s in signal.Signals}.items() if handler == signal.SIG_IGN]
[s.name for s in signal.Signals if callable(signal.getsignal(s))]
[s.name for s in signal.Signals if is_caught(s)]
signal.pthread_sigmask(signal.SIG_BLOCK, [])
signal.getitimer(signal.ITIMER_REAL), signal.set_wakeup_fd(-1)
faulthandler.is_enabled()
gc.isenabled(), gc.get_threshold(), gc.get_debug()
gc.get_freeze_count() > 0
os.getcwd()
os.getsid(0) == os.getpgid(0) == os.getpid()
os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))
{name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")}
[open(f"/proc/self/{name}").read() for name in ("oom_score_adj", "coredump_filter", "cgroup")]
b"forkserver" in open("/proc/self/cmdline", "rb").read()
sorted(map(int, os.listdir("/proc/self/fd")))[3:]
os.stat(0).st_rdev == os.stat(os.devnull).st_rdev
locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()
socket.getdefaulttimeout()
decimal.getcontext()
[(each[0], str(each[1]), each[2].__name__, str(each[3]), each[4]) for each in warnings.filters]
linecache.cache
concurrent.futures.thread._shutdown, len(concurrent.futures.thread._threads_queues)
mimetypes.inited
asyncio.get_event_loop_policy().__class__.__name__
hasattr(builtins, "_"), hasattr(builtins, "exit"), builtins.__import__.__name__
tracemalloc.is_tracing()
subprocess._active
type(os.environ).__name__
""".strip().splitlines()
script_frame = sys._getframe()
main = [*globals()]  # before anything else is imported, as a program would find it
scope = globals()
for module in (
    *("asyncio", "builtins", "concurrent.futures.thread", "decimal", "faulthandler", "gc", "linecache", "locale"),
    *("logging", "mimetypes", "multiprocessing", "resource", "signal", "socket", "subprocess", "tempfile", "threading"),
    *("time", "tracemalloc", "warnings"),
):
    __import__(module)
    scope[module.partition(".")[0]] = sys.modules[module.partition(".")[0]]
with open("/proc/self/status") as status:
    caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))


def is_caught(number: int) -> bool:
    """Whether the signal has a handler in C."""
    return bool(caught >> (number - 1) & 1)


age = float(sys.argv[1])
facts = {}
for expression in EXPRESSIONS:
    facts[expression] = repr(eval(expression))
print(json.dumps({"facts": facts, "environ": dict(os.environ), "hash": hash("text")}))
if len(sys.argv) > 2:
    import tensorflow  # noqa: F401 - so that this program is forked
