"""Embeddings, classes and scores equal those of transformers in float32, however the work is cut into steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer

from qwenrt.exporter import export
from qwenrt.plugins import RequestError
from qwenrt.runtime import LLM, EngineDir, SamplingParams
from tests.checkpoints import MODELS, write_checkpoint
from tests.tolerance import relative_error

TOLERANCE = 2e-5
LENGTHS = (1, 2, 15, 16, 17, 64, 131, 600)
POSITIONS = 1024
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"
QUERY, DOCUMENTS = "capital of France?", ["Paris is.", "Berlin, Ünter den Linden <|im_end|>", "x" * 40]


class Judge:
    """A checkpoint in transformers' own modules, prompt by prompt."""

    def __init__(self, checkpoint: Path, task: str) -> None:
        self.model = MODELS[task].from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    @torch.inference_mode()
    def last(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits, or the hidden state, of the last token."""
        result = self.model(torch.tensor([list(token_ids)]))
        hidden = "last_hidden_state" in result
        values = result.last_hidden_state[0, -1] if hidden else result.logits[0]
        return (values if values.dim() == 1 else values[-1]).numpy()

    def embedding(self, text: str | Sequence[int], dimensions: int | None = None) -> npt.NDArray[np.float32]:
        token_ids = self.tokenizer(text).input_ids if isinstance(text, str) else text
        values = torch.from_numpy(self.last(token_ids))[:dimensions]
        return torch.nn.functional.normalize(values, dim=0).numpy()


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 290, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def embedder(embedding: Path) -> LLM:
    return LLM(embedding.parent / "engine", num_kv_blocks=256)


@pytest.fixture(scope="module")
def judge(embedding: Path) -> Judge:
    return Judge(embedding, "embed")


def test_embeddings_equal_transformers_batched_cached_chunked_and_preempted(
    embedding: Path, embedder: LLM, judge: Judge
) -> None:
    expected = [judge.embedding(prompt) for prompt in prompts()]

    def check(llm: LLM, what: str) -> list[int]:
        outputs = llm.embed(prompts())
        for prompt, output, right in zip(prompts(), outputs, expected, strict=True):
            assert output.prompt_token_ids == prompt
            assert output.embedding.dtype == np.float32
            assert relative_error(output.embedding, right) < TOLERANCE, what
            assert abs(np.linalg.norm(output.embedding) - 1) < 1e-6
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks
        return [output.num_cached_tokens for output in outputs]

    engine = embedding.parent / "engine"
    assert check(embedder, "batched") == [0] * len(LENGTHS)
    assert check(embedder, "from the prefix cache") == [0, 0, 0, 0, 16, 48, 128, 592]
    check(LLM(engine, max_num_batched_tokens=37, max_num_seqs=8), "in chunks")
    check(LLM(engine, backend="torch", num_kv_blocks=64), "by torch")
    tight = LLM(engine, num_kv_blocks=40, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    check(tight, "with few blocks")


def test_texts_are_embedded_as_the_checkpoints_tokenizer_ends_them(embedder: LLM, judge: Judge) -> None:
    texts = ["What is the capital of China?", "héllo wörld", "a"]
    for text, output in zip(texts, embedder.embed(texts), strict=True):
        assert output.prompt_token_ids == judge.tokenizer(text).input_ids
        assert output.prompt_token_ids[-1] == judge.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        assert relative_error(output.embedding, judge.embedding(text)) < TOLERANCE
    [query] = embedder.embed("gravity", instruction="Find papers")
    assert relative_error(query.embedding, judge.embedding("Instruct: Find papers\nQuery:gravity")) < TOLERANCE


def test_dimensions_are_cut_before_they_are_normalised(embedder: LLM, judge: Judge) -> None:
    [cut] = embedder.embed("gravity", dimensions=10)
    assert relative_error(cut.embedding, judge.embedding("gravity", 10)) < TOLERANCE
    [raw] = embedder.embed("gravity", dimensions=10, normalize=False)
    whole = judge.last(judge.tokenizer("gravity").input_ids)
    assert relative_error(raw.embedding, whole[:10]) < TOLERANCE


def test_a_prompt_may_be_as_long_as_a_sequence(embedder: LLM, judge: Judge) -> None:
    prompt = np.random.default_rng(3).integers(0, 290, POSITIONS).tolist()
    [output] = embedder.embed(prompt)
    assert relative_error(output.embedding, judge.embedding(prompt)) < TOLERANCE
    with pytest.raises(RequestError, match="prompt has 1025 tokens; with max_model_len 1024 it may have 1024 at most"):
        embedder.embed([*prompt, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": []}, "prompts is empty"),
        ({"inputs": [[]]}, "prompts is empty|prompt is empty"),
        ({"inputs": ""}, None),
        ({"inputs": [320]}, "token id 320"),
        ({"inputs": "a", "dimensions": 0}, "dimensions is 0; it must be an integer from 1 to 64"),
        ({"inputs": "a", "dimensions": 65}, "dimensions is 65"),
        ({"inputs": "a", "dimensions": True}, "dimensions is True"),
        ({"inputs": [[5]], "instruction": "Find"}, "instruction is given and an input is token ids"),
    ],
)
def test_inputs_that_cannot_be_embedded(embedder: LLM, arguments: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert len(embedder.embed(**arguments)[0].prompt_token_ids) == 1
    else:
        with pytest.raises(RequestError, match=message):
            embedder.embed(**arguments)
    assert not embedder.engine.has_unfinished_requests()


def test_scores_of_an_embedding_model_are_cosines(embedder: LLM, judge: Judge) -> None:
    query = judge.embedding(QUERY)
    expected = [float(query @ judge.embedding(document)) for document in DOCUMENTS]
    scores = embedder.score(QUERY, DOCUMENTS)
    assert [score.score for score in scores] == pytest.approx(expected, abs=1e-5)
    [one] = embedder.score(QUERY, DOCUMENTS[0], instruction="Find")
    expected_one = float(judge.embedding(f"Instruct: Find\nQuery:{QUERY}") @ judge.embedding(DOCUMENTS[0]))
    assert one.score == pytest.approx(expected_one, abs=1e-5)
    pairs = embedder.score(DOCUMENTS, DOCUMENTS)
    assert [pair.score for pair in pairs] == pytest.approx([1.0] * 3, abs=1e-5)


def rerank_prompt(judge: Judge, document: str, instruction: str) -> list[int]:
    """As Qwen3-Reranker's model card builds it: three parts, tokenized each for itself."""
    middle = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
    parts = (PREFIX, middle, SUFFIX)
    return [token for part in parts for token in judge.tokenizer.encode(part, add_special_tokens=False)]


@pytest.mark.parametrize("instruction", [None, "Find the answer"])
def test_scores_of_a_reranker_are_yes_against_no(reranker: Path, instruction: str | None) -> None:
    judge = Judge(reranker, "generate")
    expected = []
    for document in DOCUMENTS:
        logits = torch.from_numpy(judge.last(rerank_prompt(judge, document, instruction or WEB_SEARCH)))
        expected.append(float(torch.log_softmax(torch.stack([logits[270], logits[260]]), 0)[1].exp()))
    for options in ({}, {"max_num_batched_tokens": 50, "max_num_seqs": 4}):
        llm = LLM(reranker.parent / "engine", **options)
        scores = llm.score(QUERY, DOCUMENTS, instruction=instruction)
        assert [score.score for score in scores] == pytest.approx(expected, abs=1e-5)
        assert scores[2].num_cached_tokens > 100
        assert scores[0].prompt_token_ids == rerank_prompt(judge, DOCUMENTS[0], instruction or WEB_SEARCH)


def test_a_step_pools_one_request_and_samples_another(reranker: Path) -> None:
    from qwenrt.runtime.pooling import PoolingParams

    llm = LLM(reranker.parent / "engine", speculative={"method": "ngram"})
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [alone] = llm.generate([[1, 2, 3, 1, 2, 3]], greedy)
    job = llm.engine.add_request("text", [1, 2, 3, 1, 2, 3], greedy)
    pooled = []
    for number in range(6):
        pooled.append(llm.engine.add_request(f"row {number}", [4 + number, 5, 6], PoolingParams(columns=(260, 7))))
        llm.engine.step()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert job.output().outputs[0].token_ids == alone.outputs[0].token_ids
    judge = Judge(reranker, "generate")
    for number, one in enumerate(pooled):
        expected = judge.last([4 + number, 5, 6])[[260, 7]]
        output = one.output()
        assert output.finished and not output.outputs and output.pooled is not None
        assert relative_error(output.pooled, expected) < TOLERANCE


@pytest.mark.parametrize(("labels", "weights"), [(1, "float32"), (3, "float32"), (1, "int8")])
def test_classes_equal_transformers(tmp_path: Path, labels: int, weights: str) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "checkpoint", seed=4, task="classify", num_labels=labels, num_hidden_layers=2, pad_token_id=319
    )
    export(checkpoint, tmp_path / "engine", weights=weights, block_size=8)
    llm, judge = LLM(tmp_path / "engine"), Judge(checkpoint, "classify")
    batch = prompts()[:7]
    exact = weights == "float32"
    for prompt, output in zip(batch, llm.classify(batch), strict=True):
        logits = torch.from_numpy(judge.last(prompt))
        expected = (torch.sigmoid(logits) if labels == 1 else torch.softmax(logits, 0)).numpy()
        assert output.probs.shape == (labels,)
        assert np.abs(output.probs - expected).max() < (1e-5 if exact else 0.1)
    assert llm.engine.manifest.labels == tuple(f"LABEL_{label}" for label in range(labels))
    if labels == 1 and exact:
        with pytest.raises(RequestError, match="max_model_len 256"):
            llm.score(QUERY, DOCUMENTS)
    elif exact:
        with pytest.raises(RequestError, match="this engine has 3 labels; scores need a classifier of one label"):
            llm.score(QUERY, DOCUMENTS)


def test_scores_of_a_classifier_are_its_labels_probability(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "checkpoint",
        task="classify",
        num_labels=1,
        num_hidden_layers=2,
        max_position_embeddings=POSITIONS,
        pad_token_id=319,
    )
    export(checkpoint, tmp_path / "engine")
    judge = Judge(checkpoint, "classify")
    logits = [judge.last(rerank_prompt(judge, document, WEB_SEARCH)) for document in DOCUMENTS]
    scores = LLM(tmp_path / "engine").score(QUERY, DOCUMENTS)
    expected = torch.sigmoid(torch.from_numpy(np.concatenate(logits))).tolist()
    assert [score.score for score in scores] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"family": "qwen2"},
        {"family": "llama", "num_key_value_heads": 4},
        {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ],
)
def test_embeddings_of_other_families_equal_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", task="embed", num_hidden_layers=2, **options)
    export(checkpoint, tmp_path / "engine")
    judge = Judge(checkpoint, "embed")
    outputs = LLM(tmp_path / "engine").embed(prompts()[:6])
    for prompt, output in zip(prompts(), outputs, strict=False):
        assert relative_error(output.embedding, judge.embedding(prompt)) < TOLERANCE


def test_an_engine_of_another_task_says_so(embedder: LLM, reranker: Path, tiny_engine: Path) -> None:
    with pytest.raises(
        RequestError, match="this engine's task is embed, it cannot generate text; give an engine of a causal"
    ):
        embedder.generate("a")
    with pytest.raises(RequestError, match="task is embed, it cannot classify"):
        embedder.classify("a")
    with pytest.raises(RequestError, match="task is generate, it cannot embed; give an engine of an embedding model"):
        LLM(reranker.parent / "engine").embed("a")
    with pytest.raises(RequestError, match="this engine's tokenizer has no tokens yes and no"):
        LLM(tiny_engine).score("a", "b")
    with pytest.raises(RequestError, match="2 queries for 3 documents"):
        embedder.score(["a", "b"], DOCUMENTS)
    with pytest.raises(RequestError, match="a query or document is a list; it must be text"):
        embedder.score("a", [[1]])  # type: ignore[list-item]


def test_a_row_that_is_not_finite_is_an_error_of_its_request(embedder: LLM) -> None:
    class Broken:
        def execute(self, inputs: Any) -> npt.NDArray[np.float32]:
            return np.full((len(inputs.logits_indices), 64), np.nan, np.float32)

    real, embedder.engine.backend = embedder.engine.backend, Broken()  # type: ignore[assignment]
    try:
        with pytest.raises(RequestError, match="numbers that are not finite"):
            embedder.embed([[9, 8]])
    finally:
        embedder.engine.backend = real


def test_a_manifest_without_a_task_is_one_of_an_engine_that_generates(tiny_engine: Path) -> None:
    fields = json.loads((tiny_engine / "engine.json").read_text())
    del fields["task"], fields["labels"]
    manifest = type(EngineDir.open(tiny_engine).manifest).from_json(json.dumps(fields))
    assert (manifest.task, manifest.labels, manifest.num_logits) == ("generate", (), 320)
