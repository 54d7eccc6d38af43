"""LoRA adapters as models of the server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from qwenrt.exporter import export
from qwenrt.runtime import LLM, LoRARequest, SamplingParams
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint

from .conftest import Server

PROMPT = "What does it say?"
NAMES = ("demo", "one", "two")


class Served:
    """A server with two adapters, and what an LLM of its own answers with each."""

    def __init__(self, folder: Path) -> None:
        base = write_checkpoint(folder / "checkpoint", num_hidden_layers=2, seed=8)
        engine = export(base, folder / "engine", block_size=8, max_lora_rank=4).path
        adapters = [
            LoRARequest(name, write_adapter(folder / name, base, seed=len(name) + i))
            for i, name in enumerate(NAMES[1:])
        ]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = LLM(engine).generate([PROMPT] * 3, params, lora_request=[None, *adapters])
        self.texts = dict(zip(NAMES, (output.outputs[0].text for output in outputs), strict=True))
        self.server = Server(LLM(engine, max_loras=1), adapters=adapters)
        self.client = self.server.client()

    def complete(self, model: str) -> tuple[str, str]:
        answer = self.client.completions.create(
            model=model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.model, answer.choices[0].text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("adapters"))
    yield served
    served.server.until(lambda: served.server.is_idle)
    served.server.stop()


def test_models_are_listed_with_their_parent(served: Served) -> None:
    models = served.client.models.list().data
    assert [(model.id, getattr(model, "parent", None)) for model in models] == [
        ("demo", None), ("one", "demo"), ("two", "demo"),
    ]  # fmt: skip
    assert served.client.models.retrieve("two").id == "two"


def test_each_model_answers_for_itself_also_at_once(served: Served) -> None:
    assert len(set(served.texts.values())) == 3
    with ThreadPoolExecutor(9) as pool:
        for (model, text), name in zip(pool.map(served.complete, NAMES * 3), NAMES * 3, strict=True):
            assert (model, text) == (name, served.texts[name])


def test_chats_and_responses_name_their_model(served: Served) -> None:
    for name in NAMES:
        chat = served.client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4
        )
        assert chat.model == name
        assert served.client.responses.create(model=name, input="hi", max_output_tokens=4).model == name


def test_another_name_is_refused_with_those_that_there_are(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'three' does not exist; this server has 'demo', 'one', 'two'"):
        served.complete("three")
