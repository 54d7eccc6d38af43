"""What LLM promises to its caller: bad arguments are named, and its calls can be nested, shared by threads, and cut short."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime import LLM, ConfigError, RequestError, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> LLM:
    return LLM(tiny_engine, num_kv_blocks=16, threads=1)


@pytest.fixture(autouse=True)
def _nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.pool.num_free == 16


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("max_num_seqs", "3", "an integer from 1 to 64"),
        ("max_num_seqs", True, "an integer from 1 to 64"),
        ("max_model_len", 8.0, "an integer from 1 to 256"),
        ("threads", 2.5, "an integer from 1 to 1024"),
        ("num_kv_blocks", 2.0, "an integer from 1 to 2147483647"),
        ("kv_memory", 1.5e9, "an integer"),
        ("kv_memory", float("nan"), "an integer"),
        ("kv_memory", 10**30, "an integer"),
        ("enable_prefix_caching", "no", "True or False"),
        ("backend", "", "one of: onnxruntime, torch, tensorrt"),
    ],
)
def test_an_option_of_the_wrong_type_is_named(tiny_engine: Path, option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value!r}.*{allowed}"):
        LLM(tiny_engine, **{option: value})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("block_size",), 16, r"kv_cache.0 as .*2, 2, 32, 32.*engine.json as .*2, 2, 16, 32"),
        (("kv_dtype",), "float16", r"kv_cache.0 as .*float\).*engine.json as .*float16"),
        (("model", "num_layers"), 3, r"kv_cache.3 as .*engine.json as None"),
        (("model", "num_layers"), 5, r"kv_cache.4 as None, engine.json as "),
        (("model", "vocab_size"), 500, r"logits as .*320.*engine.json as .*500"),
    ],
)
def test_a_manifest_that_is_not_the_graphs_is_refused(
    tiny_engine: Path, tmp_path: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    manifest = json.loads((engine / "engine.json").read_text())
    *parents, name = path
    functools.reduce(lambda at, key: at[key], parents, manifest)[name] = value
    (engine / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=f"model.onnx has {message}.*; export the engine again"):
        LLM(engine)


def test_a_step_that_onnx_runtime_refuses_is_told_once(
    tiny_engine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    manifest = json.loads((engine / "engine.json").read_text())
    manifest["limits"]["max_model_len"] = 1000
    (engine / "engine.json").write_text(json.dumps(manifest))
    llm = LLM(engine, threads=1)
    with pytest.raises(RuntimeError, match=r"seq_lens\[0\] is 300, but rope has 256 rows"):
        llm.generate([1] * 300, GREEDY)
    assert capfd.readouterr() == ("", "")
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks


@pytest.mark.parametrize("option", [{"num_kv_blocks": 2**31 - 1}, {"kv_memory": 2**62}])
def test_a_pool_that_memory_cannot_hold_is_named(tiny_engine: Path, option: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"2147483647 KV blocks take .* GB.*lower num_kv_blocks or kv_memory"):
        LLM(tiny_engine, **option)


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        (None, "NoneType"),
        (5, "int"),
        (b"hello", "bytes"),
        ([b"hello"], "bytes"),
        (bytearray(b"hello"), "bytearray"),
        (memoryview(b"hello"), "memoryview"),
        ({"prompt": "hello"}, "dict"),
        ([{"prompt": "hello"}], "dict"),
        ({"one", "two"}, "set"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_type(llm: LLM, prompts: Any, found: str) -> None:
    with pytest.raises(RequestError, match=f"prompts? .*{found}.*text or .*token ids"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("prompt", [None, 5, b"hello", {"prompt": "hello"}])
def test_the_engine_takes_no_other_prompts_either(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt is a.*text or a list of token ids"):
        llm.engine.add_request("x", prompt, GREEDY)


@pytest.mark.parametrize("params", ["greedy", 5, ["greedy"], [None], {}])
def test_what_are_no_sampling_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("hello", params)


@pytest.mark.parametrize("messages", [USER, 5, [USER, 5]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages, GREEDY)


def test_prompts_may_come_from_any_iterable(llm: LLM) -> None:
    assert tokens(llm.generate(iter(["ab", "cd"]), GREEDY)) == tokens(llm.generate(["ab", "cd"], GREEDY))
    assert tokens(llm.generate(iter([1, 2]), GREEDY)) == tokens(llm.generate([1, 2], GREEDY))
    assert tokens(llm.chat(iter([USER]), GREEDY)) == tokens(llm.chat([[USER]], GREEDY))


def test_a_request_that_its_callback_aborts_ends_there(llm: LLM) -> None:
    whole = tokens(llm.generate(["ab", "cd"], GREEDY))

    def abort_first(output: RequestOutput) -> None:
        if output.prompt == "ab" and len(output.outputs[0].token_ids) == 2:
            llm.engine.abort(output.request_id)

    first, second = llm.generate(["ab", "cd"], GREEDY, on_output=abort_first)
    assert (first.finished, first.outputs[0].finish_reason, first.outputs[0].token_ids) == (True, "abort", whole[0][:2])
    assert second.outputs[0].token_ids == whole[1]


def test_a_callback_may_generate(llm: LLM) -> None:
    expected = tokens(llm.generate(["ab", "cd", "ef"], GREEDY))
    inner = []

    def generate(output: RequestOutput) -> None:
        if not inner:
            inner.extend(llm.generate("ef", GREEDY))

    outer = llm.generate(["ab", "cd"], GREEDY, on_output=generate)
    assert tokens([*outer, *inner]) == expected


def test_requests_of_others_are_neither_mixed_in_nor_disturbed(llm: LLM) -> None:
    expected = tokens(llm.generate(["ab", "other"], GREEDY))
    seen: set[str | None] = set()
    llm.engine.add_request("other", "other", GREEDY)
    llm.engine.step()
    assert tokens(llm.generate("ab", GREEDY, on_output=lambda output: seen.add(output.prompt))) == expected[:1]
    assert seen == {"ab"}
    longer = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    llm.engine.add_request("longer", "other", longer)
    llm.generate("ab", GREEDY)
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    assert outputs[0].outputs[0].token_ids[:4] == expected[1]


def test_threads_take_turns(llm: LLM) -> None:
    prompts = ["ab", "cd", "ef", "gh"]
    expected = tokens(llm.generate(prompts, GREEDY))
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        for _ in range(5):
            results[index] = tokens(llm.generate(prompts[index:], GREEDY))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {index: expected[index:] for index in range(4)}


def test_a_forked_process_is_told_to_load_its_own(llm: LLM) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("ab", GREEDY)
        except ConfigError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        assert pipe.read() == f"this engine was loaded by process {os.getpid()}; load it again in process {child}"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(tokens(llm.generate("ab", GREEDY))[0]) == 4
