"""The process of one rank but the first: computes the steps that the first one sends it, until that one is gone.

Run as a script by `tensor_parallel`. What comes over the connection, whose descriptor is the argument, is a `RankSetup` and then
frames of steps; what goes back is one frame when the process is there, empty, and one that tells why it ends, if it fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from ..engine_dir import EngineDir, Limits
from ..kv_budget import KvBudget
from ..model_runner import StepInputs
from .rank_group import RankGroup
from .torch import TorchBackend

_SIZES = 4
"""Numbers before a step's arrays: tokens, sequences, blocks of a sequence, rows of logits."""


@dataclasses.dataclass(frozen=True)
class RankSetup:
    """What a rank loads; `meeting_place` is a folder that all ranks can write to."""

    engine: str
    meeting_place: str
    rank: int
    device: str
    limits: Limits
    budget: KvBudget
    threads: int

    def to_json(self) -> bytes:
        """The setup as one frame."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, frame: bytes) -> RankSetup:
        """What `to_json` was given."""
        values = json.loads(frame)
        return cls(**values | {"limits": Limits(**values["limits"]), "budget": KvBudget(**values["budget"])})

    def load(self) -> TorchBackend:
        """This rank's backend, once all ranks are there."""
        engine = EngineDir.open(self.engine)
        return TorchBackend(
            engine,
            device=self.device,
            limits=self.limits,
            budget=self.budget,
            threads=self.threads,
            rank=self.rank,
            group=lambda device: RankGroup(Path(self.meeting_place), self.rank, engine.manifest.tp, device),
        )


def pack(inputs: StepInputs) -> bytes:
    """A step without adapters as one frame of int32."""
    sizes = (len(inputs.input_ids), *inputs.block_tables.shape, len(inputs.logits_indices))
    arrays = (
        inputs.input_ids,
        inputs.positions,
        inputs.block_tables.reshape(-1),
        inputs.seq_lens,
        inputs.query_start,
        inputs.logits_indices,
    )
    return np.concatenate([np.array(sizes, np.int32), *arrays]).tobytes()


def unpack(frame: bytes) -> StepInputs:
    """The step of a frame, in memory of its own."""
    values = np.frombuffer(bytearray(frame), np.int32)
    tokens, sequences, blocks, rows = values[:_SIZES].tolist()
    lengths = (tokens, tokens, sequences * blocks, sequences, sequences + 1, rows)
    parts = np.split(values[_SIZES:], np.cumsum(lengths)[:-1])
    input_ids, positions, block_tables, seq_lens, query_start, logits_indices = parts
    return StepInputs(
        input_ids=input_ids,
        positions=positions,
        block_tables=block_tables.reshape(sequences, blocks),
        seq_lens=seq_lens,
        query_start=query_start,
        logits_indices=logits_indices,
    )


def main() -> int:
    """Serve until the connection ends."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.ExitStack() as at_end:
        return _serve(connection, at_end)


def _serve(connection: Connection, at_end: contextlib.ExitStack) -> int:
    try:
        setup = RankSetup.from_json(connection.recv_bytes())
        # Where the first rank is killed, nobody else does.
        at_end.callback(shutil.rmtree, setup.meeting_place, ignore_errors=True)
        connection.send_bytes(b"")
        backend = setup.load()
        while True:
            backend.execute(unpack(connection.recv_bytes()))
    except EOFError:
        return 0
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return 1


if __name__ == "__main__":
    sys.exit(main())
