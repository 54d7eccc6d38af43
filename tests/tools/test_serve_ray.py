"""`qwenrt serve --ray`: several engines that look like one server, of which any may be killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import threading
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
from .command import qwenrt
from .conftest import Here
from .processes import family, reachable_ports
from .served import Served

LONG = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 1500, "temperature": 0}


QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
EACH = "qwenrt:replica_generation_tokens_total"


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


def words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices("abcdefgh", k=4)) for _ in range(count))


@pytest.fixture(scope="module")
def served(demo_engine: Path) -> Iterator[Served]:
    """Two replicas."""
    served = Served(demo_engine, "--ray", "local", "--replicas", "2", "--served-model-name", "demo")
    processes = family(served.process.pid)
    yield served
    status, stderr = served.end(signal.SIGTERM)
    # Ray may add a line about the replica that was killed.
    assert status == 0 and "Traceback" not in stderr, stderr
    until(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])


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


def test_clients_that_come_and_go_at_random_leave_nothing(served: Served) -> None:
    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        data = json.dumps(LONG | {"prompt": words(chance, 50), "stream": chance.random() < 0.5}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(chance.random() * 0.02)

    whole = r'vllm:request_success_total\{finished_reason="length",model_name="demo"\}'
    before = served.metrics(whole)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(600)))
    until(lambda: served.metric("vllm:num_requests_running") + served.metric("vllm:num_requests_waiting") == 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0
    assert served.metrics(whole) == before


def test_the_metrics_are_the_sum_of_all_replicas(served: Served) -> None:
    before = served.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        bodies = [LONG | {"prompt": f"{index:040d}" * 5, "max_tokens": 10} for index in range(16)]
        assert {status for status, _ in pool.map(served.post, bodies)} == {200}
    assert served.metric("vllm:generation_tokens_total") == before + 160
    each = served.metrics(EACH)
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


def test_the_turns_of_a_conversation_find_what_one_engine_would_have_cached(served: Served, demo_engine: Path) -> None:
    chance = random.Random(3)
    conversations = [[words(chance, 60)] for _ in range(12)]
    asked: list[list[dict[str, str]]] = []
    before = {name: served.metric(name) for name in (QUERIES, HITS)}
    each = served.metrics(EACH)

    def turn(conversation: list[str]) -> None:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(conversation)]
        asked.append(messages)
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        status, answer = served.post(body, "/v1/chat/completions")
        assert status == 200, answer
        conversation += [answer["choices"][0]["message"]["content"] or "", words(chance, 12)]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            list(pool.map(turn, conversations))
    rate = (served.metric(HITS) - before[HITS]) / (served.metric(QUERIES) - before[QUERIES])
    assert all(after > before for after, before in zip(served.metrics(EACH), each, strict=True))

    llm = LLM(demo_engine, num_kv_blocks=512)
    outputs = [llm.chat([messages], SamplingParams(temperature=0, max_tokens=12))[0] for messages in asked]
    alone = sum(one.num_cached_tokens for one in outputs) / sum(len(one.prompt_token_ids) for one in outputs)
    assert alone > 0.5
    assert rate > 0.9 * alone


@pytest.mark.slow
def test_an_update_of_the_engine_fails_no_request(demo_engine: Path, tmp_path: Path) -> None:
    link = tmp_path / "engine"
    link.symlink_to(demo_engine)
    served = Served(link, "--ray", "local", "--replicas", "2", "--api-key", "sesame", "--drain-timeout", "300")
    client = client_of(served, api_key="sesame")
    over = threading.Event()

    def ask(number: int) -> set[str]:
        texts = set()
        while not over.is_set():
            for stream in (False, True):
                answer: Any = client.completions.create(
                    model="engine",
                    prompt=f"{number:040d}" * 5,
                    max_tokens=100,
                    temperature=0,
                    stream=stream,
                    extra_body={"ignore_eos": True},
                )
                texts.add("".join(one.choices[0].text for one in (answer if stream else [answer])))
        return texts

    def log() -> str:
        assert served.process.stderr is not None
        return served.process.stderr.readline().decode()

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        old = set(replicas_of(served))
        shutil.copytree(demo_engine, tmp_path / "next")
        link.unlink()
        link.symlink_to(tmp_path / "next")
        served.process.send_signal(signal.SIGHUP)
        assert log() == f"qwenrt: WARNING: all replicas have the engine of {tmp_path / 'next'}\n"
        until(lambda: not old & set(replicas_of(served)))
        new = set(replicas_of(served))
        assert len(new) == 2

        link.unlink()
        link.symlink_to(tmp_path / "nowhere")
        served.process.send_signal(signal.SIGHUP)
        assert "nowhere does not exist" in log()
        assert set(replicas_of(served)) == new

        with pytest.raises(openai.AuthenticationError):
            client_of(served).models.list()
        over.set()
        assert {len(one.result()) for one in asking} == {1}
        last = pool.submit(ask_once, client)
        until(lambda: served.metric("vllm:num_requests_running") == 1)
        assert served.end(signal.SIGTERM) == (0, "")
        assert last.result() == 1500


def ask_once(client: OpenAI) -> int:
    answer = client.completions.create(
        model="engine", prompt="abc", max_tokens=1500, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


@pytest.mark.slow
def test_replicas_are_started_while_requests_wait(demo_engine: Path) -> None:
    served = Served(
        demo_engine, "--ray", "local", "--replicas", "1", "--max-replicas", "2", "--max-num-seqs", "2", "--threads", "1"
    )
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            assert served.post(LONG | {"max_tokens": 300})[0] == 200

    with ThreadPoolExecutor(12) as pool:
        asking = [pool.submit(ask) for _ in range(12)]
        assert served.metric("qwenrt:replicas") == 1
        until(lambda: served.metric("qwenrt:replicas") == 2)
        until(lambda: min(served.metrics(EACH)) > 0)
        over.set()
        for one in asking:
            one.result()
    assert served.end(signal.SIGTERM) == (0, "")


@pytest.mark.slow
def test_why_no_replica_starts_is_said_in_one_line(demo_engine: Path) -> None:
    status, _, stderr = qwenrt(
        "serve", demo_engine, "--ray", "local", "--replicas", "1", "--port", "0", "--max-model-len", "100000"
    )
    assert (status, stderr.count("\n")) == (1, 1)
    assert stderr.startswith("qwenrt: error: max_model_len is 100000")
    status, _, stderr = qwenrt("serve", demo_engine, "--ray", "local", "--replicas", "1000", "--port", "0")
    assert status == 1
    assert re.fullmatch(r"qwenrt: error: 1000 engines need a CPU each, and .*; run fewer\n", stderr)


def test_what_ray_needs_is_said_in_one_line(demo_engine: Path, here: Here) -> None:
    assert here("serve", demo_engine, "--replicas", "2")[0] == 2
    assert here("serve", demo_engine, "--ray", "local", "--replicas", "2", "--max-replicas", "1")[0] == 2
    status, _, stderr = qwenrt("serve", demo_engine, "--port", "0", "--ray", "local", blocked=("ray",))
    assert (status, stderr) == (1, "qwenrt: error: this needs ray; install it with: pip install 'qwenrt[ray]'\n")
