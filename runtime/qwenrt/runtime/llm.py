"""LLM: prompts in, answers out, in the order given."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from qwenrt.plugins import ConfigError, RequestError

from .backends import load_backend
from .engine import LLMEngine
from .engine_dir import EngineDir, Limits
from .kv_budget import choose_num_kv_blocks
from .outputs import RequestOutput
from .sampling.params import SamplingParams
from .speculation import SpeculativeConfig
from .text.chat_template import ChatTemplate
from .text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """An engine folder, loaded.

    path: the engine folder. backend: "onnxruntime" (default) or "torch". device: "cpu". max_num_seqs, max_num_batched_tokens,
    max_model_len: lower the folder's limits. num_kv_blocks or kv_memory (bytes): size of the KV pool; by default as much as all
    sequences at full length need, within a quarter of the free memory. threads: compute threads, default one for each core.
    speculative: guess tokens from earlier text and check them together; {"method": "ngram"} and the fields of SpeculativeConfig.
    Raises ConfigError when the folder or an option is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str | None = None,
        device: str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        num_kv_blocks: int | None = None,
        kv_memory: int | None = None,
        enable_prefix_caching: bool = True,
        threads: int | None = None,
        speculative: Mapping[str, Any] | None = None,
    ) -> None:
        folder = EngineDir.open(path)
        self.path = folder.path
        if device not in (None, "cpu"):
            raise ConfigError(f"device is {device!r}, an engine for {folder.manifest.target} runs on: cpu")
        limits = _lower_limits(
            folder.manifest.limits,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        if threads is None:
            threads = len(os.sched_getaffinity(0))
        elif not 1 <= threads <= 1024:
            raise ConfigError(f"threads is {threads}, must be 1 to 1024")
        num_kv_blocks = choose_num_kv_blocks(folder.manifest, limits, num_kv_blocks, kv_memory)
        tokenizer = Tokenizer.from_dir(folder.path)
        self.chat_template = ChatTemplate.from_dir(folder.path)
        self.engine = LLMEngine(
            folder.manifest,
            limits,
            load_backend(backend or "onnxruntime", folder, num_kv_blocks=num_kv_blocks, threads=threads),
            tokenizer,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
            speculative=None if speculative is None else SpeculativeConfig.from_mapping(speculative),
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt (text or token ids) or many, all batched together; outputs come in the order given.

        params: one for all, or one each; default `SamplingParams()`. add_special_tokens: whether texts get what the tokenizer
        puts around them (Llama's <s>; Qwen has nothing); no for a rendered chat template. on_output is called with each request
        that has something new after every step. Raises RequestError before anything runs if a prompt or its parameters cannot
        be served; on any exception (Ctrl-C too) the requests of this call are aborted and the LLM stays usable.
        """
        batch = _as_batch(prompts)
        every = _one_each(params, len(batch))
        ids = [f"generate-{next(self._ids)}" for _ in batch]
        done: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, one in zip(ids, batch, every, strict=True):
                self.engine.add_request(request_id, prompt, one, add_special_tokens=add_special_tokens)
            while len(done) < len(ids):
                for job in self.engine.step_jobs():
                    if job.finished:
                        done[job.request_id] = job.output()
                    if on_output is not None:
                        on_output(done.get(job.request_id) or job.output())
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"} messages) or many, through the checkpoint's chat template."""
        if not messages:
            raise RequestError("messages is empty; give at least one message")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.render(conversation, tools=tools, enable_thinking=enable_thinking)  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate(prompts, params, add_special_tokens=False, on_output=on_output)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
    ) -> str:
        """The prompt text that the checkpoint's chat template makes of a conversation."""
        if self.chat_template is None:
            raise RequestError("this engine's checkpoint has no chat template; give prompts as text instead")
        return self.chat_template.render(messages, tools=tools, enable_thinking=enable_thinking)


def _lower_limits(limits: Limits, **wanted: int | None) -> Limits:
    """The folder's limits with those lowered that were given."""
    values = {}
    for field in fields(limits):
        limit, value = getattr(limits, field.name), wanted[field.name]
        if value is not None and not 1 <= value <= limit:
            raise ConfigError(
                f"{field.name} is {value}, this engine takes 1 to {limit}; export it again with a higher limit"
            )
        values[field.name] = limit if value is None else value
    if values["max_num_seqs"] > values["max_num_batched_tokens"]:
        raise ConfigError(
            f"max_num_seqs is {values['max_num_seqs']} and max_num_batched_tokens {values['max_num_batched_tokens']}; "
            "a step takes a token of every sequence, so lower max_num_seqs"
        )
    return Limits(**values)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if not batch:
        raise RequestError("prompts is empty; give at least one prompt")
    if all(isinstance(item, int) for item in batch):
        return [batch]  # type: ignore[list-item]
    for item in batch:
        if not isinstance(item, (str, Sequence)):
            raise RequestError(f"a prompt is {type(item).__name__}; prompts are text or lists of token ids")
    return batch  # type: ignore[return-value]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts; give one for all or one each")
    return params
