#!/usr/bin/env bash
# What compiling and trying the TensorRT plugin needs where TensorRT is not installed; needs no root, and does nothing twice.
#   tensorrt.sh headers   TensorRT's C++ headers in build/tensorrt/headers, from the wheel kernel-lens (0.2 MB), unless nvidia.py
#                         finds some already.
#   tensorrt.sh rtx       a Python of its own in build/tensorrt/rtx with TensorRT for RTX (230 MB), which builds engines with no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "tensorrt: $1" >&2; exit 1; }

headers() {
    local target=build/tensorrt/headers
    if reason=$("$python" tools/setup/nvidia.py tensorrt 2>&1); then return; fi
    [ -z "${TENSORRT_ROOT:-}" ] || fail "$reason"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download -q --no-deps -d "$work" kernel-lens==2.0.1 ||
        fail "the wheel kernel-lens with TensorRT's headers could not be fetched; unpack TensorRT and set TENSORRT_ROOT to its folder"
    "$python" -m zipfile -e "$work"/kernel_lens-*.whl "$work/wheel"
    mkdir -p build/tensorrt
    rm -rf "$target"
    mv "$work/wheel/kernel_lens/include/tensorrt" "$target"
}

rtx() {
    local target=build/tensorrt/rtx
    if [ -e "$target/.ready" ]; then return; fi
    rm -rf "$target"
    mkdir -p build/tensorrt
    "$python" -m venv "$target"
    "$target/bin/python" -m pip install -q tensorrt-rtx-cu13==1.7.1.116 polygraphy==0.53.6 numpy onnx ||
        fail "tensorrt-rtx-cu13 could not be installed: it has wheels for Python 3.9 to 3.14 on Linux x86_64 and aarch64"
    # Its ONNX parser loads the library by a name that the wheel lacks, and ends the process where there is none.
    mkdir -p "$target/lib/unversioned"
    ln -sfn "$("$target/bin/python" -c 'import pathlib, tensorrt_rtx_libs as l; print(pathlib.Path(l.__file__).parent)')/libtensorrt_rtx.so.1" \
        "$target/lib/unversioned/libtensorrt_rtx.so"
    touch "$target/.ready"
}

case "${1:-}" in
    headers) headers ;;
    rtx) rtx ;;
    *) fail "say what to set up: $0 headers|rtx" ;;
esac
