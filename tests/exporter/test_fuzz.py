"""Checkpoints from an enemy: whatever a file holds, the loader ends soon, in little memory, with a checkpoint or one ConfigError.

`corpus/` has files that were made to hurt, by the name of the file that each stands in for. `target` takes any; it is driven by
hypothesis, and by a coverage-guided fuzzer through `test_damage.hypothesis.fuzz_one_input`.
"""

from __future__ import annotations

import copy
import json
import os
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwenrt.exporter import ModelConfig, open_checkpoint
from qwenrt.exporter.modeling import parameter_sources
from qwenrt.plugins import ConfigError

from .small_checkpoint import small_files

CORPUS = Path(__file__).with_name("corpus")
CASES = sorted(path.relative_to(CORPUS) for path in CORPUS.rglob("*") if path.is_file())
ACCEPTED = {
    "config.json/positions-max": "4 Mi positions of 4 elements are a table of 64 MiB",
    "model.safetensors/metadata-list": "nobody reads it",
    "model.safetensors/metadata-number": "nobody reads it",
}
"""Those of the corpus that are no reason to refuse, and why."""
FILES = small_files()
KINDS = [FILES, *(small_files(kind) for kind in ("fp8", "gptq", "w8a8", "w4a16"))]
MOST_MEMORY = 8 << 20
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63, 2**70, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "../x", "F32", "F8_E4M3", "model.safetensors", "qwen3", "yarn", "🤗" * 30),
    *([], [0], [[]], [0, 0], [2**40] * 3, {}, {"": {}}, {"rope_type": "yarn", "factor": 2}),
)


def load(folder: Path) -> None:
    """Everything that an export reads of a checkpoint before it writes."""
    config, checkpoint = ModelConfig.from_dir(folder), open_checkpoint(folder)
    checkpoint.check(config)
    for sources in parameter_sources(config).values():
        for name in sources:
            checkpoint.read(name).sum()
            checkpoint.forget(name)


def target(files: dict[str, bytes]) -> None:
    """Load a folder with these files; anything but a checkpoint or a ConfigError of one line raises."""
    with tempfile.TemporaryDirectory() as name:
        for file, data in files.items():
            Path(name, file).write_bytes(data)
        tracemalloc.start()
        try:
            load(Path(name))
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert len(str(error)) < 600  # noqa: PT017
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < MOST_MEMORY


@pytest.mark.parametrize("files", KINDS, ids=range(len(KINDS)))
def test_undamaged_files_are_a_checkpoint(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    load(tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_of_the_corpus_is_refused(case: Path, tmp_path: Path) -> None:
    files = {**FILES, str(case.parent): (CORPUS / case).read_bytes()}
    target(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    if str(case) in ACCEPTED:
        load(tmp_path)
    else:
        with pytest.raises(ConfigError):
            load(tmp_path)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys or indices."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def damaged_json(draw: st.DrawFn, data: bytes) -> bytes:
    """One to three values, keys or entries of the document replaced, renamed, removed or copied to another place."""
    document = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(document))
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        action = draw(st.sampled_from(["replace", "remove", "rename", "copy"]))
        if action == "replace":
            container[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif action == "remove":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[draw(st.sampled_from(["", "x", "\0", "model.embed_tokens.weight", "lm_head.weight"]))] = (
                container.pop(key)
            )
        else:
            other, place = draw(st.sampled_from(found))
            other[place] = copy.deepcopy(container[key])
    return json.dumps(document).encode()


def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.integers(0, 12)))
    return data[:start] + draw(st.binary(max_size=12)) + data[end:]


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, bytes]:
    """The files of a checkpoint, one or two of them damaged."""
    files = dict(draw(st.sampled_from(KINDS)))
    for name in draw(st.lists(st.sampled_from(sorted(FILES)), min_size=1, max_size=2, unique=True)):
        data, header = files[name], b""
        if name == "model.safetensors":
            length = int.from_bytes(data[:8], "little")
            header, data = data[8 : 8 + length], data[8 + length :]
        way = draw(st.sampled_from(["json", "json", "json", "bytes", "seed"]))
        if way == "seed":
            files[name] = draw(
                st.sampled_from([(CORPUS / c).read_bytes() for c in CASES if str(c.parent) == name] or [data])
            )
            continue
        if way == "bytes":
            files[name] = damaged_bytes(draw, files[name])
            continue
        changed = damaged_json(draw, header or data)
        files[name] = struct.pack("<Q", len(changed)) + changed + data if header else changed
    return files


@given(files=damaged())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_damage(files: dict[str, bytes]) -> None:
    target(files)


@pytest.mark.slow
@given(files=damaged())
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_much_damage(files: dict[str, bytes]) -> None:
    target(files)


BOMBS = {
    "a header of lists": ("model.safetensors", b'{"a":[' + b"[]," * (10 << 20) + b"0]}"),
    "a header of objects": ("model.safetensors", b'{"a":[' + b"{}," * (10 << 20) + b"0]}"),
    "a header that is too long": ("model.safetensors", b'{"a":"' + b" " * (33 << 20) + b'"}'),
    "an index of lists": ("model.safetensors.index.json", b'{"weight_map":[' + b"[]," * (10 << 20) + b"0]}"),
    "a config of lists": ("config.json", b'{"a":[' + b"[]," * (33 << 20) + b"0]}"),
    "a list of layer types": ("config.json", b'{"layer_types":[' + b"0," * (500 << 10) + b"0]}"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_a_gigabyte(name: str, tmp_path: Path) -> None:
    file, text = BOMBS[name]
    if file == "model.safetensors":
        text = struct.pack("<Q", len(text)) + text
    for other, data in {**FILES, file: text}.items():
        (tmp_path / other).write_bytes(data)
    code = (
        "import resource, sys; from qwenrt.exporter import ModelConfig, open_checkpoint\n"
        "from qwenrt.plugins import ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try: config, checkpoint = ModelConfig.from_dir(sys.argv[1]), open_checkpoint(sys.argv[1])\n"
        "except ConfigError as error: sys.exit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, timeout=120).returncode == 3
