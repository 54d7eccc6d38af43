"""`qwenrt build`: TensorRT plans for an engine folder that has the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from qwenrt.exporter import build_plans
from qwenrt.plugins.tensorrt_module import RTX_COMPUTE_CAPABILITIES

from .errors import printable
from .options import Function
from .progress import stages_bar


def plan_options(function: Function) -> Function:
    """The options of a build of plans; they are parameters of `build_plans` and of `export`."""
    for option in (
        click.option("--strip-weights", is_flag=True, help="Leave the weights out of the plan; loading fills them in."),
        click.option(
            "--compute-capability",
            "compute_capabilities",
            multiple=True,
            type=click.Choice(RTX_COMPUTE_CAPABILITIES),
            help="For target tensorrt-rtx, a GPU generation to build for. Repeatable.  [default: 8.9 and 12.0]",
        ),
    ):
        function = option(function)
    return function


@contextmanager
def build_notices() -> Iterator[Callable[[str], None]]:
    """Yields what takes lines about what was built; they go to stderr when the block has ended, below no progress bar."""
    lines: list[str] = []
    try:
        yield lines.append
    finally:
        for line in lines:
            click.echo(printable(line), err=True)


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@plan_options
def command(engine: Path, compute_capabilities: tuple[str, ...], strip_weights: bool) -> None:
    """Build TensorRT plans for an engine folder.

    ENGINE is what `qwenrt export --target tensorrt` or `tensorrt-rtx` wrote, here or on another machine; the checkpoint is not
    needed. A plan for the same GPU generation and TensorRT release is replaced. Prints the folder.

    \b
    Examples:
      qwenrt build engines/gpu
      qwenrt build engines/rtx --compute-capability 8.6
    """
    with build_notices() as notice, stages_bar(f"building {engine}") as progress:
        build_plans(
            engine,
            compute_capabilities=compute_capabilities,
            strip_weights=strip_weights,
            progress=progress,
            notice=notice,
        )
    click.echo(engine)
