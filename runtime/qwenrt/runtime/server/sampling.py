"""A request's fields as SamplingParams, over the defaults that the checkpoint recommends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError, RequestError

from ..sampling.params import SamplingParams
from ..sampling.structured import StructuredOutputsParams
from .protocol import GenerationRequest

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAME_NAME = (
    *_RECOMMENDED,
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """Sampling fields of a folder's generation_config.json, greedy where it says do_sample false; raises ConfigError."""
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_bytes()) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); copy it again from the checkpoint") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; copy it again from the checkpoint")
    fields = {name: config[name] for name in _RECOMMENDED if config.get(name) is not None}
    if config.get("do_sample") is False:
        fields["temperature"] = 0.0
    try:
        SamplingParams(**fields)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return fields


def sampling_params(
    body: GenerationRequest,
    recommended: Mapping[str, Any],
    *,
    structured: StructuredOutputsParams | None,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """What a request asks of the sampler; raises RequestError naming the field that is wrong."""
    fields = dict(recommended)
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    return SamplingParams(
        **fields,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_by_token(body.logit_bias),
        structured_outputs=structured,
        thinking_budget=thinking_budget,
    )


def answer_form(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that a request asks its answer to have, by whichever of the fields for it."""
    forms: list[dict[str, Any]] = [
        {"json": body.guided_json},
        {"regex": body.guided_regex},
        {"choice": body.guided_choice},
        {"grammar": body.guided_grammar},
        _of_response_format(body),
        {}
        if body.structured_outputs is None
        else body.structured_outputs.model_dump(by_alias=True, exclude_unset=True),
    ]
    given = [form for form in forms if any(value is not None for value in form.values())]
    if body.structured_outputs is not None and forms[-1] not in given:
        StructuredOutputsParams()
    if len(given) > 1:
        raise RequestError(
            "more than one form of the answer is given; give one of response_format, structured_outputs and guided_*"
        )
    return StructuredOutputsParams(**given[0]) if given else None


def _of_response_format(body: GenerationRequest) -> dict[str, Any]:
    form = body.response_format
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None:
        raise RequestError("response_format.json_schema is missing; give the schema, or the type json_object")
    return {"json": form.json_schema.schema_}


def _by_token(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON has only texts as keys."""
    if biases is None:
        return None
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise RequestError(f"logit_bias has the key {token[:40]!r}; keys are token ids")
    return {int(token): bias for token, bias in biases.items()}
