"""What a person sees on stderr while something takes long; nothing where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes written; yields what takes (done, total)."""
    with _progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def stages_bar(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for work in stages; yields what takes (stage, done, total), total 1 or less meaning that nothing is counted."""
    with _progress(BarColumn(), TaskProgressColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(label, total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done if total > 1 else 0, total=total if total > 1 else None)

        yield show


@contextmanager
def rows_bar(label: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for rows of a file, with the time that is left; yields what takes (label, bytes done, bytes in all or None)."""
    with _progress(BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total)


class Spinner:
    """A line with what is being done now and for how long."""

    def __init__(self, bar: Progress, label: str) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=None)

    def update(self, label: str) -> None:
        """Say what is being done now."""
        self._bar.update(self._task, description=label)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the line away while the block writes to the terminal."""
        self._bar.stop()
        yield
        self._bar.start()


@contextmanager
def spinner(label: str) -> Iterator[Spinner]:
    """Show a Spinner while the block runs."""
    with _progress(TimeElapsedColumn(), first=SpinnerColumn()) as bar:
        yield Spinner(bar, label)


def _progress(*columns: ProgressColumn, first: ProgressColumn | None = None) -> Progress:
    console = Console(stderr=True, highlight=False)
    label = TextColumn("{task.description}", markup=False)
    return Progress(
        *([first] if first else []),
        label,
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )
