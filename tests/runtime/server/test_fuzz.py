"""The API under requests made from its own OpenAPI document: every answer is one that the document has, and none is a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks

from qwenrt.runtime import LLM

from .conftest import Server

pytestmark = pytest.mark.slow
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[Server]:
    server = Server(LLM(tiny_engine, num_kv_blocks=64, max_num_seqs=8), request_timeout=30)
    yield server
    server.until(lambda: server.is_idle)
    assert server.request("GET", "/health")[0] == 200
    server.stop()


def test_requests_made_from_the_document_get_the_answers_it_has(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) > 8
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def fuzz(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("max_tokens", None)
                case.body.pop("timeout", None)
            response = case.call()
            case.validate_response(response, checks=CHECKS)
            assert response.status_code not in (500, 503, 504), (case.body, response.content[:300])

        fuzz()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "messages", "prompt", "model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template_kwargs", "thinking_budget", "echo",
    "priority", "min_tokens", "stop_token_ids", "presence_penalty", "repetition_penalty", "timeout",
]  # fmt: skip


@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.booleans(),
)
@settings(max_examples=1500, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_any_value_in_any_field_is_served_or_refused(
    server: Server, path: str, fields: dict[str, Any], proper: bool
) -> None:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {"max_tokens": 3, **base, **fields} if proper else fields
    status, headers, data = server.request("POST", path, body)
    assert status in (200, 400, 404, 504), (body, data[:300])
    if headers["content-type"] == "application/json":
        json.loads(data)


@given(
    st.binary(max_size=200), st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
)
@settings(max_examples=500, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_any_bytes_are_refused(server: Server, data: bytes, path: str) -> None:
    status, _, answer = server.request("POST", path, data)
    assert status in (200, 400), answer
