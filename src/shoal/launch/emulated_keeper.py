"""The process that holds an emulated cluster's namespaces: ``python -m shoal.launch.emulated_keeper``.

The namespaces have no names; they live while a process is in them or holds one open. So nothing has to be
removed: when this process and those of the hosts are gone, the kernel takes namespaces, links and bridge
away. This process outlives the launcher by the moment that it takes to end what still runs on the hosts,
also when the launcher was killed. It leads a session of its own, out of reach of the terminal's Ctrl-C.

It reads the plan from stdin, a line of JSON, and answers with a line: the file descriptors, or the error.
Then it waits for the line ``close``, for the end of stdin, or for the launcher's death.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.json_text import parse_json
from shoal.launch.emulated_plan import INTERFACE, HostPlan, bridge_links, host_links, shaping

GRACE_S = 2.0
"""What runs on the hosts of a killed launcher gets SIGTERM, and SIGKILL after so long."""

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_POLL_S = 0.05
_TOOL_DEADLINE_S = 60.0

Namespace = tuple[int, int]
"""A network namespace by device and inode, as ``/proc/PID/ns/net`` shows it."""


def identity(path: str | int) -> Namespace:
    """Return which namespace an open file or a path of ``/proc`` stands for."""
    status = os.stat(path)  # noqa: PTH116 -- takes file descriptors too
    return status.st_dev, status.st_ino


def processes_in(namespaces: Collection[Namespace]) -> list[int]:
    """Return the processes, this one excepted, that are in one of these network namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended meanwhile, or is a zombie
                if identity(f"{entry}/ns/net") in namespaces:
                    found.append(int(entry.name))
    return found


def end_processes(namespaces: Collection[Namespace], *, grace_s: float) -> None:
    """End every process in these namespaces: SIGTERM, and after ``grace_s`` SIGKILL; wait until none is left.

    Found by namespace, not by parent: what has left its parent (a daemon) is found as well.
    """
    kill_at = time.monotonic() + grace_s
    asked: set[int] = set()
    num_empty = 0  # a process on its way in is seen the second time
    while num_empty < 2:
        found = processes_in(namespaces)
        num_empty = 0 if found else num_empty + 1
        for pid in found:
            number = signal.SIGKILL if time.monotonic() >= kill_at else signal.SIGTERM
            if number == signal.SIGKILL or pid not in asked:
                asked.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(_POLL_S)


class Keeper:
    """Makes the namespaces and links of the hosts and holds them open."""

    def __init__(self, hosts: list[HostPlan], *, ip: str, tc: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ip, self._tc = ip, tc
        self._hosts = hosts
        self.bridge = self._new_namespaces("bridge")[0]
        self.files = [self._new_namespaces(host.name) for host in hosts]
        self._enter(self.bridge)
        paths = [f"/proc/{os.getpid()}/fd/{network}" for network, _ in self.files]
        self._batch(ip, bridge_links(hosts, paths))
        self._batch(tc, "".join(shaping(host.port, host.rate_bps) for host in hosts))
        for host, (network, _) in zip(hosts, self.files, strict=True):
            self._enter(network)
            self._batch(ip, host_links(host))
            self._batch(tc, shaping(INTERFACE, host.rate_bps))
        self._enter(self.bridge)

    @property
    def namespaces(self) -> set[Namespace]:
        return {identity(file) for file in (self.bridge, *(network for network, _ in self.files))}

    def release(self) -> None:
        """Plug all cables in, at full speed, and have the kernel give up on what was still to be sent.

        A socket whose process is gone holds its namespace until the peer has acknowledged all, or until the
        kernel has sent it again 8 times, which takes minutes where a cable was pulled.
        """
        for host, (network, _) in zip(self._hosts, self.files, strict=True):
            self._enter(network)
            Path("/proc/sys/net/ipv4/tcp_orphan_retries").write_text("1", encoding="ascii")
            self._restore(INTERFACE)
            self._enter(self.bridge)
            self._restore(host.port)

    def _restore(self, device: str) -> None:
        for command in (
            [self._tc, "qdisc", "del", "dev", device, "root"],
            [self._ip, "link", "set", device, "up"],
        ):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=_TOOL_DEADLINE_S)

    def _new_namespaces(self, name: str) -> tuple[int, int]:
        """Move into new network and UTS namespaces; return open files of both."""
        self._checked(self._libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS))
        self._checked(self._libc.sethostname(name.encode(), len(name)))
        # an address of IPv6 would need seconds to be usable, and gloo might choose it
        for scope in ("all", "default"):
            with suppress(OSError):
                Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1", encoding="ascii")
        network, uts = (
            os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts")
        )
        return network, uts

    def _enter(self, network: int) -> None:
        self._checked(self._libc.setns(network, _CLONE_NEWNET))

    def _checked(self, result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _batch(self, tool: str, lines: str) -> None:
        if lines:
            subprocess.run(
                [tool, "-batch", "-"],
                input=lines,
                text=True,
                check=True,
                timeout=_TOOL_DEADLINE_S,
                capture_output=True,
            )


def main() -> int:
    """Make what stdin asks for, answer, hold it, and end what is left."""
    request: dict[str, Any] = parse_json(sys.stdin.readline(), "what the launcher asks for")
    launcher = _open_parent(request["launcher"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher's end decides
    try:
        keeper = Keeper([HostPlan(**host) for host in request["hosts"]], ip=request["ip"], tc=request["tc"])
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": _describe(error), "denied": _is_denied(error)}), flush=True)
        return 1
    print(json.dumps({"bridge": keeper.bridge, "hosts": keeper.files}), flush=True)
    ready, _, _ = select.select([0, launcher], [], [])
    asked = 0 in ready and sys.stdin.readline() == "close\n"
    end_processes(keeper.namespaces, grace_s=0 if asked else GRACE_S)
    keeper.release()
    shutil.rmtree(request["folder"], ignore_errors=True)
    return 0


def _open_parent(pid: int) -> int:
    """Return a file that becomes readable when the launcher ends.

    The end of stdin would not do: a process that the launcher has forked keeps the pipe open.
    """
    parent = os.pidfd_open(pid)
    if os.getppid() != pid:
        sys.exit(0)  # it has ended before
    return parent


def _describe(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd)}: {' '.join(error.stderr.split())}"
    return str(error)


def _is_denied(error: Exception) -> bool:
    if isinstance(error, subprocess.CalledProcessError):
        return "not permitted" in error.stderr
    return isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES)


if __name__ == "__main__":
    sys.exit(main())
