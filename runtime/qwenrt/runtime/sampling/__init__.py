"""From a row of logits to a token: parameters, logits processors, the sampler."""
