"""The runners under polygraphy's own Comparator, and samples that are bad, missing or none (case Y02)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polygraphy.comparator import Comparator, SimpleCompareFunc

from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineDir
from qwenrt.tools.compare.batch_files import batch_writer
from qwenrt.tools.compare.batches import Batch, make_batches
from qwenrt.tools.compare.feeds import Array, Feed
from qwenrt.tools.compare.references import ReferenceSpec, load_reference
from qwenrt.tools.compare.runners.backend import BackendRunner
from qwenrt.tools.compare.runners.base import PagedRunner
from qwenrt.tools.compare.runners.executors import NumpyExecutor
from qwenrt.tools.compare.runners.graph import GraphRunner
from qwenrt.tools.compare.steps import compare_logits
from qwenrt.tools.compare.tolerances import tolerance_for

from .conftest import Compare

NAMES = ("transformers", "eager", "torch", "numpy", "onnxruntime")


@pytest.fixture(scope="module")
def folder(engine: Path) -> EngineDir:
    return EngineDir.open(engine)


@pytest.fixture(scope="module")
def batches(folder: EngineDir) -> list[Batch]:
    with load_reference(ReferenceSpec("onnxruntime"), folder, None) as runner:
        return list(make_batches(folder, runner.infer))


def runners(folder: EngineDir, checkpoint: Path) -> list[PagedRunner]:
    references = [load_reference(ReferenceSpec(name), folder, checkpoint) for name in NAMES]
    return [*references, BackendRunner("onnxruntime", folder), BackendRunner("torch", folder)]


@pytest.mark.parametrize("streaming", [False, True])
def test_comparator_runs_and_compares_all_of_them(
    folder: EngineDir, tiny_checkpoint: Path, batches: list[Batch], streaming: bool
) -> None:
    feeds = [batch.feed for batch in batches]
    before = [{name: array.copy() for name, array in feed.items()} for feed in feeds]
    results = Comparator.run(runners(folder, tiny_checkpoint), feeds, streaming=streaming)
    accuracy = Comparator.compare_accuracy(results, compare_func=SimpleCompareFunc(atol=1e-4, rtol=1e-3))
    assert bool(accuracy)
    for pair in accuracy[0].values():
        assert len(pair) == 3
        assert set(pair[0]) == {"logits", *(f"kv_cache_out.{layer}" for layer in range(4))}
    # A backend writes its pools in place; every other runner still gets what there was before.
    assert all(np.array_equal(one[name], two[name]) for one, two in zip(feeds, before, strict=True) for name in one)


def test_every_tensor_that_two_runners_tell_of_agrees(
    folder: EngineDir, tiny_checkpoint: Path, batches: list[Batch]
) -> None:
    by_runner: list[dict[str, Array]] = []
    for name in NAMES:
        with load_reference(ReferenceSpec(name), folder, tiny_checkpoint) as runner:
            found: dict[str, Array] = {}
            runner.visit(
                batches[1].feed, runner.tensors, lambda name, values, found=found: found.update({name: values.copy()})
            )  # type: ignore[misc]
            assert sorted(found) == sorted(runner.tensors)
            by_runner.append(found)
    everything = by_runner[NAMES.index("numpy")]
    assert len(by_runner[0]) == len(by_runner[1]) == 1 + 4 * 11 + 1
    for found in by_runner:
        for name, values in found.items():
            np.testing.assert_allclose(values, everything[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_tensor_that_a_runner_does_not_have_is_named(folder: EngineDir, batches: list[Batch]) -> None:
    runner = BackendRunner("onnxruntime", folder)
    runner.outputs = ["logits", "model.layers.0.add_1"]
    with runner, pytest.raises(ConfigError, match=r"onnxruntime has no tensor model\.layers\.0\.add_1"):
        runner.infer(batches[0].feed)


def test_random_numbers_are_refused_by_every_runner(folder: EngineDir, tiny_checkpoint: Path) -> None:
    """Comparator without a data loader feeds its runners random index inputs (case Y01)."""
    for runner in runners(folder, tiny_checkpoint):
        with pytest.raises(ConfigError, match="not a valid paged batch"):
            Comparator.run([runner])


class Spoiled(PagedRunner):
    """A runner whose logits are wrong in one of its steps, or whose outputs are not what they should be."""

    def __init__(self, inner: PagedRunner, step: int, spoil: Any) -> None:
        super().__init__("spoiled", inner.manifest)
        self.inner, self.step, self.spoil = inner, step, spoil
        self.count = 0

    def visit(self, feed: Any, wanted: Any, visit: Any) -> None:
        def tell(name: str, values: Array) -> None:
            if name == "logits" and self.count == self.step:
                values = self.spoil(values)
            if values is not None:
                visit(name, values)

        self.inner.visit(feed, wanted, tell)
        self.count += 1


def wrong(logits: Array) -> Array:
    return logits + np.eye(*logits.shape, dtype=np.float32)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `qwenrt compare` see the engine through a Spoiled runner."""

    def plant(step: int, how: Any) -> None:
        from qwenrt.tools.compare import comparison

        monkeypatch.setattr(
            comparison,
            "BackendRunner",
            lambda *arguments: Spoiled(BackendRunner(*arguments), step, how),
        )

    return plant


@pytest.mark.parametrize("step", [0, 1, 2])
def test_one_bad_sample_of_three_is_enough_to_fail(
    compare: Compare, engine: Path, tiny_checkpoint: Path, spoil: Any, step: int
) -> None:
    spoil(step, wrong)
    found = compare(engine, "--reference", tiny_checkpoint, "--tokens", "0")
    assert found.status == 1
    name = ("prefill", "mixed", "decode")[step]
    assert {check["measure"] for check in found.failed} >= {"logits", "KL divergence"}
    assert all(
        check["where"].startswith(f"batch {name}, row ") for check in found.failed if check["measure"] == "logits"
    )
    assert "part by part the engine's graph is right, as a whole it is not" in found.stdout


@pytest.mark.parametrize(
    ("how", "note"),
    [
        (lambda logits: None, "the engine gave no such output"),
        (lambda logits: logits[:1], "has shape [1, 320], the reference [42, 320]"),
        (lambda logits: logits[:, :1], "has shape [42, 1], the reference [42, 320]"),
        (lambda logits: np.where(logits == logits.max(), np.nan, logits), "has NaN here"),
        (lambda logits: np.where(logits == logits.max(), np.inf, logits), "has Inf here"),
    ],
)
def test_outputs_that_are_missing_broadcast_or_not_finite_fail(
    compare: Compare, engine: Path, tiny_checkpoint: Path, spoil: Any, how: Any, note: str
) -> None:
    spoil(0, how)
    found = compare(engine, "--reference", tiny_checkpoint, "--tokens", "0")
    assert found.status == 1
    assert any(check["measure"] == "logits" and note in check["note"] for check in found.failed)
    assert found.verdict.startswith("FAIL: ")


def test_a_reference_that_is_not_finite_is_no_pass(folder: EngineDir, batches: list[Batch]) -> None:
    tolerance = tolerance_for(folder.manifest, None)
    logits = np.full((42, 320), np.nan, np.float32)
    checks, _ = compare_logits(logits, logits, batches[0], tolerance)
    assert [check.passed for check in checks] == [False]
    checks, _ = compare_logits(np.zeros_like(logits), logits, batches[0], tolerance)
    assert "the reference has NaN here" in checks[0].note


def test_no_samples_are_no_pass(compare: Compare, engine: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path / "none"):
        with batch_writer(path):
            pass
        found = compare(engine, "--inputs", path, "--tokens", "0")
        assert (found.status, found.stdout) == (1, "")
        assert "so nothing was compared" in found.stderr


@pytest.mark.parametrize(
    "family",
    [
        {},
        # All experts for every token: a router's logit that is rounded may choose another.
        {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 40},
    ],
    ids=["dense", "experts"],
)
def test_the_cuda_kernels_over_the_emulator_agree_in_float16(family: dict[str, Any], tmp_path: Path) -> None:
    """The engine's graph with our ops by the real CUDA kernels, in float16 as they have it."""
    from qwenrt.exporter import export
    from tests.checkpoints import write_checkpoint
    from tests.plugins.cuda.binding import EmulatedCuda
    from tests.simt.build import build, missing

    if reason := missing():
        pytest.skip(reason)
    emulated = EmulatedCuda(build())

    def paged_attention(
        qkv: Array, q_norm: Array, k_norm: Array, *tensors: Array, **attributes: Any
    ) -> tuple[Array, ...]:
        rope, positions, cache, *tables = tensors
        half = [array.astype(np.float16) for array in (qkv, q_norm, k_norm)]
        attn, pool = emulated.paged_attention(*half, rope, positions, cache.astype(np.float16), *tables, **attributes)
        return attn.astype(np.float32), pool.astype(np.float32)

    def mixture_of_experts(*tensors: Array, **attributes: Any) -> Array:
        y: Array = emulated.mixture_of_experts(*(tensor.astype(np.float16) for tensor in tensors), **attributes)
        return y.astype(np.float32)

    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=2, head_dim=64, **family)
    folder = export(checkpoint, tmp_path / "engine", block_size=16)
    ops = {"PagedAttention": paged_attention, "MixtureOfExperts": mixture_of_experts}
    cuda = GraphRunner("cuda (emulated)", folder, NumpyExecutor(ops))
    with load_reference(ReferenceSpec("eager"), folder, checkpoint) as eager:
        feeds = [batch.feed for batch in make_batches(folder, eager.infer)]
    results = Comparator.run([cuda, load_reference(ReferenceSpec("eager"), folder, checkpoint)], as_float16(feeds))
    assert bool(Comparator.compare_accuracy(results, compare_func=SimpleCompareFunc(atol=2e-2, rtol=2e-2)))


def as_float16(feeds: list[Feed]) -> Iterator[Feed]:
    """Feeds whose pools hold only what float16 can hold, so that what is not written stays as it is."""
    for feed in feeds:
        yield {
            name: array.astype(np.float16).astype(np.float32) if name.startswith("kv_cache") else array
            for name, array in feed.items()
        }
