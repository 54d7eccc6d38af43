"""`qwenrt serve --ray`: several engines that look like one server, of which any may be killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from openai import OpenAI

from qwenrt.runtime import LLM, SamplingParams

from .batch_file import chat_row, examples
from .processes import family, reachable_ports
from .served import Served

LONG = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 1500, "temperature": 0}


def client_of(served: Served, **options: Any) -> OpenAI:
    url = f"http://127.0.0.1:{served.port}/v1"
    return OpenAI(base_url=url, **{"api_key": "none", "max_retries": 0, "timeout": 300, **options})


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def replicas_of(served: Served) -> list[int]:
    """The processes of the replicas."""
    return [pid for pid, args in family(served.process.pid).items() if args.startswith("ray::ServeReplica")]


@pytest.fixture(scope="module")
def served(demo_engine: Path) -> Iterator[Served]:
    """Two replicas."""
    served = Served(demo_engine, "--ray", "local", "--replicas", "2", "--served-model-name", "demo")
    processes = family(served.process.pid)
    yield served
    assert served.end(signal.SIGTERM) == (0, "")
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_openais_client_sees_one_server_that_answers_as_the_engine_does(served: Served, demo_engine: Path) -> None:
    client = client_of(served)
    assert [model.id for model in client.models.list().data] == ["demo"]
    chosen = examples(12)
    llm = LLM(demo_engine, num_kv_blocks=512)
    params = SamplingParams(temperature=0, max_tokens=60)

    def ask(index: int) -> str:
        body = chat_row("", chosen[index])["body"]
        body["extra_body"] = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
        if index % 2:
            chunks = client.chat.completions.create(model="demo", stream=True, **body)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return client.chat.completions.create(model="demo", **body).choices[0].message.content or ""

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(len(chosen))))
    for example, answer in zip(chosen, answers, strict=True):
        (alone,) = llm.chat([example.messages], params, enable_thinking=example.enable_thinking)
        assert alone.outputs[0].text.endswith(answer) and answer


def test_errors_are_those_of_one_server(served: Served) -> None:
    client = client_of(served)
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="demo", prompt={"no": "prompt"})  # type: ignore[call-overload]
    assert served.post({}, "/v1/nothing")[0] == 404


def test_a_client_that_vanishes_amid_a_stream_frees_its_blocks(served: Served) -> None:
    stream = client_of(served).completions.create(
        model="demo", prompt="abc", max_tokens=2000, extra_body={"ignore_eos": True}, stream=True
    )
    next(iter(stream))
    assert served.metric("vllm:num_requests_running") == 1
    assert served.metric("vllm:kv_cache_usage_perc") > 0
    stream.close()
    until(lambda: served.metric("vllm:num_requests_running") == 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0
    assert served.metric("vllm:generation_tokens_total") < 2000


def test_the_metrics_are_the_sum_of_all_replicas(served: Served) -> None:
    before = served.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        bodies = [LONG | {"prompt": f"{index:040d}" * 5, "max_tokens": 10} for index in range(16)]
        assert {status for status, _ in pool.map(served.post, bodies)} == {200}
    assert served.metric("vllm:generation_tokens_total") == before + 160
    each = served.metrics("qwenrt:replica_generation_tokens_total")
    assert len(each) == 2 and min(each) > 0 and sum(each) == before + 160


def test_what_other_machines_reach_answers_nobody_who_has_not_the_token(served: Served) -> None:
    ports = reachable_ports(set(family(served.process.pid)))
    assert len(ports) == 2  # Ray Serve opens one a replica, whether it is used or not
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refusal:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=60)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_replica_killed_under_load_loses_its_requests_alone_and_comes_back(served: Served, demo_engine: Path) -> None:
    prompts = [f"{index:040d}" * 5 for index in range(16)]
    before = served.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(served.stream, LONG | {"prompt": prompt, "max_tokens": 400}) for prompt in prompts]
        until(lambda: served.metric("vllm:num_requests_running") == 16)
        os.kill(replicas_of(served)[0], signal.SIGKILL)
        events = [stream.result() for stream in streams]
    llm = LLM(demo_engine, num_kv_blocks=512)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    lost = 0
    for output, (*data, done) in zip(outputs, events, strict=True):
        assert done == "[DONE]"
        *chunks, last = map(json.loads, data)
        if "error" in last:
            lost += 1
            assert (last["error"]["code"], last["error"]["type"]) == ("replica_lost", "server_error")
        else:
            chunks.append(last)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert output.outputs[0].text.startswith(text) and ("error" in last or text == output.outputs[0].text)
    assert 0 < lost < 16
    assert served.post(LONG | {"max_tokens": 5})[0] == 200
    until(lambda: served.metric("qwenrt:replicas") == 2)
    assert served.metric("vllm:generation_tokens_total") >= before
