"""The form of an answer: what is refused, how long that takes, and that answers keep to it (CASES V05)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo.tasks import held_out

from qwenrt.runtime import LLM, RequestError, SamplingParams, StructuredOutputsParams
from qwenrt.runtime.sampling.constraint import Constraint
from qwenrt.runtime.sampling.grammar import GrammarCompiler
from qwenrt.runtime.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[3] / "tools" / "demo" / "checkpoint"
VOCAB_SIZE = 768
EOS = (761, 759)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(CHECKPOINT)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, EOS)


def pattern(text: str) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}, "required": ["a"]}}


def properties(count: int, required: bool) -> dict[str, Any]:
    names = [f"p{index}" for index in range(count)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return {"json": {**schema, "required": names} if required else schema}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    **{f"pattern {text[:12]}": pattern(text) for text in ("*a", "(?<=x)+", "[", "(" * 20_000, "(a+)+$", ".{0,100000}")},
    **{f"regex {text[:12]}": {"regex": text} for text in ("*a", "(?<=x)+", "[", "(" * 20_000, "(a|aa)+$", "\\")},
    **{
        f"regex {text}": {"regex": text}
        for text in ("a{1000}{1000}", "x(a{1000}){1000}", "((a{50}){50}){50}", "(.*a.{20}){3}")
    },
    "reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "reference elsewhere": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "list": {"json": []},
    "text": {"json": "{"},
    "false": {"json": False},
    "no type": {"json": {"type": "objekt"}},
    "not": {"json": {"not": {"type": "string"}}},
    "5000 required": properties(5000, required=True),
    "5000 optional": properties(5000, required=False),
    "enum of 100000": {"json": {"enum": [f"value{index}" for index in range(100_000)]}},
    "enum of 10000": {"json": {"enum": [f"value{index}" for index in range(10_000)]}},
    "choice of 10000": {"choice": [f"value{index}" for index in range(10_000)]},
    "deep schema": {"json": nested(500)},
    "deeper schema": {"json": nested(100_000)},
    "deep grammar": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "grammar of itself": {"grammar": "start: start"},
    "ambiguous grammar": {"grammar": 'start: a\na: a a | "x"'},
    "repeated grammar": {"grammar": 'start: b{1000}\nb: c{1000}\nc: "a"{1000}'},
    "no grammar": {"grammar": "???"},
    "wide grammar": {"grammar": "start: " + " | ".join(f'"v{index}"' for index in range(15_000))},
    "anyOf times anyOf": {
        "json": {
            "allOf": [{"anyOf": [{"properties": {f"{x}{i}": {"type": "integer"}}} for x in "ab"]} for i in range(20)]
        }
    },
    "numbers": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "huge numbers": {"json": {"type": "integer", "minimum": -(10**300)}},
    "long text": {"json": {"type": "string", "minLength": 1_000_000}},
    "long list": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_in_words_or_works(compiler: GrammarCompiler, name: str) -> None:
    message = "the form works"
    try:
        matcher = compiler.compile(StructuredOutputsParams(**HOSTILE[name]).source)
        allowed = matcher.allowed()
        assert allowed.shape == (VOCAB_SIZE,)
        for _ in range(50):
            choices = np.flatnonzero(allowed)
            token = int(choices[len(choices) // 2])
            if token in EOS:
                break
            matcher.accept(token)
            allowed = matcher.allowed()
            assert allowed.any()
    except RequestError as error:
        message = str(error)
    assert 10 < len(message) < 1000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs has nothing; give one of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs has regex and choice"),
        ({"regex": ""}, "regex must be a string"),
        ({"regex": 5}, "regex must be a string"),
        ({"regex": "a\\"}, "ends with a backslash"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"choice": []}, "list of at least one string"),
        ({"choice": "abc"}, "list of at least one string"),
        ({"choice": ["a", ""]}, "an entry of choice"),
        ({"json": 5}, "the JSON schema is a int"),
        ({"json": {"minimum": float("nan")}}, "the JSON schema is no JSON"),
        ({"json": {"const": object()}}, "the JSON schema is no JSON"),
        ({"grammar": "x" * 300_000}, "grammar has 300000 characters"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        StructuredOutputsParams(**fields)


def test_a_pattern_keeps_its_slashes_and_line_feeds(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for regex, text in (
        ("a/b", "a/b"),
        ("a\\/b", "a/b"),
        ("a\nb", "a\nb"),
        ("a\\\nb", "a\nb"),
        ("\\\\", "\\"),
        ('"', '"'),
    ):
        matcher = compiler.compile(StructuredOutputsParams(regex=regex).source)
        for token in tokenizer.encode(text):
            assert matcher.allowed()[token]
            matcher.accept(token)
        assert set(np.flatnonzero(matcher.allowed())) == set(EOS)


def test_a_compiled_grammar_is_kept_and_started_anew(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    source = StructuredOutputsParams(choice=["ab", "cd"]).source
    first, second = compiler.compile(source), compiler.compile(source)
    first.accept(tokenizer.encode("a")[0])
    assert second.allowed()[tokenizer.encode("c")[0]]
    assert not first.allowed()[tokenizer.encode("c")[0]]


@pytest.fixture(scope="module", params=[None, {"method": "ngram"}], ids=["plain", "speculative"])
def llm(request: pytest.FixtureRequest, demo_engine: Path) -> LLM:
    return LLM(demo_engine, num_kv_blocks=512, speculative=request.param)


SCHEMA = {
    "type": "object",
    "properties": {
        "total": {"type": "integer", "minimum": 0, "maximum": 999},
        "words": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["total", "words"],
    "additionalProperties": False,
}


def answer(llm: LLM, enable_thinking: bool, **fields: Any) -> str:
    params = SamplingParams(max_tokens=400, **{"temperature": 0.0, **fields})
    (output,) = llm.chat([{"role": "user", "content": "27+58=?"}], params, enable_thinking=enable_thinking)
    assert output.outputs[0].finish_reason == "stop"
    return output.outputs[0].text


def test_an_answer_keeps_to_its_schema_with_and_without_thinking_and_speculation(llm: LLM) -> None:
    form = StructuredOutputsParams(json=SCHEMA)
    thinking, _, text = answer(llm, True, structured_outputs=form).partition("</think>\n\n")
    assert thinking == "<think>\n7+8+0=15\n2+5+1=8\n"
    for one in (
        text,
        answer(llm, False, structured_outputs=form),
        answer(llm, False, structured_outputs=form, temperature=1.0),
    ):
        value = json.loads(one)
        assert list(value) == ["total", "words"]
        assert len(value["words"]) >= 2


def test_speculation_changes_no_constrained_answer(demo_engine: Path) -> None:
    plain, speculative = (
        LLM(demo_engine, num_kv_blocks=512),
        LLM(demo_engine, num_kv_blocks=512, speculative={"method": "ngram"}),
    )
    params = [
        SamplingParams(
            temperature=temperature, seed=3, max_tokens=120, structured_outputs=StructuredOutputsParams(json=SCHEMA)
        )
        for temperature in (0.0, 0.8)
        for _ in range(3)
    ]
    prompts = [example.messages for example in held_out("copy", 6, 9)]
    answers = [
        [o.outputs[0].token_ids for o in llm.chat(prompts, params, enable_thinking=True)]
        for llm in (plain, speculative)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("budget", "thought"), [(0, ""), (5, "\n7+8+"), (100, "\n7+8+0=15\n2+5+1=8\n")])
def test_a_thinking_budget_closes_the_block(llm: LLM, budget: int, thought: str) -> None:
    text = answer(llm, True, thinking_budget=budget)
    close = "</think>\n\n" if budget == 100 else "\n</think>\n\n"
    assert text.startswith(f"<think>{thought}{close}")
    choice = answer(llm, True, thinking_budget=budget, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert choice in (f"<think>{thought}{close}yes", f"<think>{thought}{close}no")


def test_all_answers_of_a_request_keep_to_the_form(llm: LLM) -> None:
    params = SamplingParams(
        n=4, seed=1, temperature=5.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
    )
    (output,) = llm.generate("x", params)
    assert all(re.fullmatch("[ab]{3}", one.text) for one in output.outputs)
    assert len({one.text for one in output.outputs}) > 1


def test_preemption_changes_no_constrained_answer(demo_engine: Path) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=100, structured_outputs=StructuredOutputsParams(regex="[a-z ]{200}")
    )
    prompts = [f"Copy:\nword {index}" for index in range(4)]
    alone = [LLM(demo_engine, num_kv_blocks=64).generate(prompt, params)[0].outputs[0].text for prompt in prompts]
    small = LLM(demo_engine, num_kv_blocks=6)
    together = [output.outputs[0].text for output in small.generate(prompts, params)]
    assert small.engine.scheduler.num_preemptions > 0
    assert together == alone


def test_end_of_text_is_not_taken_inside_a_thinking_block_before_a_form(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(StructuredOutputsParams(choice=["a"]).source)
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    constraint = Constraint(tokenizer, prompt, EOS, matcher=matcher)
    logits = np.zeros(VOCAB_SIZE, np.float32)
    constraint.mask(logits)
    assert np.flatnonzero(np.isneginf(logits)).tolist() == sorted(EOS)


def test_a_budget_needs_a_model_that_thinks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "token_id", lambda text: None)
    with pytest.raises(RequestError, match="no token <think>"):
        llm.generate("a", SamplingParams(thinking_budget=3))


@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_a_budget_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="thinking_budget"):
        SamplingParams(thinking_budget=value)


def test_structured_outputs_must_be_its_own_kind() -> None:
    with pytest.raises(RequestError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
