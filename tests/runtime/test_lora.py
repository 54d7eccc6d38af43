"""Adapters switched by request: tokens equal to transformers with PEFT, alone and in company, and a base that never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError, RequestError
from qwenrt.runtime import LLM, LoRARequest, SamplingParams
from qwenrt.runtime.adapters import AdapterSlots
from qwenrt.runtime.lora import LoraAdapter
from tests.adapters import merge_adapter, write_adapter
from tests.checkpoints import write_checkpoint
from tests.oracle import Oracle
from tests.runtime.test_families import MOE, logits, prompts
from tests.tolerance import relative_error

NUM_NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4},
    "attention": {"r": 8, "target_modules": ["q_proj", "v_proj", "o_proj"], "use_rslora": True},
    "mlp": {"r": 3, "target_modules": ["up_proj", "down_proj"], "rank_pattern": {"down_proj": 7}},
}


class Models:
    """A base engine, one for adapters, and adapters with what transformers and PEFT say to them."""

    def __init__(self, folder: Path) -> None:
        self.base = write_checkpoint(folder / "checkpoint", seed=4, num_hidden_layers=2)
        self.plain, self.engine = folder / "plain", folder / "engine"
        export(self.base, self.plain, block_size=8)
        export(self.base, self.engine, block_size=8, max_lora_rank=8)
        self.requests: dict[str | None, LoRARequest | None] = {None: None}
        self.oracles = {None: Oracle(self.base)}
        for seed, (name, config) in enumerate(ADAPTERS.items()):
            adapter = write_adapter(folder / name, self.base, seed=seed, **config)
            self.requests[name] = LoRARequest(name, adapter)
            self.oracles[name] = Oracle(merge_adapter(folder / f"{name}-merged", self.base, adapter))

    def answers(self, name: str | None, prompt: list[int], tokens: list[int]) -> bool:
        """Whether this is what transformers answers."""
        return len(tokens) == NUM_NEW and self.oracles[name].choices(prompt, tokens) == tokens

    def check(self, llm: LLM, names: list[str | None], batch: list[list[int]]) -> None:
        outputs = llm.generate(batch, GREEDY, lora_request=[self.requests[name] for name in names])
        for name, prompt, output in zip(names, batch, outputs, strict=True):
            assert self.answers(name, prompt, output.outputs[0].token_ids), name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_tokens_of_every_adapter_alone_and_of_all_in_one_batch(models: Models, backend: str) -> None:
    llm = LLM(models.engine, backend=backend)
    prompt = prompts(320)[1]
    for name in models.requests:
        models.check(llm, [name], [prompt])
    names = [*models.requests, *models.requests]
    models.check(llm, names, [prompts(320)[1 + i % 2] for i in range(len(names))])
    together = llm.generate([prompt] * len(models.requests), GREEDY, lora_request=list(models.requests.values()))
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == len(models.requests)


def test_the_base_has_the_same_bits_as_without_places_for_adapters(models: Models) -> None:
    prompt = prompts(320)[2]
    plain, llm = LLM(models.plain), LLM(models.engine)
    expected = logits(plain, prompt)
    np.testing.assert_array_equal(logits(llm, prompt), expected)
    beside = llm.generate([prompt, prompt], GREEDY, lora_request=[models.requests["all"], None])
    assert beside[1].outputs[0].token_ids == plain.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert beside[0].outputs[0].token_ids != beside[1].outputs[0].token_ids
    np.testing.assert_array_equal(logits(llm, prompt), expected)


def test_the_prefix_cache_is_kept_by_adapter(models: Models) -> None:
    llm = LLM(models.engine)
    prompt = prompts(320)[2]
    for _ in range(2):
        for name in models.requests:
            [output] = llm.generate([prompt], GREEDY, lora_request=models.requests[name])
            assert models.answers(name, prompt, output.outputs[0].token_ids), name
    cached = [
        llm.generate(prompt, GREEDY, lora_request=models.requests[n])[0].num_cached_tokens for n in models.requests
    ]
    assert cached == [32] * len(cached)
    fresh = LLM(models.engine)
    fresh.generate(prompt, GREEDY)
    [output] = fresh.generate(prompt, GREEDY, lora_request=models.requests["all"])
    assert output.num_cached_tokens == 0


def test_adapters_take_turns_where_slots_are_few(models: Models) -> None:
    llm = LLM(models.engine, max_loras=1)
    names = [*models.requests, *reversed(models.requests), *models.requests]
    batch = [prompts(320)[1 + i % 2] for i in range(len(names))]
    models.check(llm, names, batch)
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks


def test_preempted_requests_keep_their_adapter(models: Models) -> None:
    llm = LLM(models.engine, num_kv_blocks=10, max_loras=2)
    names: list[str | None] = ["all", "mlp", None, "all"]
    models.check(llm, names, [prompts(320)[1]] * 4)
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.scheduler.pool.num_free == 10


@pytest.mark.parametrize(("weights", "share"), [("bfloat16", 0.1), ("int8", 0.3), ("int4", 0.7)])
def test_adapters_beside_other_weights_change_what_is_theirs(
    models: Models, weights: str, share: float, tmp_path: Path
) -> None:
    """Both engines round the base, and one the adapter with it."""
    llm = LLM(export(models.base, tmp_path / "engine", weights=weights, max_lora_rank=8).path)
    merged = LLM(export(models.base, tmp_path / "merged", lora=models.requests["all"].path, weights=weights).path)  # type: ignore[union-attr]
    assert llm.engine.backend.lora is not None
    llm.engine.backend.lora.set(1, LoraAdapter.from_dir(models.requests["all"].path))  # type: ignore[union-attr]
    prompt = prompts(320)[2]
    expected = logits(merged, prompt)
    assert relative_error(logits(llm, prompt, slot=1), expected) < share * relative_error(logits(llm, prompt), expected)


def test_adapters_of_attention_beside_experts(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", seed=2, num_hidden_layers=2, **{**MOE, "mlp_only_layers": [1]})
    adapter = write_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "k_proj"])
    llm = LLM(export(base, tmp_path / "engine", max_lora_rank=4).path)
    [output] = llm.generate([prompts(320)[1]], GREEDY, lora_request=LoRARequest("a", adapter))
    merged = Oracle(merge_adapter(tmp_path / "merged", base, adapter))
    assert output.outputs[0].token_ids == merged.greedy(prompts(320)[1], NUM_NEW)


class TestRefusals:
    """Each is one line, and the engine goes on."""

    def test_an_engine_without_places(self, models: Models) -> None:
        with pytest.raises(RequestError, match="takes no adapters; export it again with --max-lora-rank"):
            LLM(models.plain).generate("x", lora_request=models.requests["all"])

    def test_requests_that_cannot_be_served(self, models: Models, tmp_path: Path) -> None:
        llm = LLM(models.engine)
        large = write_adapter(tmp_path / "large", models.base, r=9)
        other = write_checkpoint(tmp_path / "other", num_hidden_layers=3)
        deep = write_adapter(tmp_path / "deep", other)
        for request, message in (
            (LoRARequest("large", large), "adapter 'large' has rank 9, this engine takes 8 at most"),
            (LoRARequest("deep", deep), "adapter 'deep': .* changes model.layers.2.* no projection of this model"),
            (LoRARequest("none", tmp_path / "none"), "adapter 'none': .* does not exist"),
            ("all", "lora_request is a str; it must be a LoRARequest|lora_request is a str"),
            ([None, None], "2 adapters for 1 prompts"),
        ):
            with pytest.raises(RequestError, match=message) as caught:
                llm.generate(prompts(320)[1], GREEDY, lora_request=request)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
        models.check(llm, ["all"], [prompts(320)[1]])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_lora_rank": 2000}, "max_lora_rank is 2000, must be an integer from 1 to 1024"),
            ({"max_lora_rank": -1}, "max_lora_rank is -1"),
            ({"max_lora_rank": 8, "target": "tensorrt-rtx"}, "adapters at run time are not built for tensorrt-rtx"),
        ],
    )
    def test_exports(self, models: Models, options: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            export(models.base, tmp_path / "engine", **options)

    def test_a_number_of_slots_that_is_none(self, models: Models) -> None:
        with pytest.raises(ConfigError, match="max_loras is 0, must be an integer from 1"):
            LLM(models.engine, max_loras=0)


def test_slots_keep_what_is_used_and_evict_what_was_idle_longest() -> None:
    a, b, c = (LoraAdapter(Path(name), {}, name.encode()) for name in "abc")
    slots, loaded = AdapterSlots(2), []

    def load() -> list[tuple[int, bytes]]:
        loaded.clear()
        slots.load(lambda slot, adapter: loaded.append((slot, adapter.digest)))
        return list(loaded)

    assert [slots.acquire(a), slots.acquire(b), slots.acquire(a)] == [0, 1, 0]
    assert load() == [(0, b"a"), (1, b"b")]
    assert not slots.has_room_for(c)
    assert slots.has_room_for(a)
    slots.release(a)
    assert not slots.has_room_for(c)
    slots.release(b)
    slots.release(a)
    assert slots.acquire(b) == 1
    assert load() == []
    assert slots.acquire(c) == 0
    assert load() == [(0, b"c")]

    def fail(slot: int, adapter: LoraAdapter) -> None:
        raise MemoryError

    slots.release(c)
    assert slots.acquire(a) == 0
    with pytest.raises(MemoryError):
        slots.load(fail)
    assert load() == [(0, b"a")]
