"""Embeddings, reranking, scores and classes over HTTP are those that the engine gives offline."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from qwenrt.exporter import export
from qwenrt.runtime import LLM
from tests.checkpoints import write_checkpoint

from .conftest import Server

TEXTS = ["Paris is the capital of France.", "a", "Gravity pulls."]
DOCUMENTS = ["Berlin is in Germany.", "Paris.", "x" * 40]


@contextlib.contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Server]:
    server = Server(llm, **options)
    yield server
    server.until(lambda: server.is_idle)
    server.stop()


@pytest.fixture(scope="module")
def server(embedding: Path) -> Iterator[Server]:
    with serving(LLM(embedding.parent / "engine", num_kv_blocks=512)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def offline(embedding: Path) -> LLM:
    return LLM(embedding.parent / "engine", num_kv_blocks=512)


@pytest.fixture(scope="module")
def reranking(reranker: Path) -> Iterator[Server]:
    with serving(LLM(reranker.parent / "engine", num_kv_blocks=512)) as server:
        yield server


def test_openais_client_gets_the_embeddings_that_the_engine_gives(client: OpenAI, offline: LLM) -> None:
    expected = offline.embed(TEXTS)
    # The client asks for base64 where nothing else is said.
    for options in ({}, {"encoding_format": "float"}):
        response = client.embeddings.create(model="demo", input=TEXTS, **options)
        assert [one.index for one in response.data] == [0, 1, 2]
        for one, output in zip(response.data, expected, strict=True):
            np.testing.assert_allclose(one.embedding, output.embedding, rtol=1e-6, atol=1e-7)
        tokens = sum(len(output.prompt_token_ids) for output in expected)
        assert response.usage.prompt_tokens == response.usage.total_tokens == tokens


def test_inputs_may_be_one_text_or_token_ids(client: OpenAI, offline: LLM) -> None:
    ids = [output.prompt_token_ids for output in offline.embed(TEXTS)]
    by_text = [one.embedding for one in client.embeddings.create(model="demo", input=TEXTS).data]
    by_ids = [one.embedding for one in client.embeddings.create(model="demo", input=ids).data]
    [one_text] = client.embeddings.create(model="demo", input=TEXTS[0]).data
    [one_list] = client.embeddings.create(model="demo", input=ids[0]).data
    np.testing.assert_allclose(by_text, by_ids, atol=1e-6)
    np.testing.assert_allclose([one_text.embedding, one_list.embedding], by_text[:1] * 2, atol=1e-6)


def test_base64_is_of_float32_lowest_byte_first(server: Server, offline: LLM) -> None:
    status, answer = server.post("/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    assert status == 200
    values = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, offline.embed("a")[0].embedding, atol=1e-6)


def test_dimensions_normalize_and_instruction(client: OpenAI, offline: LLM) -> None:
    [one] = client.embeddings.create(model="demo", input="a", dimensions=10).data
    np.testing.assert_allclose(one.embedding, offline.embed("a", dimensions=10)[0].embedding, atol=1e-6)
    extra = {"normalize": False, "instruction": "Find papers"}
    [one] = client.embeddings.create(model="demo", input="a", extra_body=extra).data
    expected = offline.embed("a", normalize=False, instruction="Find papers")[0].embedding
    np.testing.assert_allclose(one.embedding, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions is 65; it must be an integer from 1 to 64"):
        client.embeddings.create(model="demo", input="a", dimensions=65)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input has 0 entries; it must have 1 to 2048"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input has 2049 entries"),
        ("/v1/embeddings", {"input": [[]]}, "prompt is empty"),
        ("/v1/embeddings", {"input": ["a", 1]}, "it must be text, token ids, or a list"),
        ("/v1/embeddings", {"input": [[5000]]}, "token id 5000"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream is not supported here"),
        ("/v1/embeddings", {"input": "x" * 1024}, "prompt has 1025 tokens"),
        ("/v1/embeddings", {"input": ["a", "x" * 3000]}, "3001 tokens|3000 characters"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents has 0 entries"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a"}, "documents: Field required"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 queries for 3 documents"),
        ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1 has 0 entries"),
        ("/classify", {"input": "a"}, "this engine's task is embed, it cannot classify"),
        ("/v1/completions", {"prompt": "a"}, "this engine's task is embed, it cannot generate text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "it cannot generate text"),
    ],
)
def test_what_is_wrong_is_told(server: Server, path: str, body: dict[str, Any], message: str) -> None:
    status, answer = server.post(path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert re.search(message, answer["error"]["message"]), answer
    assert server.post("/v1/embeddings", {"input": "a"})[0] == 200


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.embeddings.create(model="other", input="a")


def test_documents_come_in_the_order_of_their_scores(reranking: Server) -> None:
    query = "Where is Berlin?"
    expected = [output.score for output in LLM(reranking.llm.path, num_kv_blocks=512).score(query, DOCUMENTS)]
    order = sorted(range(3), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank"):
        status, answer = reranking.post(path, {"model": "demo", "query": query, "documents": DOCUMENTS})
        assert status == 200
        results = answer["results"]
        assert [one["index"] for one in results] == order
        assert [one["document"]["text"] for one in results] == [DOCUMENTS[index] for index in order]
        assert [one["relevance_score"] for one in results] == pytest.approx([expected[index] for index in order])
        assert answer["usage"]["total_tokens"] > 900
    objects = [{"text": text} for text in DOCUMENTS]
    body = {"query": query, "documents": objects, "top_n": 2, "return_documents": False, "instruction": "Find cities"}
    _, answer = reranking.post("/v1/rerank", body)
    assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2


def test_scores_of_pairs(server: Server, reranking: Server, offline: LLM) -> None:
    status, answer = server.post("/score", {"text_1": "a", "text_2": DOCUMENTS})
    assert status == 200
    expected = [output.score for output in offline.score("a", DOCUMENTS)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-6)
    _, answer = server.post("/v1/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS})
    assert [one["score"] for one in answer["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    _, answer = reranking.post("/score", {"text_1": "a", "text_2": "b"})
    assert 0 < answer["data"][0]["score"] < 1


def test_an_engine_that_generates_does_not_embed(reranking: Server) -> None:
    status, answer = reranking.post("/v1/embeddings", {"input": "a"})
    assert status == 400
    assert "this engine's task is generate, it cannot embed" in answer["error"]["message"]


def test_classes_have_names(tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "ugly"}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", task="classify", id2label=names, num_hidden_layers=1)
    export(checkpoint, tmp_path / "engine")
    expected = LLM(tmp_path / "engine", num_kv_blocks=64).classify(TEXTS)
    with serving(LLM(tmp_path / "engine", num_kv_blocks=64)) as server:
        status, answer = server.post("/classify", {"input": TEXTS})
        assert status == 200
        for one, output in zip(answer["data"], expected, strict=True):
            assert one["probs"] == pytest.approx(output.probs.tolist(), abs=1e-6)
            assert (one["label"], one["num_classes"]) == (names[int(output.probs.argmax())], 3)


def test_a_batch_larger_than_the_queue_is_served_and_leaves_room(embedding: Path, offline: LLM) -> None:
    texts = [f"text {number}" for number in range(300)]
    expected = offline.embed(texts)
    llm = LLM(embedding.parent / "engine", num_kv_blocks=512, max_num_seqs=4)
    with serving(llm, max_queue=2) as server:
        answers: list[tuple[int, Any]] = []
        batch = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", {"input": texts})))
        batch.start()
        server.until(lambda: server.async_llm.num_running > 0 or bool(answers))
        assert server.post("/v1/embeddings", {"input": "meanwhile"})[0] == 200
        batch.join(120)
        [(status, answer)] = answers
        assert status == 200
        for one, output in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(one["embedding"], output.embedding, atol=1e-6)
        assert server.metric("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"] + 10
        assert server.metric("vllm:request_success_total") == 301
        assert server.metric("vllm:prefix_cache_queries_total") == answer["usage"]["prompt_tokens"] + 10


def test_the_time_of_a_batch_counts_for_all_of_it(embedding: Path) -> None:
    llm = LLM(embedding.parent / "engine", num_kv_blocks=512, max_num_seqs=1, max_num_batched_tokens=4)
    with serving(llm) as server:
        status, answer = server.post("/v1/embeddings", {"input": [[7] * 500] * 2000, "timeout": 0.5})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        server.until(lambda: server.is_idle)
        assert server.post("/v1/embeddings", {"input": "a", "timeout": 100})[0] == 200


def test_a_full_queue_refuses_and_a_client_that_leaves_frees_its_places(embedding: Path) -> None:
    llm = LLM(embedding.parent / "engine", num_kv_blocks=512, max_num_seqs=1, max_num_batched_tokens=4)
    long = [[7] * 1000] * 50
    with serving(llm, max_queue=0) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", "/v1/embeddings", json.dumps({"input": long}), {"Content-Type": "application/json"})
        server.until(lambda: server.async_llm.num_running == 1)
        status, headers, body = server.request("POST", "/v1/embeddings", {"input": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        connection.close()
        server.until(lambda: server.is_idle)
        assert server.post("/v1/embeddings", {"input": "a"})[0] == 200
        assert server.metric("vllm:request_success_total") == 2
