#!/usr/bin/env bash
# Puts ONNX Runtime's C headers in build/onnxruntime-headers, from the Debian package libonnxruntime-dev: the wheels have none, and
# any version of 1.17 or later will do. Needs no root. Does nothing where they lie there or in the system.
set -euo pipefail
cd "$(dirname "$0")/../.."
package=libonnxruntime-dev
target=build/onnxruntime-headers
header=usr/include/onnxruntime/onnxruntime_c_api.h

fail() {
    echo "onnxruntime_headers: $1; install the package $package, or unpack an ONNX Runtime release" \
        "(onnxruntime-linux-*.tgz) and set ONNXRUNTIME_ROOT to its folder" >&2
    exit 1
}

if [ -n "${ONNXRUNTIME_ROOT:-}" ] || [ -e "/$header" ] || [ -e "$target/$header" ]; then exit 0; fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "this machine has no apt-get to fetch $package with"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
private=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=true
    -o Acquire::Languages=none -o Acquire::Retries=2)

fetch() { # apt options: which sources to look in
    apt-get "${private[@]}" "$@" -qq update >"$work/log" 2>&1 &&
        (cd "$work" && apt-get "${private[@]}" "$@" -qq download "$package") >>"$work/log" 2>&1
}

echo "onnxruntime_headers: fetching $package"
if ! fetch; then
    # An older release than the first with the package: take it from that one, at the mirrors that this machine uses. Where this is
    # not Debian they have no such release, and the loop finds nothing.
    found=
    while read -r mirror; do
        echo "deb [arch=$(dpkg --print-architecture)] $mirror trixie main" >"$work/sources.list"
        if fetch -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-; then
            found=yes
            break
        fi
    done < <(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sort -u)
    if [ -z "$found" ]; then
        tail -n 3 "$work/log" >&2
        fail "none of this machine's package sources has $package"
    fi
fi
dpkg -x "$work/$package"_*.deb "$work/unpacked"
[ -e "$work/unpacked/$header" ] || fail "$package has no $header"
rm -rf "$target"
mkdir -p "$(dirname "$target")"
mv "$work/unpacked" "$target"
