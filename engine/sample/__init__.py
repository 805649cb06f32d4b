"""From logits to tokens: the one sampler step."""
