"""A process's own view of the machine: user, mount, PID and IPC namespaces by system call.

Used by the keeper, after a fork and before the harness runs; the mounts come from gyre.harness.confine. Only the
standard library, and little of it: it is loaded once for every run and every evaluation.

The promise, once `enter` and then `drop_privileges` have returned: the file system is read-only and without devices
but for the mounts asked for; /proc shows the run's own processes only, and its switches cannot be turned; no
capability and no way to get one is left.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 4
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # the same number on every architecture
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_CAPBSET_DROP = 1, 4, 15, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PROC_SWITCHES = ("sys", "sysrq-trigger", "irq", "bus")
"""Parts of /proc by which uid 0 changes the whole machine, whatever its capabilities."""
_TMP_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def unshare() -> None:
    """Move this (single-threaded) process to new namespaces; its next child is the first of the new PID namespace.

    The user keeps its number inside, so that files made in the workspace belong to it.
    """
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC, what="user namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def enter(mounts: list[tuple[str, str]]) -> None:
    """Make the view: called by the first process of the PID namespace.

    `mounts` are (kind, path), parents first: `tmp` a fresh private folder, `empty` a fresh one that stays empty and
    read-only, `ro` and `rw` the path itself as it was before the view was made.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    sources = {path: _clone(path) for kind, path in mounts if kind in ("ro", "rw")}
    devices = {name: _clone(f"/dev/{name}") for name in _DEVICES if os.path.exists(f"/dev/{name}")}
    _set_attributes(_AT_FDCWD, "/", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    _make_proc()
    _make_dev(devices)
    for kind, path in mounts:
        if kind in ("tmp", "empty"):
            os.makedirs(path, exist_ok=True)
            mode = "1777" if kind == "tmp" else "0755"
            _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode},size={_TMP_BYTES}")
        else:
            _make_place(path, like=sources[path])
            attributes = _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if kind == "ro" else 0)
            _set_attributes(sources[path], "", attributes)
            _attach(sources[path], path)
    for kind, path in mounts:
        if kind == "empty":
            _set_attributes(_AT_FDCWD, path, _ATTR_RDONLY, recursive=False)


def drop_privileges() -> None:
    """Give up every capability, for this process and all that it will start, whatever they execute."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)(), what="capabilities")


def no_new_privileges() -> None:
    """From here on no program that this process runs can gain a privilege (sudo and its kind are plain programs)."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(signal: int) -> None:
    """Have the kernel send `signal` to this process when its parent ends."""
    prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Become the parent of every orphan among this process's descendants."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_from_debuggers() -> None:
    """Nobody without privilege may look into this process (its descriptors, its memory)."""
    prctl(_PR_SET_DUMPABLE, 0)


def set_name(name: str) -> None:
    """The name that ps shows in its `comm` column."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), 0, 0, 0, what="prctl")


def _make_proc() -> None:
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for name in PROC_SWITCHES:
        path = f"/proc/{name}"
        if os.path.exists(path):
            tree = _clone(path)
            _set_attributes(tree, "", _ATTR_RDONLY)
            _attach(tree, path)


def _make_dev(devices: dict[str, int]) -> None:
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=0755,size=1m")
    for name, tree in devices.items():
        _make_place(f"/dev/{name}", like=tree)
        _attach(tree, f"/dev/{name}")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")
    os.mkdir("/dev/pts")
    _mount("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")
    os.mkdir("/dev/shm")
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={_TMP_BYTES}")


def _make_place(path: str, like: int) -> None:
    """Somewhere to mount on, where the path is not there any more (its parent is a fresh folder)."""
    if os.path.lexists(path):
        return
    if os.path.isdir(f"/proc/self/fd/{like}"):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call(
        "mount",
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() or None,
        what=f"mount on {target}",
    )


def _clone(path: str) -> int:
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    return _system_call(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags, what=f"open {path}")


def _attach(tree: int, path: str) -> None:
    _system_call(
        _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH, what=f"mount on {path}"
    )
    os.close(tree)


def _set_attributes(directory: int, path: str, attributes: int, *, recursive: bool = True) -> None:
    flags = (_AT_RECURSIVE if recursive else 0) | (0 if path else _AT_EMPTY_PATH)
    attr = _MountAttr(attributes, 0, 0, 0)
    _system_call(
        _SYS_MOUNT_SETATTR,
        directory,
        path.encode(),
        flags,
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
        what=f"mount attributes of {path or 'a bind mount'}",
    )


def _system_call(number: int, *arguments: object, what: str) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments, what=what)


def _call(name: str, *arguments: object, what: str) -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return int(result)
