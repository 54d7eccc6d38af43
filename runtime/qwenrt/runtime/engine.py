"""LLMEngine: the loop that `LLM` and a server share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError, DeviceError, RequestError

from .adapters import AdapterRegistry, LoRARequest
from .backends import Backend
from .completion import Completion, Pooling
from .engine_dir import EngineManifest, Limits
from .job import Job, PreparedRequest
from .model_runner import ModelRunner
from .outputs import RequestOutput
from .pooling import PoolingParams, check_task
from .prompt_logprobs import Scored, score_prompts
from .request import Chunk, Request, StepPlan
from .sampling.constraint import Constraint
from .sampling.grammar import GrammarCompiler
from .sampling.params import SamplingParams
from .sampling.sampler import SampledToken, SequenceSampler, sample_checking_drafts
from .scheduler import Scheduler
from .speculation import Drafter, SpeculativeConfig, Speculator
from .text.thinking import ThinkingTokens
from .text.tokenizer import Tokenizer


@dataclass(slots=True)
class StepTimings:
    """Seconds spent in each part of all steps so far."""

    steps: int = 0
    schedule: float = 0.0
    prepare: float = 0.0
    execute: float = 0.0
    sample: float = 0.0
    process: float = 0.0


_Sampled = list[SampledToken] | RequestError | npt.NDArray[np.float32]
"""What a step found for a request: its tokens, why there are none, or the row of logits of one that samples none."""


class LLMEngine:
    """Requests in, steps, outputs out. Not thread-safe, `prepare` excepted: one thread owns an engine."""

    def __init__(
        self,
        manifest: EngineManifest,
        limits: Limits,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        num_kv_blocks: int,
        enable_prefix_caching: bool = True,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.manifest = manifest
        self.limits = limits
        self.backend = backend
        self.tokenizer = tokenizer
        self._lora = backend.lora
        slots = 0 if self._lora is None else self._lora.num_slots
        self.scheduler = Scheduler(limits, manifest.block_size, num_kv_blocks, enable_prefix_caching, slots)
        self.adapters = AdapterRegistry(manifest, {} if self._lora is None else self._lora.shapes)
        self.runner = ModelRunner(limits, manifest.block_size)
        self.timings = StepTimings()
        self.speculator = Speculator(speculative) if speculative else None
        self._owner = os.getpid()
        self.failure: DeviceError | None = None
        """Why the engine takes nothing more: its device failed and the KV pool is lost. None while it works."""
        self._jobs: dict[str, Job] = {}
        self._answers: dict[Request, tuple[Job, Completion | Pooling]] = {}
        self._grammars = GrammarCompiler(tokenizer, manifest.model.vocab_size, manifest.eos_token_ids)
        self._plan: StepPlan | None = None

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> Job:
        """Queue a prompt (text or token ids).

        Raises RequestError, and changes nothing, if it cannot be served; DeviceError if the device has failed before.

        add_special_tokens: as `Tokenizer.encode` has it; False for a rendered chat template. lora_request: the adapter to answer
        with, on an engine that was exported for adapters. The job is for a caller who looks at it rather than at what every step
        returns.
        """
        prepared = self.prepare(prompt, params, add_special_tokens=add_special_tokens, lora_request=lora_request)
        return self.submit(request_id, prepared)

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """Tokenize a prompt, check it and compile its grammar; raises RequestError if it cannot be served.

        Safe to call from any thread.
        """
        text = prompt if isinstance(prompt, str) else None
        adapter = None if lora_request is None else self.adapters.get(lora_request)
        if isinstance(params, PoolingParams):
            token_ids = self._token_ids(prompt, add_special_tokens)
            self._check_prompt(token_ids, self.limits.max_model_len)
            self._check_pool(token_ids, 1, "")
            return PreparedRequest(text, token_ids, params, 0, None, adapter)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; it must be a SamplingParams")
        check_task(self.manifest, "generate", "generate text")
        token_ids = self._token_ids(prompt, add_special_tokens)
        max_tokens = self._max_tokens(token_ids, params)
        if params.thinking_budget is not None and ThinkingTokens.of(self.tokenizer) is None:
            raise RequestError("thinking_budget needs a model that thinks: this one's tokenizer has no token <think>")
        structured = params.structured_outputs
        matcher = None if structured is None else self._grammars.compile(structured.source)
        return PreparedRequest(text, token_ids, params, max_tokens, matcher, adapter)

    def submit(self, request_id: str, prepared: PreparedRequest) -> Job:
        """Queue a prepared request; raises RequestError if its id is in use, DeviceError if the device has failed before."""
        self._check_alive()
        if request_id in self._jobs:
            raise RequestError(f"request_id {request_id!r} is in use; abort it first or choose another")
        params = prepared.params
        answers: list[Completion] | list[Pooling]
        if isinstance(params, PoolingParams):
            answers = [Pooling(self._request(request_id, prepared), params.columns)]
        else:
            answers = [self._completion(request_id, prepared, params, index) for index in range(params.n)]
        job = self._jobs[request_id] = Job(request_id, prepared.prompt, answers)
        for answer in answers:
            self._answers[answer.request] = (job, answer)
            self.scheduler.add(answer.request)
        return job

    def _request(
        self,
        request_id: str,
        prepared: PreparedRequest,
        sampler: SequenceSampler | None = None,
        drafter: Drafter | None = None,
    ) -> Request:
        return Request(
            request_id=request_id,
            token_ids=list(prepared.token_ids),
            num_prompt=len(prepared.token_ids),
            max_tokens=prepared.max_tokens,
            sampler=sampler,
            drafter=drafter,
            adapter=prepared.adapter,
        )

    def _completion(self, request_id: str, prepared: PreparedRequest, params: SamplingParams, index: int) -> Completion:
        """Answer `index` of the n to a request, with its Request."""
        eos_token_ids = frozenset(self.manifest.eos_token_ids)
        constraint = self._constraint(prepared, params)
        sampler = SequenceSampler(params, prepared.token_ids, eos_token_ids, index, constraint)
        drafter = Drafter(self.speculator, eos_token_ids | set(params.stop_token_ids)) if self.speculator else None
        request = self._request(request_id, prepared, sampler, drafter)
        request.prompt_logprobs = params.prompt_logprobs
        return Completion(index, request, params, self.tokenizer, eos_token_ids)

    def _constraint(self, prepared: PreparedRequest, params: SamplingParams) -> Constraint | None:
        budget, matcher = params.thinking_budget, prepared.matcher
        if budget is None and matcher is None:
            return None
        return Constraint(
            self.tokenizer,
            prepared.token_ids,
            self.manifest.eos_token_ids,
            thinking_budget=budget,
            matcher=None if matcher is None else matcher.copy(),
        )

    def _max_tokens(self, token_ids: list[int], params: SamplingParams) -> int:
        """How many tokens may follow the prompt; raises RequestError if the engine cannot serve that."""
        params.validate_for(self.manifest.model.vocab_size)
        self._check_prompt(token_ids, self.limits.max_model_len - (params.max_tokens != 0))
        room = self.limits.max_model_len - len(token_ids)
        pool = self.scheduler.pool.num_blocks
        if params.max_tokens is None:
            room = min(room, pool * self.manifest.block_size + 1 - len(token_ids))
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._check_pool(token_ids, max(max_tokens, 1), f" and max_tokens is {params.max_tokens}")
        return max_tokens

    def _check_prompt(self, token_ids: list[int], most: int) -> None:
        vocab_size = self.manifest.model.vocab_size
        if not token_ids:
            raise RequestError("prompt is empty; give at least one token")
        for token in token_ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(f"prompt holds token id {token!r}; ids are integers from 0 to {vocab_size - 1}")
        if len(token_ids) > most:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; with max_model_len {self.limits.max_model_len} it may have "
                f"{most} at most"
            )

    def _check_pool(self, token_ids: list[int], max_tokens: int, limit: str) -> None:
        """Raise RequestError if a request could never have the blocks that it needs; `limit` tells its max_tokens, if it has."""
        needed, pool = self.scheduler.blocks_for_alone(len(token_ids), max_tokens), self.scheduler.pool.num_blocks
        if needed > pool:
            remedy = "lower max_tokens or raise num_kv_blocks" if limit else "shorten it or raise num_kv_blocks"
            raise RequestError(
                f"prompt has {len(token_ids)} tokens{limit}: that needs {needed} KV blocks and the pool has {pool}; {remedy}"
            )

    def _token_ids(self, prompt: str | Sequence[int], add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
            raise RequestError(f"prompt is a {type(prompt).__name__}; it must be text or a list of token ids")
        if isinstance(prompt, str):
            most = self.limits.max_model_len
            return self.tokenizer.encode(prompt, max_tokens=most, add_special_tokens=add_special_tokens)
        return list(prompt)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self._jobs)

    def requests_in_step(self) -> set[str]:
        """The ids of the requests that the last step computed or tried to; of all requests if it failed before it knew."""
        if self._plan is None:
            return set(self._jobs)
        return {chunk.request.request_id for chunk in self._plan.chunks}

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks; returns what it had generated, or None if there is no such request."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        for answer in job.answers:
            if answer.finish_reason is None:
                answer.finish("abort")
                self._retire(answer)
        return job.output()

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that have something new, each with its answers so far.

        If the backend or the sampler raises, the step is undone and every request is where it was before. But if the backend
        raises DeviceError, every request ends with finish_reason "abort" and that message as stop_reason, and is returned; the
        engine must be loaded again, which is what `failure`, and DeviceError from the next call, say.
        """
        return [job.output() for job in self.step_jobs()]

    def step_jobs(self) -> list[Job]:
        """`step` without building outputs: the jobs that have something new."""
        if os.getpid() != self._owner:
            # The compute threads did not follow the fork.
            raise ConfigError(
                f"this engine was loaded by process {self._owner}; load it again in process {os.getpid()}"
            )
        self._check_alive()
        timings = self.timings
        started = perf_counter()
        self._plan = None
        if self.speculator:
            self._guess()
        plan = self._plan = self.scheduler.plan()
        if not plan.chunks:
            assert not self._jobs, "requests are waiting and none can run"
            return []
        try:
            planned = perf_counter()
            if self._lora is not None:
                self.scheduler.adapters.load(self._lora.set)
            inputs = self.runner.prepare(plan)
            prepared = perf_counter()
            logits = self.backend.execute(inputs)
            executed = perf_counter()
            sampling = [chunk for chunk in plan.chunks if chunk.samples]
            logits, scored = score_prompts(logits, plan.chunks)
            results = _sample(logits, sampling)
        except DeviceError as error:
            self.scheduler.rollback(plan)
            return self._fail(error)
        except BaseException:
            self.scheduler.rollback(plan)
            for chunk in plan.chunks:
                if chunk.request.sampler is not None:
                    chunk.request.sampler.rollback()
            raise
        sampled = perf_counter()
        self.scheduler.commit(plan, [[one.token_id for one in new] if isinstance(new, list) else [] for new in results])
        committed = perf_counter()
        changed = self._process_prompts(plan, scored) + self._process(sampling, results)
        processed = perf_counter()
        timings.steps += 1
        timings.schedule += planned - started + committed - sampled
        timings.prepare += prepared - planned
        timings.execute += executed - prepared
        timings.sample += sampled - executed
        timings.process += processed - committed
        if self.speculator and len(sampling) == len(plan.chunks):
            self.speculator.cost.record(sum(chunk.count for chunk in plan.chunks), processed - started)
        return changed

    def _guess(self) -> None:
        """Give the requests that decode something to check."""
        running = self.scheduler.running
        for request in running:
            if request.drafter is not None and request.num_computed == request.num_tokens - 1:
                room = request.max_tokens - request.num_generated - 1
                request.drafts = request.drafter.propose(request.token_ids, room=room, sequences=len(running))

    def _process_prompts(self, plan: StepPlan, scored: Scored) -> list[Job]:
        """Hand out log-probabilities of prompts; returns the jobs that fail by them."""
        failed = []
        for chunk in plan.chunks:
            new = scored.get(chunk.request)
            if new is None:
                continue
            job, completion = self._answers[chunk.request]
            assert isinstance(completion, Completion)
            if isinstance(new, RequestError):
                completion.finish("abort", str(new))
                self._retire(completion)
                if job.finished:
                    del self._jobs[job.request_id]
                failed.append(job)
            else:
                completion.append_prompt(chunk.start, new)
            if chunk.samples:
                chunk.request.prompt_logprobs = None
        return failed

    def _process(self, sampling: list[Chunk], sampled: list[_Sampled]) -> list[Job]:
        changed: dict[Job, None] = {}
        for chunk, new in zip(sampling, sampled, strict=True):
            entry = self._answers.get(chunk.request)
            if entry is None:
                continue
            job, answer = entry
            if isinstance(answer, Pooling):
                assert isinstance(new, np.ndarray)
                answer.take(new)
            else:
                self._append(answer, chunk, new)
            changed[job] = None
            if answer.finish_reason is not None:
                self._retire(answer)
                if job.finished:
                    del self._jobs[job.request_id]
        return list(changed)

    def _append(self, completion: Completion, chunk: Chunk, new: _Sampled) -> None:
        assert chunk.request.sampler is not None and not isinstance(new, np.ndarray)
        chunk.request.sampler.commit()
        if isinstance(new, RequestError):
            completion.finish("abort", str(new))
            return
        if completion.request.max_tokens == 0:
            completion.finish("length")
        if chunk.drafts and chunk.request.drafter is not None:
            chunk.request.drafter.record(len(chunk.drafts), len(new) - 1)
        for one in new:
            if completion.finish_reason is None:
                completion.append(one)

    def _fail(self, error: DeviceError) -> list[Job]:
        """End every request, since what all of them had computed is lost with the device."""
        self.failure = DeviceError(f"{error}; what the device held is lost: load the engine again")
        jobs = list(self._jobs.values())
        for answer in [answer for _, answer in self._answers.values()]:
            answer.finish("abort", str(self.failure))
            self._retire(answer)
        self._jobs.clear()
        return jobs

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise DeviceError(str(self.failure))

    def _retire(self, answer: Completion | Pooling) -> None:
        self.scheduler.finish(answer.request)
        del self._answers[answer.request]


def _sample(logits: npt.NDArray[np.float32], chunks: Sequence[Chunk]) -> list[_Sampled]:
    """What the rows of `logits` [R, width] give for the chunks that own them, in their order."""
    samplers = [sampler for chunk in chunks if (sampler := chunk.request.sampler) is not None]
    drafts = [chunk.drafts for chunk in chunks if chunk.request.sampler is not None]
    if len(samplers) == len(chunks):
        return [*sample_checking_drafts(logits, samplers, drafts)]
    pooled = np.repeat([chunk.request.sampler is None for chunk in chunks], [chunk.num_logits for chunk in chunks])
    rows, tokens = iter(logits[pooled]), iter(sample_checking_drafts(logits[~pooled], samplers, drafts))
    return [next(rows) if chunk.request.sampler is None else next(tokens) for chunk in chunks]
