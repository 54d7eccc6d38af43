#!/usr/bin/env bash
# Set everything up in .venv: system packages that are missing, ONNX Runtime's headers, Python packages, the compiled ops.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

fail() { echo "setup: $1" >&2; exit 1; }

install() { # package, what it is for
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing $1 ($2)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null
    else
        fail "$2 is missing; install the package $1 (Debian, Ubuntu: sudo apt-get install $1) and run make again"
    fi
}

command -v "$python" >/dev/null || install python3 "Python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1 | cut -d' ' -f2), qwenrt needs 3.11 or later; name another one: make PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null || install python3-venv "Python's venv module"
command -v c++ >/dev/null || install g++ "a C++ compiler"
bash tools/setup/onnxruntime_headers.sh

[ -x .venv/bin/python ] || "$python" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Alone and exact, so that no other package decides which build of torch is taken.
echo "setup: installing PyTorch, some minutes"
.venv/bin/pip install -q torch==2.13.0
echo "setup: installing the other packages and compiling the ops"
.venv/bin/pip install -q -e '.[export,dev]'
touch .venv/.ready
