"""plora_jax: train many LoRA configurations at once on one frozen base model."""
