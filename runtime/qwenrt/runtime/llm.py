"""LLM: prompts in, answers out, in the order given."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from qwenrt.plugins import ConfigError, RequestError

from .adapters import LoRARequest
from .backends import load_backend
from .engine import LLMEngine
from .engine_dir import EngineDir, Limits
from .job import Job
from .kv_budget import KvBudget
from .outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from .pooling import (
    PooledRow,
    PoolingParams,
    PoolingWork,
    Result,
    classification_work,
    embedding_work,
    scoring_work,
)
from .sampling.params import SamplingParams
from .speculation import SpeculativeConfig
from .text.chat_template import ChatTemplate
from .text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """An engine folder, loaded. Threads that share one take turns, a call of `generate` or `chat` each.

    path: the engine folder. backend: "onnxruntime", "torch" or "tensorrt", by default the one that the engine was exported
    for. device: "cpu", "cuda" or "cuda:N" (a GPU's number); backend torch runs on either. max_num_seqs,
    max_num_batched_tokens, max_model_len: lower the folder's limits. num_kv_blocks, kv_memory (bytes) or, on a GPU,
    gpu_memory_fraction (of all its memory, as much as may be in use in the end): size of the KV pool; by default as much as
    all sequences at full length need, within a quarter of the free memory, on a GPU within a fraction of 0.9. threads:
    compute threads on the CPU, default one for each core. max_loras: adapters that a step may use, on an engine exported for
    adapters; others wait. speculative: guess tokens from earlier text and check them together; {"method": "ngram"} and the
    fields of SpeculativeConfig. Raises ConfigError when the folder or an option is wrong.
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
        gpu_memory_fraction: float | None = None,
        enable_prefix_caching: bool = True,
        threads: int | None = None,
        speculative: Mapping[str, Any] | None = None,
        max_loras: int = 4,
    ) -> None:
        folder = EngineDir.open(path)
        self.path = folder.path
        limits = _lower_limits(
            folder.manifest.limits,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        threads = len(os.sched_getaffinity(0)) if threads is None else _integer("threads", threads, 1024)
        budget = KvBudget(num_kv_blocks=num_kv_blocks, kv_memory=kv_memory, gpu_memory_fraction=gpu_memory_fraction)
        if not isinstance(enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching is {enable_prefix_caching!r}, must be True or False")
        tokenizer = Tokenizer.from_dir(folder.path)
        self.chat_template = ChatTemplate.from_dir(folder.path)
        loaded = load_backend(
            backend,
            folder,
            device=device,
            limits=limits,
            budget=budget,
            threads=threads,
            max_loras=_integer("max_loras", max_loras, 1024),
        )
        self.engine = LLMEngine(
            folder.manifest,
            limits,
            loaded,
            tokenizer,
            num_kv_blocks=loaded.num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
            speculative=None if speculative is None else SpeculativeConfig.from_mapping(speculative),
        )
        self._ids = itertools.count()
        self._turn = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt (text or token ids) or many, all batched together; outputs come in the order given.

        params: one for all, or one each; default `SamplingParams()`. add_special_tokens: whether texts get what the tokenizer
        puts around them (Llama's <s>; Qwen has nothing); no for a rendered chat template. lora_request: the adapter to answer
        with, one for all or one (or None) each. on_output is called with each request
        that has something new after every step. Raises RequestError before anything runs if a prompt or its parameters cannot
        be served; on any exception (Ctrl-C too) the requests of this call are aborted and the LLM stays usable, unless it is
        DeviceError: then it must be loaded again.
        """
        batch = _as_batch(prompts)
        adapters = _adapters(lora_request, len(batch))
        jobs = self._answer(batch, _one_each(params, len(batch)), add_special_tokens, on_output, adapters)
        return [job.output() for job in jobs]

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        add_special_tokens: bool,
        on_output: Callable[[RequestOutput], None] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[Job]:
        """Run prompts together to their end."""
        ids = [f"request-{next(self._ids)}" for _ in prompts]
        with self._turn:
            try:
                jobs = [
                    self.engine.add_request(
                        request_id, prompt, own, add_special_tokens=add_special_tokens, lora_request=adapter
                    )
                    for request_id, prompt, own, adapter in zip(
                        ids, prompts, params, adapters or [None] * len(ids), strict=True
                    )
                ]
                self._run(jobs, on_output)
            finally:
                for request_id in ids:
                    self.engine.abort(request_id)
        return jobs

    def _run(self, jobs: Sequence[Job], on_output: Callable[[RequestOutput], None] | None) -> None:
        """Step until `jobs` are finished, in whatever step and by whatever means that happens."""
        own = set(jobs)
        pending = list(reversed(jobs))
        while pending:
            if pending[-1].finished:
                pending.pop()
                continue
            stepped = self.engine.step_jobs()
            if self.engine.failure is not None:
                raise self.engine.failure
            for job in stepped:
                if on_output is not None and job in own:
                    on_output(job.output())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"} messages) or many, through the checkpoint's chat template."""
        given = _items("messages", messages, "a list of messages, or of such lists")
        conversations = [given] if isinstance(given[0], Mapping) else given
        prompts = [
            self.render(conversation, tools=tools, enable_thinking=enable_thinking) for conversation in conversations
        ]
        return self.generate(prompts, params, add_special_tokens=False, lora_request=lora_request, on_output=on_output)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        instruction: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed one input (text or token ids) or many, on an engine of task embed; outputs come in the order given.

        An embedding is the final hidden state of the input's last token; texts get what the tokenizer puts around them, such as
        the end-of-text token that Qwen3-Embedding's appends. dimensions: keep only so many numbers, the first, of a model that
        was trained for that (Matryoshka). normalize: scale to length 1, after that. instruction: what the texts are queries for,
        put before each as Qwen3-Embedding has it; documents get none. Raises RequestError as `generate` does.
        """
        work = embedding_work(
            self.engine.manifest,
            _as_batch(inputs),
            dimensions=dimensions,
            normalize=normalize,
            instruction=instruction,
        )
        return self._pool(work)

    def classify(self, inputs: Prompt | Sequence[Prompt]) -> list[ClassificationOutput]:
        """Classify one input (text or token ids) or many, on an engine of task classify; outputs come in the order given.

        `engine.manifest.labels` names the labels. Raises RequestError as `generate` does.
        """
        return self._pool(classification_work(self.engine.manifest, _as_batch(inputs)))

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[ScoreOutput]:
        """How well each document suits the query, or its own of as many queries.

        On an engine of task generate (Qwen3-Reranker) the probability of "yes" against "no" as the answer to whether it does,
        asked in that model's own words with `instruction` as what to look for; on one of task classify with one label (rerankers
        saved so) the probability of the label for the same prompt; on one of task embed the cosine of both embeddings,
        `instruction` as in `embed`. Raises RequestError as `generate` does.
        """
        queries = [query] if isinstance(query, str) else _items("query", query, "text, or a list of texts")
        texts = [documents] if isinstance(documents, str) else _items("documents", documents, "a list of texts")
        return self._pool(
            scoring_work(self.engine.manifest, self.engine.tokenizer, queries, texts, instruction=instruction)
        )

    def _pool(self, work: PoolingWork[Result]) -> list[Result]:
        jobs = self._answer(work.prompts, [work.params] * len(work.prompts), work.add_special_tokens)
        return work.results([PooledRow.of(job.output()) for job in jobs])

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


def _integer(name: str, value: object, high: int, remedy: str = "") -> int:
    if type(value) is not int or not 1 <= value <= high:
        raise ConfigError(f"{name} is {value!r}, must be an integer from 1 to {high}{remedy}")
    return value


def _lower_limits(limits: Limits, **wanted: int | None) -> Limits:
    """The folder's limits with those lowered that were given."""
    values = dataclasses.asdict(limits)
    for name, limit in values.items():
        if wanted[name] is not None:
            values[name] = _integer(
                name, wanted[name], limit, ", the engine's limit; export it again with a higher one"
            )
    if values["max_num_seqs"] > values["max_num_batched_tokens"]:
        raise ConfigError(
            f"max_num_seqs is {values['max_num_seqs']} and max_num_batched_tokens {values['max_num_batched_tokens']}; "
            "a step takes a token of every sequence, so lower max_num_seqs"
        )
    return Limits(**values)


def _items(name: str, value: object, allowed: str) -> list[Any]:
    """What a sequence or an iterator gives; raises RequestError if it has no order, is text, bytes or empty."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is a {type(value).__name__}; it must be {allowed}")
    items = list(value)
    if not items:
        raise RequestError(f"{name} is empty; give at least one")
    return items


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = _items("prompts", prompts, "text or token ids, or a list of such prompts")
    return [batch] if all(isinstance(item, int) for item in batch) else batch


def _adapters(
    lora_request: LoRARequest | Iterable[LoRARequest | None] | None, count: int
) -> Sequence[LoRARequest | None]:
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    every = _items("lora_request", lora_request, "a LoRARequest, or a list of them")
    if len(every) != count:
        raise RequestError(f"{len(every)} adapters for {count} prompts; give one for all or one each")
    return every


def _one_each(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    every = _items("params", params, "SamplingParams, or a list of them")
    if len(every) != count:
        raise RequestError(f"{len(every)} sampling parameters for {count} prompts; give one for all or one each")
    return every
