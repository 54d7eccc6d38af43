"""The kernels over the emulator."""

from __future__ import annotations

import ctypes
from pathlib import Path

from gpu_check.memory import Buffer, HostMemory
from gpu_check.op import CudaOp, LaunchError
from qwenrt.plugins.cuda_api import ENTRIES, Args, ExpertsArgs


class EmulatedCuda(CudaOp):
    """A build of tests/simt."""

    def __init__(self, library: Path, *, seed: int = 0, num_sms: int = 4) -> None:
        super().__init__(library, HostMemory())
        self.library.simt_error.restype = ctypes.c_char_p
        self.seed = seed
        self.num_sms = num_sms

    def launch(self, args: Args | ExpertsArgs, entry: str | None = None) -> None:
        """Calls one launcher, by default the whole op; raises LaunchError with what the emulator says of it."""
        self.library.simt_configure(self.seed, self.num_sms)
        status = getattr(self.library, entry or ENTRIES[type(args.shape)])(ctypes.byref(args))
        if status != 0:
            raise LaunchError(status, self.library.simt_error().decode())

    def writes_to(self, buffers: dict[str, Buffer]) -> None:
        self.library.simt_unwatch_all()
        for buffer in buffers.values():
            self.library.simt_watch(ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.nbytes))
