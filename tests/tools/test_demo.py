"""The demo checkpoint through the whole product: what it answers is checked to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo.tasks import TASKS, held_out

from qwenrt.exporter import export
from qwenrt.runtime import LLM, SamplingParams
from tests.oracle import Oracle

CHECKPOINT = Path(__file__).parents[2] / "tools" / "demo" / "checkpoint"
GREEDY = SamplingParams(temperature=0.0, max_tokens=256)


@pytest.fixture(scope="module")
def llm(demo_engine: Path) -> LLM:
    return LLM(demo_engine)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(CHECKPOINT)


def answers(llm: LLM, task: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Expected and given answer of each held-out example."""
    examples = held_out(task, count, seed)
    prompts = [llm.render(one.messages, tools=one.tools, enable_thinking=one.enable_thinking) for one in examples]
    outputs = llm.generate(prompts, GREEDY)
    return [(one.answer, output.outputs[0].text) for one, output in zip(examples, outputs, strict=True)]


@pytest.mark.parametrize("task", TASKS)
def test_held_out_answers_are_right(llm: LLM, task: str) -> None:
    pairs = answers(llm, task, 40, seed=2)
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"weights": "int4"}, {"kv_dtype": "int8"}], ids=str)
def test_integers_keep_the_answers(options: dict[str, str], tmp_path: Path) -> None:
    export(CHECKPOINT, tmp_path / "engine", weights=options.get("weights"), kv_dtype=options.get("kv_dtype"))
    llm = LLM(tmp_path / "engine")
    pairs = [pair for task in TASKS for pair in answers(llm, task, 20, seed=4)]
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    assert len(wrong) <= 0.02 * len(pairs), wrong
    prompts = [llm.render(one.messages, enable_thinking=False) for one in held_out("lookup", 4, seed=5)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert together == [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_those_of_transformers(llm: LLM, oracle: Oracle, task: str) -> None:
    for example in held_out(task, 3, seed=3):
        prompt = llm.render(example.messages, tools=example.tools, enable_thinking=example.enable_thinking)
        (output,) = llm.generate(prompt, GREEDY)
        answer = output.outputs[0]
        assert answer.token_ids == oracle.greedy(output.prompt_token_ids, len(answer.token_ids))
        assert answer.finish_reason == "stop"


def test_a_conversation_finds_its_past_in_the_prefix_cache(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Copy:\n" + "the same words again and again " * 4}]
    first = llm.chat(messages, GREEDY, enable_thinking=False)[0]
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "12+34=?"}]
    second = llm.chat(messages, GREEDY, enable_thinking=False)[0]
    assert second.num_cached_tokens > 0
