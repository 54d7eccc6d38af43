"""Measures a demo checkpoint's held-out accuracy with greedy decoding."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from demo.batches import collate, encode_turns, render_prompt
from demo.tasks import TASKS, Example, held_out
from demo.tokenizer import END_OF_TURN
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

EVALUATION_SEED = 2025
MAX_NEW_TOKENS = 128


@torch.inference_mode()
def forced_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> float:
    """Share of examples whose every answer token is the most probable one given the true prefix.

    One forward pass instead of a decoding loop: greedy decoding yields the answer's tokens
    exactly when each of them is the most probable after the ones before it.
    """
    rows = [encode_turns(tokenizer, [example]) for example in examples]
    batch = collate(rows, tokenizer.pad_token_id)
    predicted = model(batch.ids, use_cache=False).logits[:, :-1].argmax(-1)
    wrong = (predicted != batch.ids[:, 1:]) & batch.is_answer[:, 1:]
    return 1 - float(wrong.any(1).float().mean())


@torch.inference_mode()
def generate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[str]:
    """Greedy completions of the examples' prompts, without `<|im_end|>` and what follows."""
    prompts = [render_prompt(tokenizer, example) for example in examples]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [text.split(END_OF_TURN)[0] for text in completions]


def evaluate_checkpoint(checkpoint: Path, count: int) -> dict[str, float]:
    """Accuracy per task of the checkpoint, computed in float32, over `count` examples each."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    accuracies = {}
    for task in TASKS:
        examples = held_out(task, count, EVALUATION_SEED)
        completions = []
        for start in range(0, count, 50):
            completions += generate(model, tokenizer, examples[start : start + 50])
        pairs = list(zip(examples, completions, strict=True))
        failures = [pair for pair in pairs if pair[0].answer != pair[1]]
        accuracies[task] = 1 - len(failures) / count
        print(f"{task:14s} {accuracies[task]:7.2%} of {count}", flush=True)
        for example, completion in failures[:3]:
            print(f"    expected {example.answer!r}\n    got      {completion!r}")
    return accuracies


def main() -> None:
    """Command line: print the accuracies of a checkpoint directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=400, help="held-out examples per task")
    arguments = parser.parse_args()
    evaluate_checkpoint(arguments.checkpoint, arguments.count)


if __name__ == "__main__":
    main()
