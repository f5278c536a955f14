"""The transformer: weights and arithmetic, without any notion of drafting."""
