"""What processes a command has started, and where they listen."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_LOOPBACK = frozenset({"0100007F", "0000000000000000FFFF00000100007F"})
"""As /proc/net has it."""


def family(root: int) -> dict[int, str]:
    """Command lines of all processes that descend from `root`, by id."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def descends(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return {int(pid): args for pid, _, args in rows if descends(int(pid))}


def reachable_ports(processes: set[int]) -> set[int]:
    """TCP ports on which these processes listen to other machines too."""
    inodes = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
            except OSError:
                continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                if address not in _LOOPBACK:
                    ports.add(int(port, 16))
    return ports
