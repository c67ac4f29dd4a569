"""The determinism lint: what would make a simulated cluster differ from one run of a seed to the next.

Production code takes time from the loop or an injected clock, chance from an injected generator, files
through magnetar.runtime.files, processes behind a device seam, threads through run_in_executor, and never
lets the order of a set reach anything. The simulation replaces all of these; whatever goes around them here
is a run that cannot be replayed.

A mention is enough, not only a call: `clock=time.monotonic` as a default hides the real clock just as well.
Names are followed through imports (`from time import monotonic as now`), types by what is written down in the
same file; see lint.kinds. What needs the real thing stands in ALLOWED, one line each, with the reason.
"""

import ast
from collections.abc import Iterator

from lint.kinds import Kinds, enclosing
from lint.sources import Allow, Finding, Source

CLOCK = frozenset(
    f"time.{name}"
    for name in (
        "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time"
        " process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns sleep"
    ).split()
) | {"datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"}

CHANCE = frozenset(
    {"os.urandom", "os.getrandom", "uuid.uuid1", "uuid.uuid4", "uuid.uuid6", "uuid.uuid7", "uuid.uuid8"}
)
CHANCE_MODULES = ("random", "secrets")
SEEDED = "random.Random"  # fine as a type, and when it is given a seed

THREADS = frozenset({"threading.Thread", "threading.Timer"})
THREAD_MODULES = ("_thread",)

PROCESSES = frozenset(
    {
        "asyncio.create_subprocess_exec",
        "asyncio.create_subprocess_shell",
        "concurrent.futures.ProcessPoolExecutor",
    }
) | frozenset(
    f"os.{name}"
    for name in (
        "fork forkpty system popen posix_spawn posix_spawnp execl execle execlp execv execve execvp"
        " execvpe spawnl spawnle spawnv spawnve kill killpg waitpid eventfd memfd_create"
    ).split()
)
PROCESS_MODULES = ("subprocess", "multiprocessing", "mmap", "pty")

FILES = frozenset({"io.open", "io.FileIO", "codecs.open"}) | frozenset(
    f"os.{name}"
    for name in (
        "open fdopen read write pread pwrite preadv pwritev readv writev lseek sendfile fsync"
        " fdatasync sync truncate ftruncate posix_fallocate posix_fadvise rename renames replace"
        " remove unlink mkdir makedirs rmdir removedirs listdir scandir walk fwalk stat lstat fstat"
        " statvfs fstatvfs access chmod chown link symlink readlink utime copy_file_range path.exists"
        " path.lexists path.isfile path.isdir path.islink path.getsize path.getmtime path.realpath"
    ).split()
)
FILE_MODULES = ("shutil", "tempfile", "glob", "fcntl")
PATH_METHODS = frozenset(
    "open read_text read_bytes write_text write_bytes touch mkdir rmdir unlink rename replace exists"
    " is_file is_dir stat lstat iterdir glob rglob walk resolve samefile symlink_to hardlink_to"
    " readlink chmod owner".split()
)

NETWORK = frozenset(
    f"socket.{name}"
    for name in (
        "socket socketpair create_connection create_server fromfd getaddrinfo gethostbyname"
        " gethostbyaddr getfqdn"
    ).split()
)
NETWORK_MODULES = ("urllib.request", "http.client", "select", "selectors")

# Callables that take an iterable and whose result does not depend on its order.
ORDER_BLIND = frozenset("sorted set frozenset len min max sum any all bool isinstance".split())
# Callables whose result, or whose effects, come in the order of what they are given.
ORDER_TELLING = frozenset(
    "list tuple iter enumerate map filter zip reversed dict bytes bytearray deque chain islice array".split()
)
ORDER_TELLING_METHODS = frozenset({"join", "extend", "fromkeys", "from_iterable", "extendleft", "writelines"})

RULES = frozenset({"clock", "chance", "thread", "process", "file", "network", "hash", "set-order"})

ADVICE = {
    "clock": "take `now` or a clock as a parameter, or loop.time()",
    "chance": "take a random.Random as a parameter",
    "thread": "use loop.run_in_executor",
    "process": "keep helper processes and shared memory behind a device seam",
    "file": "go through magnetar.runtime.files",
    "network": "use the loop's create_server and create_connection",
    "hash": "hash() of str and bytes differs between processes; use xxhash",
    "set-order": "sort it, or keep the elements as the keys of a dict",
}


def _allow(pattern: str, rules: str, reason: str) -> Allow:
    names = RULES if rules == "*" else frozenset(rules.split())
    assert names <= RULES, f"unknown rule in {rules!r}"
    assert reason, "an exception needs a reason"
    return Allow(pattern, frozenset(names), reason)


# The allow table: one line per exception, each with its reason.
ALLOWED: tuple[Allow, ...] = (
    _allow(
        "client/magnetar/cli/*",
        "*",
        "the outermost shell (commands, perf): it wires in the real things",
    ),
    _allow(
        "client/magnetar/spark/*",
        "clock process network chance",
        "runs inside Spark's executors, outside the simulation",
    ),
    _allow(
        "broker/magnetar/archive/process.py",
        "file thread network",
        "a helper process: a thread of it waits for the end of its broker",
    ),
    _allow(
        "broker/magnetar/archive/reader.py", "network", "hands the helper process its end of a socket pair"
    ),
    _allow("broker/magnetar/archive/files.py", "chance", "draws the names of files that are not whole yet"),
    _allow(
        "client/magnetar/spark/program.py",
        "file thread",
        "a job's process: threads of it wait for the end of its command, and look at Spark's progress",
    ),
    _allow("client/magnetar/spark/jobs/folders.py", "file", "looks at folders that Spark is going to write"),
    _allow(
        "proto/magnetar/runtime/lifecycle.py",
        "thread",
        "ends a process whose loop has ended, and whose threads do not",
    ),
    _allow("client/magnetar/client/blocking.py", "thread", "the facade runs the loop in a thread of its own"),
    _allow(
        "client/magnetar/client/client.py", "chance", "seeds the generator of a client that is given none"
    ),
    _allow("proto/magnetar/runtime/clock.py", "clock", "the real clock behind the clock seam"),
    _allow("proto/magnetar/runtime/files.py", "file", "the real disk behind the file seam"),
    _allow("proto/magnetar/runtime/http.py", "network", "names the type of a listening socket handed in"),
    _allow("proto/magnetar/runtime/processes.py", "process", "real helper processes behind the device seams"),
    _allow(
        "client/magnetar/spark/leases.py", "thread", "renews leases beside Spark's own calls, which block"
    ),
    _allow("proto/magnetar/runtime/settings.py", "file", "reads the TOML file before anything runs"),
    _allow(
        "bookie/magnetar/bookie/device/*",
        "process file clock network thread",
        "the journal writer and the disk worker: processes behind device seams, and the daemon's side of them",
    ),
    _allow(
        "bookie/magnetar/bookie/index/linked_files.py",
        "file",
        "shows RocksDB, which knows no seam, a directory of links; for commands only, never in a daemon",
    ),
)


def check(source: Source) -> Iterator[Finding]:
    """Yield what is not deterministic in one file, without regard to ALLOWED."""
    kinds = Kinds(source.tree)
    for node in ast.walk(source.tree):
        for rule, what in _judge(node, kinds):
            line = getattr(node, "lineno", 1)
            yield Finding(source.path, line, rule, f"{what}: {ADVICE[rule]}")


def _judge(node: ast.AST, kinds: Kinds) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
        yield from _judge_mention(node, kinds)
    if isinstance(node, ast.Call):
        yield from _judge_call(node, kinds)
    for order in _orders(node, kinds):
        yield "set-order", f"iterates a set ({ast.unparse(order)})"


def _judge_mention(node: ast.Attribute | ast.Name, kinds: Kinds) -> Iterator[tuple[str, str]]:
    name = kinds.qualified(node)
    if name is None:
        return
    rule = _rule_of(name)
    # `random` in `random.random` and `os.path` in `os.path.exists` are judged with the whole chain, once.
    if rule is not None and not isinstance(kinds.parent(node), ast.Attribute):
        yield rule, name


def _rule_of(name: str) -> str | None:
    if name == SEEDED:
        return None
    for rule, names, modules in (
        ("clock", CLOCK, ()),
        ("chance", CHANCE, CHANCE_MODULES),
        ("thread", THREADS, THREAD_MODULES),
        ("process", PROCESSES, PROCESS_MODULES),
        ("file", FILES, FILE_MODULES),
        ("network", NETWORK, NETWORK_MODULES),
    ):
        if name in names or name.startswith(tuple(f"{module}." for module in modules)):
            return rule
    return None


def _judge_call(node: ast.Call, kinds: Kinds) -> Iterator[tuple[str, str]]:
    function = node.func
    if kinds.qualified(function) == SEEDED and not node.args and not node.keywords:
        yield "chance", "random.Random() without a seed"
    if isinstance(function, ast.Name) and kinds.is_builtin(function.id):
        if function.id == "open":
            yield "file", "open()"
        if function.id == "hash" and not _inside_dunder_hash(node, kinds):
            yield "hash", "hash()"
    if (
        isinstance(function, ast.Attribute)
        and function.attr in PATH_METHODS
        and kinds.is_path(function.value)
    ):
        yield "file", f"Path.{function.attr}"


def _inside_dunder_hash(node: ast.AST, kinds: Kinds) -> bool:
    return any(isinstance(f, ast.FunctionDef) and f.name == "__hash__" for f in enclosing(node, kinds))


def _orders(node: ast.AST, kinds: Kinds) -> Iterator[ast.expr]:
    """The set expressions whose order this node lets out."""
    candidates: list[ast.expr] = []
    match node:
        case ast.For(iter=over) | ast.AsyncFor(iter=over) | ast.YieldFrom(value=over):
            candidates.append(over)
        case ast.ListComp(generators=parts) | ast.DictComp(generators=parts):
            candidates += [part.iter for part in parts]
        case ast.GeneratorExp(generators=parts) if not _goes_into_order_blind(node, kinds):
            candidates += [part.iter for part in parts]
        case ast.Call(func=ast.Name(id=name), args=args) if name in ORDER_TELLING:
            if not _goes_into_order_blind(node, kinds):
                candidates += args
        case ast.Call(func=ast.Attribute(attr="pop", value=owner), args=[]):
            candidates.append(owner)
        case ast.Call(func=ast.Attribute(attr=name), args=args) if name in ORDER_TELLING_METHODS:
            candidates += args
        case ast.Starred(value=value) if not isinstance(kinds.parent(node), ast.Set):
            candidates.append(value)
        case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value):
            candidates.append(value)
        case _:
            return
    for candidate in candidates:
        if kinds.is_set(candidate):
            yield candidate


def _goes_into_order_blind(node: ast.AST, kinds: Kinds) -> bool:
    parent = kinds.parent(node)
    return (
        isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in ORDER_BLIND
    )
