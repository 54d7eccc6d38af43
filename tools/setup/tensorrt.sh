#!/usr/bin/env bash
# What compiling and trying the TensorRT plugin needs where TensorRT is not installed; needs no root, and does nothing twice.
#   tensorrt.sh headers   TensorRT's C++ headers in build/tensorrt/headers, from the wheel kernel-lens (0.2 MB), unless nvidia.py
#                         finds some already.
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

case "${1:-}" in
    headers) headers ;;
    *) fail "say what to set up: $0 headers" ;;
esac
