"""A set that takes no memory however many members it has."""

from __future__ import annotations

import sqlite3


class DiskSet:
    """A set of byte strings in a temporary file, which is gone when it is closed or the process ends, however that happens."""

    def __init__(self) -> None:
        # The empty name is SQLite's for a file that is created when the cache is full, and has no name in the file system.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA cache_size = -16384")  # KiB
        self._database.execute("CREATE TABLE members (member BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, member: bytes) -> bool:
        """Add a member; returns whether it is new."""
        return self._database.execute("INSERT OR IGNORE INTO members VALUES (?)", (member,)).rowcount == 1

    def __contains__(self, member: bytes) -> bool:
        return self._database.execute("SELECT 1 FROM members WHERE member = ?", (member,)).fetchone() is not None

    def close(self) -> None:
        """Give the disk space back."""
        self._database.close()
