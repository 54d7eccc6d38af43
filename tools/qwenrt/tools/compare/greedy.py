"""Greedy decoding: the first token that the reference would not have chosen.

The engine generates as users run it: scheduler, KV blocks, sampler. The reference then computes each text once, from its first
token: up to the first token that is not its own choice, both have the same text before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qwenrt.plugins import RequestError
from qwenrt.runtime import LLM, RequestOutput, SamplingParams

from .batches import one_sequence
from .feeds import Array
from .metrics import distributions
from .results import Check, Divergence
from .runners.base import PagedRunner
from .steps import relative_margins
from .tolerances import Tolerance

_MEASURE = "greedy tokens"


def compare_greedy(
    llm: LLM,
    engine: PagedRunner,
    reference: PagedRunner,
    prompts: Sequence[str],
    num_tokens: int,
    tolerance: Tolerance,
) -> tuple[list[Check], list[Divergence]]:
    """Generate `num_tokens` after each prompt, fewer if the engine's length (of 2 at least) ends before; prompts are cut to fit.

    A token may differ where the reference has both for about equally likely, as in `steps`.
    """
    room = llm.engine.limits.max_model_len
    num_tokens = min(num_tokens, room - 1)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    texts = [llm.engine.tokenizer.encode(prompt)[: room - num_tokens] for prompt in prompts]
    checks, divergences = [], []
    for prompt, output in zip(prompts, llm.generate(texts, params), strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "abort":
            checks.append(Check(_MEASURE, math.inf, 2 * tolerance.logits, _quoted(prompt), str(answer.stop_reason)))
            continue
        check, divergence = _compare_one(llm, engine, reference, prompt, output, tolerance)
        checks.append(check)
        divergences.append(divergence)
    return checks, divergences


def _compare_one(
    llm: LLM, engine: PagedRunner, reference: PagedRunner, prompt: str, output: RequestOutput, tolerance: Tolerance
) -> tuple[Check, Divergence]:
    chosen = output.outputs[0].token_ids
    text = [*output.prompt_token_ids, *chosen[:-1]]
    feed = one_sequence(text, llm.engine.manifest, 0, len(text))
    first = len(output.prompt_token_ids) - 1
    actual, expected = (_logits(runner, feed) for runner in (engine, reference))
    best = expected[first:].argmax(1)
    agrees = best == np.array(chosen)
    kl = [float(value) for value in distributions(actual, expected).kl] if np.isfinite(actual).all() else []
    if agrees.all():
        where = f"{len(chosen)} tokens after {_quoted(prompt)}"
        return Check(_MEASURE, 0.0, 2 * tolerance.logits, where), Divergence(prompt, len(chosen), None, kl=kl)
    position = int((~agrees).argmax())
    row = expected[first + position]
    margins = relative_margins(row[best[position], None] - row[chosen[position], None], row[None])
    divergence = Divergence(
        prompt=prompt,
        num_tokens=len(chosen),
        position=position,
        engine_token=_token(llm, chosen[position]),
        reference_token=_token(llm, int(best[position])),
        margin=float(margins[0]),
        agreement=float(agrees.mean()),
        kl=kl,
    )
    note = f"the engine says {divergence.engine_token}, the reference {divergence.reference_token}"
    where = f"token {position} of {len(chosen)} after {_quoted(prompt)}"
    return Check(_MEASURE, divergence.margin, 2 * tolerance.logits, where, note), divergence


def _logits(runner: PagedRunner, feed: dict[str, Array]) -> Array:
    found: list[Array] = []
    runner.visit(feed, ["logits"], lambda name, values: found.append(values.copy()))
    return found[0]


def _token(llm: LLM, token_id: int) -> str:
    try:
        return f"{token_id} {llm.engine.tokenizer.decode([token_id], skip_special_tokens=False)!r}"
    except RequestError:
        return str(token_id)


def _quoted(prompt: str) -> str:
    first = prompt.strip().split("\n")[0]
    return f'"{first[:40]}{"…" if first[40:] else ""}"'
