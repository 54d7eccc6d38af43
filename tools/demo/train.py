"""Trains the demo checkpoint: a tiny Qwen3 on tasks with exact answers, on two CPU cores."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from demo.batches import TOOL_CHOICE, Batch, BatchStream
from demo.evaluate import evaluate_checkpoint, forced_accuracy
from demo.muon import Muon
from demo.tasks import TASKS, held_out
from demo.tokenizer import END_OF_TEXT, END_OF_TURN, MAX_LENGTH, build_tokenizer, save_tokenizer
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

# Tokens per optimizer step and task; each task's mean loss counts the same.
STEP_TOKENS = {
    "copy": 600,
    "reverse": 600,
    "add": 700,
    "add_thinking": 400,
    "lookup": 1700,
    "tool_call": 900,
    "tool_answer": 200,
    "chat": 500,
}
# What the first two stages leave weakest: the order of words, and which of two tools is meant.
POLISH_STEP_TOKENS = STEP_TOKENS | {"reverse": 900, TOOL_CHOICE: 1800}
MATRIX_LEARNING_RATE = 0.02
EMBEDDING_LEARNING_RATE = 2e-3
# Query and key norms set how sharp attention can get, which look-ups need to grow fast.
NORM_LEARNING_RATE = 6e-3
WARMUP_STEPS = 50
CONSTANT_SHARE = 0.3
CURRICULUM_SHARE = 0.4
REFINE_PEAK = 0.5
SMALLEST_SIZE = 0.15
EVALUATION_INTERVAL = 200
EVALUATION_COUNT = 60
# Of the training runs only; the final evaluation uses another seed.
PROGRESS_SEED = 7


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of about 2 M parameters with random weights."""
    end_ids = [tokenizer.convert_tokens_to_ids(text) for text in (END_OF_TURN, END_OF_TEXT)]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        max_window_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=end_ids[1],
        eos_token_id=end_ids[0],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=end_ids[1], eos_token_id=end_ids, pad_token_id=end_ids[1])
    return model


def answer_loss(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy [] over the answer tokens; only their logits are computed."""
    hidden = model.model(batch.ids, use_cache=False).last_hidden_state
    is_target = batch.is_answer[:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_target])
    return torch.nn.functional.cross_entropy(logits, batch.ids[:, 1:][is_target])


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    adam_groups = [
        {"params": [weight for name, weight in named if "embed" in name], "lr": EMBEDDING_LEARNING_RATE},
        {"params": [weight for _, weight in named if weight.dim() == 1], "lr": NORM_LEARNING_RATE},
    ]
    optimizers = [
        Muon(matrices, lr=MATRIX_LEARNING_RATE, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(adam_groups, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


def learning_rate_factor(step: int, steps: int, constant_share: float) -> float:
    """Linear warm-up, constant, then linear decay to zero."""
    decay = (steps - step) / (steps * (1 - constant_share))
    return min(1.0, (step + 1) / WARMUP_STEPS, decay)


def curriculum_size(step: int, steps: int) -> float:
    """Size of the examples at `step`: grows linearly to 1 over the curriculum."""
    return min(1.0, SMALLEST_SIZE + step / (steps * CURRICULUM_SHARE))


def train_step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batches: dict[str, Iterator[Batch]],
    factor: float,
) -> dict[str, float]:
    """One update from one batch per task; returns the loss per task in nats per token."""
    losses = {}
    for task, stream in batches.items():
        loss = answer_loss(model, next(stream))
        torch.autograd.backward(loss)
        losses[task] = loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * len(batches))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def released_config(config: Qwen3Config) -> dict[str, Any]:
    """The fields of config.json under the names that the released Qwen3 checkpoints use."""
    fields = config.to_diff_dict()
    rope = fields.pop("rope_parameters")
    del fields["layer_types"], fields["dtype"]
    fields |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": "bfloat16"}
    return dict(sorted(fields.items()))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the checkpoint with the weights in bfloat16; the model itself stays float32."""
    reduced = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    reduced.load_state_dict(model.state_dict())
    reduced.generation_config = model.generation_config
    reduced.save_pretrained(directory)
    text = json.dumps(released_config(reduced.config), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer, directory)


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, losses: dict[str, float]) -> None:
    """Print the losses and the accuracy on a few held-out examples per task."""
    print("  loss    ", " ".join(f"{task} {loss:.4f}" for task, loss in losses.items()))
    accuracies = {
        task: forced_accuracy(model, tokenizer, held_out(task, EVALUATION_COUNT, PROGRESS_SEED)) for task in TASKS
    }
    print("  accuracy", " ".join(f"{t} {a:.0%}" for t, a in accuracies.items()), flush=True)


def fit(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    checkpoint: Path,
    schedule: Iterable[tuple[float, float]],
    step_tokens: dict[str, int],
    seed: int,
) -> None:
    """One update for each (learning-rate factor, size of the examples) of `schedule`; leaves the latest state in `checkpoint`."""
    optimizers = build_optimizers(model)
    streams = {t: BatchStream(tokenizer, t, n, seed) for t, n in step_tokens.items()}
    batches = {task: iter(stream) for task, stream in streams.items()}
    steps = list(schedule)
    started, started_cpu = time.monotonic(), time.process_time()
    for step, (factor, size) in enumerate(steps):
        for stream in streams.values():
            stream.size = size
        losses = train_step(model, optimizers, batches, factor)
        if (step + 1) % EVALUATION_INTERVAL == 0 or step + 1 == len(steps):
            wall, cpu = time.monotonic() - started, time.process_time() - started_cpu
            print(f"step {step + 1}: {wall / 60:.1f} min wall, {cpu / 60:.1f} min CPU")
            report(model, tokenizer, losses)
            save(model, tokenizer, checkpoint)


def train(checkpoint: Path, steps: int, seed: int) -> None:
    """Train from random weights for `steps` updates, on short examples first."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters")
    schedule = ((learning_rate_factor(i, steps, CONSTANT_SHARE), curriculum_size(i, steps)) for i in range(steps))
    fit(model, tokenizer, checkpoint, schedule, STEP_TOKENS, seed)


def refine(checkpoint: Path, steps: int, step_tokens: dict[str, int], seed: int) -> None:
    """Train the saved checkpoint for `steps` more updates on full-size examples, from a lower learning rate down to zero."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    schedule = ((REFINE_PEAK * learning_rate_factor(i, steps, 0.0), 1.0) for i in range(steps))
    fit(model, tokenizer, checkpoint, schedule, step_tokens, seed)


def main() -> None:
    """Command line: train a checkpoint and print its held-out accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="directory to write")
    parser.add_argument("--steps", type=int, default=1800, help="optimizer updates from random weights")
    parser.add_argument("--refine-steps", type=int, default=700, help="further updates on full-size examples")
    parser.add_argument("--polish-steps", type=int, default=1200, help="last updates, with more of what is still weak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    train(arguments.checkpoint, arguments.steps, arguments.seed)
    refine(arguments.checkpoint, arguments.refine_steps, STEP_TOKENS, arguments.seed + 1)
    refine(arguments.checkpoint, arguments.polish_steps, POLISH_STEP_TOKENS, arguments.seed + 2)
    evaluate_checkpoint(arguments.checkpoint, 400)


if __name__ == "__main__":
    main()
