"""Plans of TensorRT, or of TensorRT for RTX, on an NVIDIA GPU; needs no PyTorch.

`backend.py` runs steps; `plan_loader.py` gets the engine out of the folder; `execution.py` is one execution context,
`decode_graphs.py` the captured ones, `step_buffers.py` what goes to the device in each step; `trt_objects.py` is what differs
between the two libraries; `device.py` is the seam to CUDA and `cuda.py` what lies behind it.
"""

from .backend import TensorRtBackend

__all__ = ["TensorRtBackend"]
