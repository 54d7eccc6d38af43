"""Greedy decoding: the first token that the reference would not have chosen.

The engine generates as users run it: scheduler, KV blocks, sampler. The reference then computes each text once, from its first
token: up to the first token that is not its own choice, both have the same text before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qwenrt.plugins import RequestError
from qwenrt.runtime import LLM, LoRARequest, RequestOutput, SamplingParams
from qwenrt.runtime.text.tokenizer import Tokenizer

from .feeds import Array
from .metrics import distributions
from .results import Check, Divergence
from .runners.base import PagedRunner
from .steps import relative_margins
from .text_logits import logits_after
from .tolerances import Tolerance

_MEASURE = "greedy tokens"


def generate_greedily(
    llm: LLM, prompts: Sequence[str], num_tokens: int, lora_request: LoRARequest | None = None
) -> list[RequestOutput]:
    """What the engine itself says after each prompt, of `num_tokens` or as many as its length allows; prompts are cut to fit."""
    room = llm.engine.limits.max_model_len
    num_tokens = min(num_tokens, room - 1)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    token_ids = [llm.engine.tokenizer.encode(prompt)[: room - num_tokens] for prompt in prompts]
    return llm.generate(token_ids, params, lora_request=lora_request)


def compare_greedy(
    answers: Sequence[tuple[str, RequestOutput]],
    engine: PagedRunner,
    reference: PagedRunner,
    tokenizer: Tokenizer,
    tolerance: Tolerance,
) -> tuple[list[Check], list[Divergence]]:
    """Judge what the engine generated after each prompt.

    A token may differ where the reference has both for about equally likely, as in `steps`.
    """
    checks, divergences = [], []
    for prompt, output in answers:
        answer = output.outputs[0]
        if answer.finish_reason == "abort":
            checks.append(Check(_MEASURE, math.inf, 2 * tolerance.logits, _quoted(prompt), str(answer.stop_reason)))
            continue
        check, divergence = _compare_one(prompt, output, engine, reference, tokenizer, tolerance)
        checks.append(check)
        divergences.append(divergence)
    return checks, divergences


def _compare_one(
    prompt: str,
    output: RequestOutput,
    engine: PagedRunner,
    reference: PagedRunner,
    tokenizer: Tokenizer,
    tolerance: Tolerance,
) -> tuple[Check, Divergence]:
    chosen = output.outputs[0].token_ids
    best, margins, kl = _choices(engine, reference, output.prompt_token_ids, chosen)
    agrees = best == np.array(chosen)
    if agrees.all():
        where = f"{len(chosen)} tokens after {_quoted(prompt)}"
        return Check(_MEASURE, 0.0, 2 * tolerance.logits, where), Divergence(prompt, len(chosen), None, kl=kl)
    position = int((~agrees).argmax())
    divergence = Divergence(
        prompt=prompt,
        num_tokens=len(chosen),
        position=position,
        engine_token=_token(tokenizer, chosen[position]),
        reference_token=_token(tokenizer, int(best[position])),
        margin=float(margins[position]),
        agreement=float(agrees.mean()),
        kl=kl,
    )
    note = f"the engine says {divergence.engine_token}, the reference {divergence.reference_token}"
    where = f"token {position} of {len(chosen)} after {_quoted(prompt)}"
    return Check(_MEASURE, divergence.margin, 2 * tolerance.logits, where, note), divergence


def _choices(
    engine: PagedRunner, reference: PagedRunner, prompt: Sequence[int], chosen: Sequence[int]
) -> tuple[Array, Array, list[float]]:
    """In the place of every chosen token the reference's choice and by how much; KL divergences, none where one is not finite."""
    text, first = [*prompt, *chosen[:-1]], len(prompt) - 1
    best: list[int] = []
    margins: list[float] = []
    kl: list[float] = []
    finite = True
    for actual, expected in zip(*(logits_after(runner, text, first) for runner in (engine, reference)), strict=True):
        rows, tops = np.arange(len(expected)), expected.argmax(1)
        picked = chosen[len(best) : len(best) + len(expected)]
        margins += relative_margins(expected[rows, tops] - expected[rows, picked], expected).tolist()
        best += tops.tolist()
        finite = finite and bool(np.isfinite(actual).all())
        kl = [*kl, *distributions(actual, expected).kl.tolist()] if finite else []
    return np.array(best), np.array(margins), kl


def _token(tokenizer: Tokenizer, token_id: int) -> str:
    try:
        return f"{token_id} {tokenizer.decode([token_id], skip_special_tokens=False)!r}"
    except RequestError:
        return str(token_id)


def _quoted(prompt: str) -> str:
    first = prompt.strip().split("\n")[0]
    return f'"{first[:40]}{"…" if first[40:] else ""}"'
